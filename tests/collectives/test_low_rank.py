"""low_rank: the factors of matrices are summed, and what they leave out is kept."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Part
from fusionlayer.codecs.lowrank.factors import product, random_factor
from fusionlayer.codecs.lowrank.powersgd import PowerSGD
from fusionlayer.transport import Transport
from tests.collectives.conformance import same_everywhere
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

SHAPES = {"matrix": (60, 40), "vector": (33,), "kernel": (16, 8, 3, 3), "small": (3, 4), "scalar": (), "wide": (10, 90)}
GAP = 5


def parts_of(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Part]:
    """Return tensors with gaps between them, as a plan may leave."""
    parts, start = [], 0
    for name, shape in shapes.items():
        parts.append(Part(name, shape, start))
        start = parts[-1].stop + GAP
    return parts


def given(rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    return {
        name: gradient(math.prod(shape), 5000 + 100 * rank + 10 * step + i).view(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def flat(tensors: dict[str, Tensor], parts: Sequence[Part]) -> Tensor:
    x = torch.zeros(parts[-1].stop + GAP)
    for part in parts:
        x[part.start : part.stop] = tensors[part.name].reshape(-1)
    return x


def in_the_papers_words(world: int, steps: int, rank: int, rate: float = 2.0) -> list[dict[str, Tensor]]:
    """Return the sums of each step by algorithms 1 and 2 of the paper, in f64, with error feedback and warm start."""
    errors = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(world)]
    starts: dict[str, Tensor] = {}
    results = []
    for step in range(steps):
        deltas = [
            {name: x.double() + errors[worker][name] for name, x in given(worker, step).items()}
            for worker in range(world)
        ]
        sums = {}
        for name, shape in SHAPES.items():
            whole = torch.stack([delta[name] for delta in deltas]).sum(0)
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
            r = min(rank, rows, columns)
            if (rows + columns) * r * rate >= rows * columns:
                sums[name] = whole
                for worker in range(world):
                    errors[worker][name].zero_()
                continue
            each = [delta[name].reshape(rows, columns) for delta in deltas]
            q = starts.get(name, random_factor(r, columns, *name.encode()).T.double())
            p = torch.linalg.qr(torch.stack([m @ q for m in each]).sum(0)).Q
            qs = [m.T @ p for m in each]
            starts[name] = torch.stack(qs).sum(0)
            sums[name] = (p @ starts[name].T).view(shape)
            for worker in range(world):
                errors[worker][name] = (each[worker] - p @ qs[worker].T).view(shape)
        results.append(sums)
    return results


@looped("factors", ["f32", "bf16"])
@looped("world, rank", [(1, 1), (2, 2), (3, 3), (4, 4), (3, 8)])
def test_it_is_the_papers_algorithm(world: int, rank: int, factors: str) -> None:
    steps = 4
    expected = in_the_papers_words(world, steps, rank)
    exact = factors == "f32"

    def body(transport: Transport) -> Tensor:
        parts = parts_of()
        codec = codecs.get("powersgd", rank=rank, factors=factors).bare.for_parts(parts)
        residual = torch.zeros(parts[-1].stop + GAP)
        balance = torch.zeros_like(residual)
        for step in range(steps):
            x = flat(given(transport.rank, step), parts)
            balance -= x
            collectives.get("low_rank")(x, codec, transport, seed=step, residual=residual)
            assert same_everywhere(transport, x)
            for part in parts:
                wanted = expected[step][part.name].reshape(-1)
                error = (x[part.start : part.stop].double() - wanted).norm()
                assert error <= (2e-5 if exact else 0.1) * wanted.norm() + 1e-6, (step, part.name)
            balance += x / transport.size
        transport.all_reduce(balance)
        total = residual.clone()
        transport.all_reduce(total)
        assert (balance + total).abs().max() < 1e-5, "something was lost or counted twice"
        return residual

    over_threads(world, body)


def test_bytes_are_those_of_the_factors() -> None:
    parts, world = parts_of({"matrix": (60, 40), "vector": (33,)}), 3

    def body(transport: Transport) -> None:
        for factors, itemsize in (("f32", 4), ("bf16", 2)):
            codec = codecs.get("powersgd", rank=2, factors=factors).bare.for_parts(parts)
            before = transport.bytes_sent
            collectives.get("low_rank")(flat(given(0, 0), parts), codec, transport)
            sent = transport.bytes_sent - before
            payload = 2 * (world - 1) * itemsize * (2 * (60 + 40) + 33) / world
            assert payload - 2 < sent <= payload + 2 * world * 128, "messages of codes are filled up to 128 bytes"

    over_threads(world, body)


@on_threads(2)
def test_directions_that_were_not_there_are_found_when_they_come(transport: Transport) -> None:
    """After zeros and steps of rank 1 all of a matrix of rank 3 is found; a start of zeros would never leave them."""
    codec = codecs.get("powersgd", rank=3).bare.for_parts([Part("x", (50, 30))])
    for step, rank in enumerate((0, 1, 1, 3, 3)):
        x = torch.zeros(50, 30)
        if rank:
            product(gradient(rank * 50, step).view(rank, -1), gradient(rank * 30, 20 + step).view(rank, -1), x)
        expected = x * transport.size
        collectives.get("low_rank")(x.view(-1), codec, transport, seed=step)
        assert (x - expected).norm() <= 1e-4 * expected.norm(), step


@looped("name", ["matrix", "vector"])
@on_threads(2)
def test_an_overflow_is_seen_once_and_spoils_nothing(transport: Transport, name: str) -> None:
    parts = parts_of()
    codec = codecs.get("powersgd", rank=2).bare.for_parts(parts)
    part = next(part for part in parts if part.name == name)
    residual = torch.zeros(parts[-1].stop + GAP)
    for step, value in enumerate((None, torch.inf, torch.nan, None, None)):
        x = flat(given(transport.rank, step), parts)
        kept = {part.name: part.state.tensors["right"].clone() for part in parts if part.state.tensors}
        if value is not None and transport.rank == 1:
            x[part.start + 7] = value
        collectives.get("low_rank")(x, codec, transport, seed=step, residual=residual)
        assert same_everywhere(transport, x) and residual.isfinite().all()
        assert x.isfinite().all() == (value is None)
        if value is not None:
            assert not x[part.start + 7].isfinite()
        for each in parts:
            if each.state.tensors:
                assert each.state.tensors["right"].isfinite().all()
                same = each.name in kept and torch.equal(kept[each.name], each.state.tensors["right"])
                assert same == (value is not None and name == "matrix")


def test_what_is_kept_is_used_and_only_with_warm_start() -> None:
    def body(transport: Transport) -> list[float]:
        errors = []
        for warm_start in (True, False):
            part = Part("x", (64, 64))
            codec = codecs.get("powersgd", rank=2, warm_start=warm_start).bare.for_parts([part])
            for step in range(6):
                x = gradient(64 * 64, transport.rank)
                exact = x.clone()
                transport.all_reduce(exact)
                collectives.get("low_rank")(x, codec, transport, seed=step)
            errors.append(float((x - exact).norm() / exact.norm()))
            assert set(part.state.tensors) == ({"right"} if warm_start else set())
        first, second = (gradient(64 * 64, transport.rank) for _ in range(2))
        for seed, x in enumerate((first, second)):
            collectives.get("low_rank")(x, codec, transport, seed=seed)
        assert not torch.equal(first, second), "a start is drawn anew in each step"
        values = torch.linalg.svdvals(exact.view(64, 64))
        best = float(values[2:].norm() / values.norm())
        return [error / best for error in errors]

    warm, cold = over_threads(2, body)[0]
    assert 1 <= warm < 1.01 < cold, "repeated steps come to the best matrix of that rank"


def test_states_of_another_rank_begin_anew() -> None:
    part = Part("x", (64, 64))
    part.state.tensors["right"] = torch.ones(3)

    def body(transport: Transport) -> Tensor:
        x = gradient(64 * 64, 1)
        collectives.get("low_rank")(x, codecs.get("powersgd").bare.for_parts([part]), transport)
        return x

    assert over_threads(1, body)[0].any() and part.state.tensors["right"].numel() == 4 * 64


@on_threads(2)
def test_steps_of_the_warm_up_are_sums_of_the_values(transport: Transport) -> None:
    codec = codecs.get("powersgd", warmup_steps=2)
    assert [codec.at_step(step).name for step in range(4)] == ["raw", "raw", "powersgd", "powersgd"]
    assert codec.at_step(5) == codec
    x = given(transport.rank, 0)["matrix"].reshape(-1).clone()
    expected = x.clone()
    transport.all_reduce(expected)
    collectives.get("low_rank")(x, codec.at_step(0), transport, residual=torch.zeros_like(x))
    assert torch.equal(x, expected)


def test_parts_are_no_options() -> None:
    codec = codecs.get("powersgd")
    with_parts = codec.for_parts(parts_of())
    assert isinstance(with_parts, PowerSGD) and with_parts == codec and str(with_parts) == str(codec)
    assert "parts" not in with_parts.options


@looped("options", [{"codec": "int8"}, {"codec": "topk"}], ids=str)
@on_threads(1)
def test_other_codecs_are_refused(transport: Transport, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sums the factors of matrices and cannot use"):
        collectives.get("low_rank")(torch.ones(8), codecs.get(options["codec"]).bare, transport)
