"""The same call gives the same bits from every front: one choice of collective, one place where values are scaled."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import collectives, context
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import Codec, Part, PartsCodec
from fusionlayer.parallel.tensor_parallel import Channel
from fusionlayer.torch.compression import CodecCompressor
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.harness import run_ranks
from tests.loops import looped
from tests.ranks import on_threads
from tests.synthetic import gradient
from tests.tiers import tiered

WORLDS = (2, 3, 4)
SHAPE = (24, 128)  # whole blocks of every codec for each of up to four ranks
DTYPES = (torch.float32, torch.float16)
CALLED = ((torch.float32, True), (torch.float16, True), (torch.float32, False))

# What seeds a front may have used: which number a call has on a transport that it does not share is its own affair.
CALLS = tuple(derive_seed(number) for number in range(8))
BUCKET = (derive_seed(0, 0), derive_seed(0))


def mine(rank: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's values; sums of float16 are out of range, averages are not."""
    scale = 3e4 if dtype is torch.float16 else 1.0
    x = gradient(SHAPE[0] * SHAPE[1], 500 + rank)
    return (x * (scale / float(x.abs().max()))).to(dtype).view(SHAPE)


def fresh(codec: Codec) -> Codec:
    """Return the codec with nothing kept of other sums."""
    return type(codec)(**codec.options, header=False)


def by_hand(transport: Transport, codec: Codec, x: Tensor, seed: int, *, average: bool, told: bool = True) -> Tensor:
    """Return the reduction as docs/architecture.md says it: floats are divided before the sum."""
    size, codec = transport.size, fresh(codec)
    flat = (x * (1 / size) if average else x.clone()).view(-1)
    name = codec.collective or ("dense" if codec.lossless else "one_shot" if size == 2 else "two_shot")
    if size == 2 and codec.name in ("dynamiq", "thc"):
        name = "one_shot"
    elif name == "butterfly" and size & (size - 1):
        name = "ring"
    fitted = codec.for_parts([Part("", SHAPE)]) if told and isinstance(codec, PartsCodec) else codec
    collectives.get(name)(flat, fitted, transport, seed=seed)
    return flat.view(SHAPE)


def is_by_hand(
    transport: Transport,
    codec: Codec,
    x: Tensor,
    got: Tensor,
    seeds: Iterable[int],
    *,
    average: bool,
    told: bool = True,
) -> bool:
    """Return whether ``got`` has the bits of one of ``seeds``; every rank tries all of them."""
    tries = [by_hand(transport, codec, x, seed, average=average, told=told) for seed in dict.fromkeys(seeds)]
    return any(torch.equal(each.view(torch.uint8), got.contiguous().view(torch.uint8)) for each in tries)


# ---- fronts: each returns what its call makes of x ------------------------------------------------------------------


def functional(transport: Transport, codec: Codec, x: Tensor, *, average: bool) -> Tensor:
    return fl.all_reduce(x.clone(), fresh(codec), op=fl.Average if average else fl.Sum, group=transport)


def optimizer(transport: Transport, codec: Codec, x: Tensor, *, average: bool) -> Tensor:
    weight = nn.Parameter(torch.zeros(SHAPE, dtype=x.dtype))
    wrapped: Any = fl.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        [("", weight)],
        codec=fresh(codec),
        op=fl.Average if average else fl.Sum,
        ahead=False,
        error_feedback=False,
    )
    (weight * x).sum().backward()
    wrapped.synchronize()
    assert weight.grad is not None
    wrapped.close()
    return weight.grad


def by_name(transport: Transport, codec: Codec, x: Tensor, *, average: bool) -> Tensor:
    hvd.init()
    compression = CodecCompressor(codec.name, **codec.options)
    out = hvd.allreduce(x, name="x", compression=compression, op=hvd.Average if average else hvd.Sum)
    hvd.shutdown()
    return out


def channel(transport: Transport, codec: Codec, x: Tensor, *, average: bool) -> Tensor:
    return Channel(transport, fresh(codec)).reduce(x * (1 / transport.size) if average else x)


Front = Callable[..., Tensor]
THREADED: dict[str, tuple[Front, tuple[int, ...]]] = {
    "functional": (functional, CALLS),
    "optimizer": (optimizer, BUCKET),
    "by_name": (by_name, CALLS),
    "channel": (channel, CALLS),
}
# What a front cannot do. Both lose most of a tensor without error feedback, which activations do not have.
EXCEPTIONS = {("channel", "powersgd"), ("channel", "oktopk")}


def is_fast(front: str, codec: Codec, world: int) -> bool:
    """One codec of each kind has every front. The others have one, by turns: they get there by the same way."""
    turn = [*THREADED].index(front) == defaults().index(codec) % len(THREADED)
    return (world == 3 and (is_kind(codec) or turn)) or codec.name == "raw"


# Two ranks reduce otherwise than three; four as three do.
CASES = [case for case in product(THREADED, defaults(), WORLDS) if case[-1] < 4 or is_fast(*case)]


@looped("front, codec, world", tiered([case for case in CASES if (case[0], case[1].name) not in EXCEPTIONS], is_fast))
@on_threads()
def test_every_front_gives_the_same_bits(transport: Transport, front: str, codec: Codec, world: int) -> None:
    call, seeds = THREADED[front]
    for dtype, average in CALLED:
        x = mine(transport.rank, dtype)
        got = call(transport.duplicate(), codec, x, average=average)
        assert is_by_hand(transport, codec, x, got, seeds, average=average), (dtype, average)
        assert not average or got.isfinite().all(), "an average that is in range has overflowed"


def group_call(codec: Codec, x: Tensor, *, average: bool) -> Tensor:
    rules = {"min_bytes": 0, "rules": [{"codec": codec.name, "options": codec.options}]}
    group = dist.new_group(pg_options=rules)
    out = x.clone()
    dist.all_reduce(out, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group)
    dist.destroy_process_group(group)
    return out


def ddp_hook(codec: Codec, x: Tensor) -> Tensor:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=x.dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    model = nn.parallel.DistributedDataParallel(One())
    hook = fl.ddp.register(model, fresh(codec), ahead=False, error_feedback=False)
    model(x).backward()
    hook.close()
    assert model.module.weight.grad is not None
    return model.module.weight.grad


def chosen(kinds_alone: bool) -> list[Codec]:
    return [codec for codec in defaults() if is_kind(codec) or not kinds_alone]


def check_processes(rank: int, world: int, kinds_alone: bool) -> list[str]:
    """Return the codecs that groups refuse: they need error feedback, which a group has only from its callers."""
    transport = context.transport(None).duplicate()
    refused = []
    for codec in chosen(kinds_alone):
        for dtype in DTYPES:
            x = mine(rank, dtype)
            if codec.name != "powersgd":  # its factors begin from the parameter's name, which others do not have
                got = ddp_hook(codec, x)
                assert is_by_hand(transport, codec, x, got, BUCKET, average=True), ("ddp", codec, dtype)
            for average in (True, False) if codec.name != "raw" else ():  # raw passes to the native backend
                try:
                    got = group_call(codec, x, average=average)
                except ConfigError:
                    refused.append(codec.name)
                    break
                seeds = [derive_seed(derive_seed(0), call) for call in range(4)]
                assert is_by_hand(transport, codec, x, got, seeds, average=average, told=False), ("group", codec, dtype)
    return sorted(set(refused))


@pytest.mark.medium
@pytest.mark.parametrize(
    "world, kinds_alone",
    tiered([(3, True), (2, False), (4, False)], lambda world, kinds_alone: kinds_alone, lambda world, _: world < 4),
)
def test_process_groups_and_ddp_give_the_same_bits(world: int, kinds_alone: bool) -> None:
    selective = sorted({codec.name for codec in chosen(kinds_alone) if codec.ahead or codec.needs_feedback})
    found = run_ranks(check_processes, world, kinds_alone, backend="fusionlayer")
    assert found == [selective] * world
