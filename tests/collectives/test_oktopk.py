"""The sparse all-reduce: what comes out, what is kept, what travels."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.codecs import Codec, Part, PartsCodec
from fusionlayer.transport import Transport
from fusionlayer.transport.c10d import C10dTransport
from tests.codecs.toy_sparse import toy_sparse
from tests.loops import looped
from tests.ranks import on_processes, on_threads, over_threads
from tests.synthetic import gradient
from tests.tiers import tiered

from .conformance import DTYPES, same_everywhere

LENGTHS = (0, 1, 7, 129, 1000, 4097)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_sparse():
        yield


def given(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of which ranks select many in common, in different numbers; the fourth rank of five none."""
    x = (gradient(numel, step) + gradient(numel, 100 * (rank + 1) + step) / 4) * (1 + rank / 7)
    if rank % 5 == 3:
        x.zero_()
    x[: numel * (rank % 3) // 4] *= 2.0**-9
    return x.to(dtype)


def expect(inputs: list[Tensor], residuals: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return the sum that is right and how many elements passed; ``residuals`` become what ranks keep."""
    codec = codecs.get("toysparse", density=0.1, threshold=0.01)
    numel = inputs[0].numel()
    total, touched = torch.zeros(numel), torch.zeros(numel, dtype=torch.bool)
    sent = []
    for x, residual in zip(inputs, residuals, strict=True):
        wanted = x + residual
        part = torch.zeros(numel)
        if numel:
            codec.decode(codec.compress(wanted.to(dtype)), part, dtype=dtype)
        residual.copy_(wanted - part)
        total += part
        touched |= part != 0
        sent.append(part)
    k = max(1, sum(int((part != 0).sum()) for part in sent) // len(inputs))
    ordered = total[touched].abs().sort(descending=True).values
    passed = touched & (total.abs() >= (ordered[k - 1] if len(ordered) >= k else 0))
    for part, residual in zip(sent, residuals, strict=True):
        residual += torch.where(passed, torch.zeros(numel), part)
    return torch.where(passed, total, torch.zeros(numel)), int(passed.sum())


def check(transport: Transport, numel: int, dtype: torch.dtype, feedback: bool) -> None:
    """The dense sum of what was selected, restricted to what passed; everything else is kept, to the last bit."""
    codec = codecs.get("toysparse", density=0.1, threshold=0.01).bare
    residuals = [torch.zeros(numel) for _ in range(transport.size)]
    mine = torch.zeros(numel)
    for step in range(3):
        if not feedback:
            residuals = [torch.zeros(numel) for _ in range(transport.size)]
        inputs = [given(rank, step, numel, dtype) for rank in range(transport.size)]
        expected, _ = expect(inputs, residuals, dtype)
        x = inputs[transport.rank].clone()
        collectives.get("oktopk")(x, codec, transport, seed=step, residual=mine if feedback else None)
        assert torch.equal(x, expected.to(dtype))
        assert not feedback or torch.equal(mine, residuals[transport.rank])
        assert same_everywhere(transport, x)


@looped("feedback", [False, True])
@looped("dtype", DTYPES)
@pytest.mark.parametrize("world", tiered([1, 2, 3, 4, 8], lambda world: world in (2, 3)))
@on_threads()
def test_sums_and_residuals_are_exact(transport: Transport, world: int, dtype: torch.dtype, feedback: bool) -> None:
    for numel in LENGTHS:
        check(transport, numel, dtype, feedback)


@looped("world", [2, 5])
@on_threads()
def test_values_that_are_not_finite_reach_all_and_are_not_kept(transport: Transport, world: int) -> None:
    x = given(transport.rank, 0, 500)
    if transport.rank == 1:
        x[100:200] = torch.nan
        x[300] = torch.inf
    residual = torch.zeros(500)
    codec = codecs.get("toysparse", density=0.5).bare
    collectives.get("oktopk")(x, codec, transport, residual=residual)
    assert x[100:200].isnan().all() and x[300] == torch.inf and residual.isfinite().all()
    assert same_everywhere(transport, x)


@on_threads(3)
def test_no_value_that_is_not_finite_is_crowded_out_by_others(transport: Transport) -> None:
    """More of them than would pass, and a NaN is larger than an Inf."""
    x = given(transport.rank, 0, 500)
    x[10 * transport.rank : 10 * transport.rank + 10] = torch.nan if transport.rank else torch.inf
    residual = torch.zeros(500)
    collectives.get("oktopk")(x, codecs.get("toysparse", density=0.02).bare, transport, residual=residual)
    assert x[:10].isinf().all() and x[10:30].isnan().all() and residual.isfinite().all()


@looped("world", [2, 4, 8])
def test_volume_does_not_grow_with_the_ranks(world: int) -> None:
    """2 (size - 1) / size * 8k bytes of pairs, and what is needed to agree."""
    numel, k = 1 << 17, 1 << 13

    def body(transport: Transport) -> int:
        x = gradient(numel, 1) + gradient(numel, 2 + transport.rank) / 8
        codec = codecs.get("toysparse", density=k / numel).bare
        before = transport.bytes_sent
        collectives.get("oktopk")(x, codec, transport)
        return transport.bytes_sent - before

    pairs = 2 * (world - 1) / world * 8 * k
    assert all(0.8 * pairs < sent < 1.2 * pairs + 2 * 4 * 1024 for sent in over_threads(world, body))


def periodic(numel: int, **options: float) -> tuple[Codec, Part]:
    """Return the codec ``oktopk`` for a bucket of one tensor, and that tensor with what is kept of it."""
    part = Part("w", (numel,))
    codec = codecs.get("oktopk", **options).bare
    assert isinstance(codec, PartsCodec)
    return codec.for_parts([part]), part


def test_thresholds_and_regions_serve_many_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions ``tau`` sums, the threshold ``reuse``; where a rank has lost what it kept, all find both anew at once."""
    world, numel, steps, lost, at = 3, 4000, 13, 10, [0] * 3
    found: dict[str, list[tuple[int, int]]] = {"_boundaries": [], "_kth_largest": []}
    module = importlib.import_module("fusionlayer.collectives.oktopk")
    for name, made in found.items():
        real = getattr(module, name)

        def spied(*given: Any, real: Any = real, made: list[tuple[int, int]] = made) -> Any:
            made.append((given[-1].rank, at[given[-1].rank]))
            return real(*given)

        monkeypatch.setattr(module, name, spied)

    def body(transport: Transport) -> None:
        rank = transport.rank
        codec, part = periodic(numel, density=0.05, reuse=4, tau=6)
        for step in range(steps):
            at[rank] = step
            if step == lost and rank == 1:
                part.state.numbers.clear()
            x = normal(7) / 2 + normal(100 * rank + step)
            collectives.get("oktopk")(x, codec, transport, seed=step)
            assert same_everywhere(transport, x) and 50 < int(x.count_nonzero()) < 400

    def normal(seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    over_threads(world, body)
    for name, steps_of in (("_boundaries", [0, 6, lost]), ("_kth_largest", [0, 4, 8, lost])):
        assert sorted(found[name]) == [(rank, step) for rank in range(world) for step in steps_of]


def test_no_rank_sends_more_than_the_bound_of_the_paper() -> None:
    """6 k (P - 1) / P words, where the sums that pass lie in one region; and then, results are what they would be."""
    world, k, zone = 8, 8000, 64_000
    numel, each = world * zone, k // world

    def body(transport: Transport) -> tuple[int, int]:
        codec, _ = periodic(numel, density=k / numel)
        given = torch.zeros(numel)
        for j in range(world):
            given[j * zone + torch.arange(each) * world + transport.rank] = 1.0 if j else 10.0
        sent, residual = [], torch.zeros(numel)
        for _ in range(2):  # the second with what the first has found
            x, before = given.clone(), transport.bytes_sent
            residual.zero_()
            collectives.get("oktopk")(x, codec, transport, residual=residual)
            sent.append(transport.bytes_sent - before)
            assert int(x[:zone].count_nonzero()) == k and (x[:k] == 10).all() and not x[zone:].any()
            assert torch.equal(residual[zone:], given[zone:]) and not residual[:zone].any()
        return sent[0], sent[1]

    bound = 6 * k * (world - 1) / world * 4
    found = over_threads(world, body)
    assert max(second for _, second in found) <= bound + 1024, "sizes are a few hundred bytes"
    assert max(first for first, _ in found) <= bound + 16 * 1024, "histograms, too"


@pytest.mark.medium
@pytest.mark.parametrize("world", [2, 3])
@on_processes()
def test_over_processes(rank: int, world: int) -> None:
    with toy_sparse():
        transport = C10dTransport(None)
        for numel in LENGTHS:
            check(transport, numel, torch.float32, True)
        transport.close()
