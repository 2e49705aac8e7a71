"""Replicas are equal from the first step on, and ranks whose parameters part are told which."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base.config import Config
from fusionlayer.training import digests, replicas
from fusionlayer.training.digests import sum_of_bits
from fusionlayer.training.replicas import Replicas, broadcast_from_0
from fusionlayer.transport import Transport, local
from tests.integrations.training import fill, loss_of, make_model, train, weights
from tests.loops import looped
from tests.ranks import on_ranks, over_threads


class Mixed(nn.Module):
    """Two types, a frozen layer that the optimizer has, one that it lacks, and a buffer; of its own on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = make_model()
        self.halved = nn.Linear(5, 3).to(torch.bfloat16)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.apart = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0 + rank, -0.0 if rank else 0.0]), persistent=False)
        self.register_buffer("graph", torch.eye(3).to_sparse())  # has no plain memory, and is left alone
        self.register_buffer("none", torch.empty(2, device="meta"))
        fill(self, rank)
        self.body[0].weight.data = self.body[0].weight.data.t().contiguous().t()

    def trained(self) -> list[nn.Parameter]:
        return [*self.body.parameters(), *self.halved.parameters(), *self.frozen.parameters()]


def contents(model: nn.Module) -> list[Tensor]:
    return [
        x.detach().clone()
        for x in (*model.parameters(), *model.buffers())
        if x.layout is torch.strided and not x.is_meta
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_begin_with_rank_0s_values_of_all_that_is_known(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FUSED_BYTES", 512)  # so that there are several messages

    def body(transport: Transport) -> tuple[list[Tensor], list[Tensor], int]:
        model = Mixed(transport.rank)
        model.body[2].weight.data.fill_(0.25)  # equal on all ranks, so it does not travel
        before = contents(model)
        optimizer: Any = fl.DistributedOptimizer(SGD(model.trained(), lr=0.1), model)
        after = contents(model)
        # Names alone tell nothing of buffers, and nothing of parameters that are neither trained nor the optimizer's.
        again = Mixed(transport.rank)
        named: Any = fl.DistributedOptimizer(SGD(again.trained(), lr=0.1), again.named_parameters())
        expected = contents(Mixed(0))[:-3] + contents(Mixed(transport.rank))[-3:]
        assert all(same_bits(a, b) for a, b in zip(contents(again), expected, strict=True))
        named.close()
        sent = optimizer.reducer.engine.lanes.all[0].transport.bytes_sent
        optimizer.close()
        return before, after, sent

    results = over_threads(world, body)
    first = results[0][0]
    for before, after, sent in results:
        assert all(same_bits(a, b) for a, b in zip(first, after, strict=True))
        assert all(a.stride() == b.stride() for a, b in zip(before, after, strict=True))
        # The weight of 200 elements that was equal already, and digests of 13 tensors.
        assert sent < (world - 1) * (sum(x.nbytes for x in before) - 800 + 16 * 13 + 200)
    assert not any(same_bits(a, b) for a, b in zip(first[:2], results[1][0][:2], strict=True))


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few bytes in a step that the parts of a small model take many."""
    monkeypatch.setattr(digests, "_SHARE_BYTES", 16)
    yield


def damaged(
    rank: int, case: tuple[int, int, tuple[str, int, int]], dtype: torch.dtype, **options: Any
) -> tuple[int, fl.ReplicaMismatch]:
    """Flip a bit on rank 1 before a step; return in which step that was found, and the error."""
    every, at, (name, element, bit) = case
    model = make_model(dtype)
    if options.pop("overlap", False):
        options["overlap_forward"] = model
    optimizer: Any = fl.DistributedOptimizer(SGD(model.parameters(), lr=1e-3), model, check_replicas=every, **options)
    try:
        for step in range(at + 4 * every):
            if step == at and rank == 1:
                optimizer.synchronize() if "overlap_forward" in options and step else None
                bits = model.get_parameter(name).data.view(torch.int32 if dtype is torch.float32 else torch.int16)
                bits.view(-1)[element] ^= 1 << bit
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    except fl.ReplicaMismatch as error:
        return step, error
    finally:
        optimizer.close()
    raise AssertionError("nothing was found")


@pytest.mark.parametrize(
    ("world", "dtype", "as_on_gpu"),
    [(2, torch.float32, False), (2, torch.bfloat16, True), (3, torch.float32, True), (3, torch.bfloat16, False)],
)
def test_a_flipped_bit_is_found_in_time_and_named(
    small_shares: None, world: int, dtype: torch.dtype, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is, and whenever: shares have passed it by in this round, or not."""
    if as_on_gpu:
        monkeypatch.setattr(digests, "_BY_CRC", "no device")
        monkeypatch.setattr(digests, "_GPU_SHARE_BYTES", 100)
    cases = [
        (1, 3, ("0.weight", 0, 0), {}),
        (5, 1, ("0.weight", 959, 3), {}),
        (9, 4, ("0.weight", 17, 14), {"codec": "int8"}),
        (9, 6, ("2.weight", 100, 0), {"overlap": True}),
        (12, 9, ("2.bias", 4, 1), {}),
        (12, 0, ("0.bias", 39, 7), {}),
    ]
    for every, at, where, options in cases:
        for step, error in local.run(partial(damaged, case=(every, at, where), dtype=dtype, **options), world):
            assert at <= step <= at + every, (every, at, step)
            assert error.tensors == (where[0],)
            assert error.ranks == ((1,) if world > 2 else (0, 1))
            assert f"1 of 4 parameters differ over ranks: '{where[0]}' on rank" in str(error)


def test_a_rank_that_skipped_an_update_is_found() -> None:
    """And after a repair ranks train on."""

    def body(rank: int) -> Tensor:
        model = make_model()
        optimizer: Any = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, check_replicas=6)
        train(model, optimizer, rank, range(2))
        loss_of(model, rank, 2).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            if rank != 2:
                optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(fl.ReplicaMismatch, match=r"4 of 4 parameters differ over ranks: '0.weight' on rank 2, "):
            train(model, optimizer, rank, range(3, 9))
        fl.broadcast_parameters(model.state_dict())
        train(model, optimizer, rank, range(9, 16))
        optimizer.close()
        return weights(model)

    results = local.run(body, 3)
    assert all(torch.equal(results[0], other) for other in results)


def test_replicas_that_are_the_users_are_warned_of_once() -> None:
    """With ``broadcast=False``, and with Horovod's optimizer: it leaves the broadcast to its users."""

    def body(make: Callable[..., Any]) -> list[list[warnings.WarningMessage]]:
        def rank_main(rank: int) -> Any:
            hvd.init()
            model = make_model()
            fill(model, rank)
            mine = weights(model)
            optimizer = make(SGD(model.parameters(), lr=0.1), model.named_parameters())
            assert torch.equal(weights(model), mine)
            train(model, optimizer, rank, range(4))
            optimizer.close()
            fill(model)
            equal = make(SGD(model.parameters(), lr=0.1), model.named_parameters())
            train(model, equal, rank, range(4))
            equal.close()
            hvd.shutdown()

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            local.run(rank_main, 2)
        return found

    own = lambda optimizer, named: fl.DistributedOptimizer(optimizer, named, broadcast=False, check_replicas=3)  # noqa: E731
    for make in (own, hvd.DistributedOptimizer):
        texts = [str(warning.message) for warning in body(make)]
        assert len(texts) == 2, texts
        for text in texts:
            assert "4 of 4 parameters differ over ranks: '0.weight' on ranks 0, 1, " in text
            assert "call broadcast_parameters(model.state_dict(), root_rank=0)" in text


@looped("at", [0, 5])
@looped("make", ["own", "broadcast=False", "sharded", "hvd"])
def test_learning_rates_that_differ_are_named_before_parameters_do(make: str, at: int) -> None:
    """In the first step before the update; later within ``check_replicas`` steps, also where parameters differ too."""

    def rank_main(rank: int) -> None:
        model = make_model()
        optimizer: Any
        if make == "sharded":
            optimizer = fl.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, check_replicas=4)
        elif make == "hvd":
            hvd.init()
            optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
        else:
            options = {"broadcast": make == "own", "check_replicas": 4}
            optimizer = fl.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, **options)
        text = r"lr of group 0 is 0\.1 on rank 0, lr of group 0 is 0\.2 on rank 1; .*schedule"
        steps = range(1 if at == 0 else 12)
        if make in ("own", "sharded"):
            with pytest.raises(fl.ReplicaMismatch, match=text) as found:
                train_with(optimizer, model, rank, at, steps)
            assert found.value.ranks == (0, 1)
        else:
            train_with(optimizer, model, rank, at, steps)
        if make == "hvd":
            hvd.shutdown()

    def train_with(optimizer: Any, model: nn.Module, rank: int, at: int, steps: range) -> None:
        for step in steps:
            if step >= at:
                optimizer.param_groups[0]["lr"] = 0.2 if rank else 0.1
            train(model, optimizer, rank, [step])

    if make == "hvd" and at:
        return  # it compares within 200 steps
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        local.run(rank_main, 2)
    texts = [str(warning.message) for warning in warned]
    if make in ("broadcast=False", "hvd"):
        assert len(texts) == 2 and all("lr of group 0 is 0.2 on rank 1" in text for text in texts), texts
        assert not any("broadcast_parameters" in text for text in texts)


@on_ranks(2)
def test_learning_rates_of_local_steps_are_each_ranks_own(rank: int) -> None:
    model = make_model()
    sync = fl.Local.averaging(every=2)
    optimizer: Any = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1 + rank), model, check_replicas=1, sync=sync)
    train(model, optimizer, rank, range(4))


@on_ranks(3)
def test_ranks_that_have_joined_are_not_compared(rank: int) -> None:
    hvd.init()
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), model.named_parameters(), broadcast=True, check_replicas=1
    )
    train(model, optimizer, rank, range(2 if rank == 1 else 5))
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
    train(model, optimizer, rank, range(5, 8))
    if rank == 2:
        model[0].weight.data[3, 3] += 1
    with pytest.raises(fl.ReplicaMismatch, match="'0.weight' on rank 2;"):
        train(model, optimizer, rank, [8])
    optimizer.close()
    hvd.shutdown()


@looped("weights_by", ["raw", "qwd"])
@on_ranks(3)
def test_copies_of_a_sharded_optimizer_are_compared(rank: int, weights_by: str) -> None:
    model = make_model()
    optimizer = fl.ShardedOptimizer(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}],
        SGD,
        weights=weights_by,
        lr=0.1,
        check_replicas=3,
    )
    train(model, optimizer, rank, range(7))
    if rank == 1:
        model[2].weight.data.view(torch.int32)[0, 0] ^= 1  # in rank 0's part
    with pytest.raises(fl.ReplicaMismatch, match="1 of 4 .*'group 1, parameter 0' on rank 1;"):
        train(model, optimizer, rank, range(7, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex128])
def test_a_digest_on_a_gpu_changes_with_every_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is integer arithmetic, the same on the CPU."""
    monkeypatch.setattr(digests, "_SUMMED_AT_A_TIME", 3)
    flat = (torch.arange(7) % 5).to(dtype)
    raw = flat.view(torch.uint8)
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    found = [int(sum_of_bits(bits))]
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            found.append(int(sum_of_bits(bits)))
            raw[byte] ^= 1 << bit
    assert len(set(found)) == len(found) and found[0] == int(sum_of_bits(bits))
    assert int(sum_of_bits(bits.flip(0))) != found[0]


def test_a_rank_that_rejoins_brings_no_values() -> None:
    """A worker that is new in an elastic job makes its optimizer while the others reconnect theirs."""

    def body(transport: Transport) -> float:
        x = torch.full((3,), float(transport.rank))
        Replicas({"x": x}, broadcast=True, every=5).unite(transport, rejoining=transport.rank == 1)
        first = float(x[0])
        Replicas({"x": x}, broadcast=True, every=5).unite(transport)
        assert float(x[0]) == 0.0
        empty = torch.empty(0)
        broadcast_from_0([empty, x], transport)
        return first

    assert over_threads(3, body) == [0.0, 1.0, 2.0]


def test_what_cannot_be_an_option_is_refused() -> None:
    def body(rank: int) -> None:
        for option in ({"broadcast": 1}, {"broadcast": None}, {"check_replicas": -1}, {"check_replicas": "often"}):
            with pytest.raises(fl.ConfigError, match=f"{next(iter(option))}=.*; expected"):
                fl.DistributedOptimizer(SGD(make_model().parameters(), lr=0.1), **option)
        with pytest.raises(fl.ConfigError, match="check_replicas=2.5; expected"):
            fl.ShardedOptimizer(make_model().parameters(), SGD, lr=0.1, check_replicas=2.5)
        for value, expected in [(None, Config.check_replicas), (True, Config.check_replicas), (False, 0), (7, 7)]:
            assert replicas.check_interval(value) == expected

    local.run(body, 1)
    with pytest.raises(fl.ConfigError, match="check_replicas=-2; expected a number of steps"):
        Config(check_replicas=-2)
