"""Seeds: known values, and in no API do two roundings of a job draw the same noise."""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise, product
from typing import Any
from unittest import mock

import torch

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import codecs, collectives, native
from fusionlayer.base.seeds import derive_seed
from fusionlayer.collectives import halves
from fusionlayer.collectives.all_to_all import all_to_all
from fusionlayer.parallel.moe import Dispatcher
from fusionlayer.parallel.tensor_parallel import Channel
from fusionlayer.sharded.replica import Replica
from fusionlayer.transport import local
from tests.integrations.training import make_model, train
from tests.loops import looped
from tests.synthetic import gradient

CODEC = codecs.get("int", bits=4, group_size=32, rounding="stochastic", hadamard=False)
WORLD, STEPS = 4, 4
PACKED = {"error_feedback": True, "feedback_bits": 8}
OPTIONS: list[dict[str, Any]] = [
    *({}, {"planner": "wfbp"}, {"sync": fl.Local.averaging(every=2)}, PACKED, {**PACKED, "ahead": True})
]


def test_known_values() -> None:
    """All ranks of a job compute these by themselves: they may not change between versions."""
    assert derive_seed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0
    assert [derive_seed(1, 2, 3), derive_seed(3, 2, 1), derive_seed(-1)] == [
        0x6AE515C1C0AC7E37,
        0xD62A7F6E291FEF64,
        0xE4D971771B652C20,
    ]


def test_small_numbers_never_collide() -> None:
    """Steps, buckets, ranks, phases: small numbers in every order and of every length."""
    made = [derive_seed(*numbers) for length in range(1, 5) for numbers in product(range(7), repeat=length)]
    assert len(set(made)) == len(made)


@contextmanager
def draws() -> Iterator[dict[int, list[tuple[int, int]]]]:
    """Yield which numbers of each seed's sequence the encodings of the block draw, on all ranks."""
    found, call = defaultdict(list), native.call

    def noting(verb: str, x: torch.Tensor, *given: Any) -> None:
        if verb.startswith(("fl_encode", "fl_recode")):
            spec = [each for each in given if isinstance(each, native.Spec)][-1]
            out = [each for each in given if isinstance(each, native.Messages)][-1]
            numbers = -(-spec.numel // spec.param[1]) * spec.param[1]
            starts = [numbers * row for row in range(out.count)]
            if verb == "fl_recode_rows":
                starts = ctypes.cast(given[-3], ctypes.POINTER(ctypes.c_int64))[: out.count]
            found[spec.seed] += [(spec.offset + start, spec.offset + start + numbers) for start in starts]
        call(verb, x, *given)

    with mock.patch.object(native, "call", noting):
        yield found


def sums(rank: int) -> None:
    """Whole and in pieces; rows and pieces may be ragged. A caller gives each sum another seed."""
    transport, seeds, codec = local.current(), count(), CODEC.bare
    for name, piece in product(("one_shot", "two_shot", "two_level", "ring", "butterfly"), (None, 900)):
        for each in (codec, codecs.get("tlq_hs").bare):
            collectives.get(name)(gradient(9000, rank), each, transport, seed=next(seeds), piece=piece)
    for shares in ((1, 1, 1, 1), (3, 1, 0, 2)):
        collectives.by_shares("two_shot", shares)(gradient(9000, rank), codec, transport, seed=next(seeds))
    for numel, piece in product((320, 1999), (None, 300)):
        x, every, row = gradient(numel, rank), torch.empty(WORLD, numel), torch.empty(numel)
        halves.all_gather(x, every, codec, transport, seed=next(seeds), piece=piece)
        halves.reduce_scatter(every, row, codec, transport, seed=next(seeds), piece=piece)
        halves.ring_reduce_scatter(every, row, codec, transport, seed=next(seeds))
        all_to_all(every.view(-1), every.clone().view(-1), *[[numel] * WORLD] * 2, codec, transport, seed=next(seeds))


def functions(rank: int) -> None:
    fl.init()
    x = gradient(4 * 500, rank)
    for _ in range(STEPS):
        for algorithm in ("one_shot", "two_shot", "two_level", "ring", "butterfly"):
            fl.all_reduce(x.clone(), codec=CODEC, algorithm=algorithm)
        for call in (fl.all_gather, fl.reduce_scatter, fl.all_to_all):
            call(x, codec=CODEC)
    fl.shutdown()


def optimizer(rank: int, **options: Any) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = fl.DistributedOptimizer(sgd, model.named_parameters(), codec=CODEC, **options)
    train(model, made, rank, range(STEPS))
    made.close()


def sharded(rank: int) -> None:
    model = make_model()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = fl.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1, weights="qwd", gradients=CODEC)
    train(model, optimizer, rank, range(STEPS))


def muon(rank: int) -> None:
    model = make_model()
    train(model, fl.Muon(model, codec=CODEC), rank, range(STEPS))


def replicas(rank: int) -> None:
    for number in range(2):
        replica = Replica(CODEC.bare, number)
        replica.memory(WORLD * 500, torch.float32, torch.device("cpu"))
        for version in range(STEPS):
            replica.gather(gradient(500, 7 * version + rank), local.current(), version)


def horovod(rank: int) -> None:
    hvd.init()
    compression = hvd.Compression.int(bits=4, group_size=32, rounding="stochastic")
    for _ in range(STEPS):
        hvd.allreduce(gradient(500, rank), compression=compression)
        hvd.grouped_allreduce([gradient(n, rank) for n in (500, 300)], compression=compression)
    hvd.shutdown()


def model_parallel(rank: int) -> None:
    dispatcher, channel = Dispatcher(local.current(), CODEC), Channel(local.current(), CODEC, piece_bytes=4096)
    for step in range(STEPS):
        x = gradient(8 * 320, 9 * step + rank).view(8, 320).requires_grad_()
        rows, route = dispatcher.dispatch(x, [2] * WORLD)
        rows = channel.copy(dispatcher.combine(rows, route))
        (channel.reduce(rows).sum() + channel.gather(channel.reduce_scatter(rows, 0), 0).square().sum()).backward()


JOBS = [
    sums,
    functions,
    *(partial(optimizer, **each) for each in OPTIONS),
    sharded,
    muon,
    replicas,
    horovod,
    model_parallel,
]


@looped("job", JOBS)
@looped("per_node", [WORLD, 2])
def test_no_two_roundings_draw_the_same_numbers(job: Callable[[int], None], per_node: int) -> None:
    with draws() as found:
        local.run(job, WORLD, ranks_per_node=per_node)
    assert len(found) > STEPS
    for seed, spans in found.items():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start, f"{spans} of seed {seed:x}"
