"""``fl_two_shot`` on several emulated devices: the bits of the collective, in whatever order bytes arrive."""

import ctypes
from typing import cast

import torch
from torch import Tensor

from fusionlayer import codecs, collectives, native
from fusionlayer.codecs import Codec, NativeCodec
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.native.abi import BAD_ARGUMENT, UNSUPPORTED
from tests.native.peers import devices
from tests.ranks import over_threads
from tests.synthetic import gradient
from tests.tiers import tiered

INTEGERS = {
    "int4": codecs.get("int4"),
    "int8": codecs.get("int8"),
    "tlq_hs": codecs.get("tlq_hs"),
    "long groups": codecs.get("int", bits=4, group_size=2048),
    "short groups": codecs.get("int", bits=4, group_size=32, hadamard=True, rounding="stochastic"),
    "full range": codecs.get("int_full"),
}
BLOCKS = {
    "taco": codecs.get("taco"),
    "dual": codecs.get("taco", scales="dual"),
    "long blocks": codecs.get("taco", block_size=512, format="int8"),
    "fp8_block": codecs.get("fp8_block"),
    "mxfp8": codecs.get("mxfp8", scale="bf16"),
    "mxfp4": codecs.get("mxfp4"),
}
CODECS = {name: cast(NativeCodec, codec.bare) for name, codec in (INTEGERS | BLOCKS).items()}
Rank = tuple[Tensor, Tensor | None]


def wanted(codec: Codec, given: list[Rank], seed: int) -> list[Rank]:
    """Return what the collective makes of ``x`` and residual of each rank."""

    def body(transport: Transport) -> Rank:
        x, residual = given[transport.rank]
        x, residual = x.clone(), None if residual is None else residual.clone()
        collectives.get("two_shot")(x, codec, transport, seed=seed, residual=residual)
        return x, residual

    return over_threads(len(given), body)


def bits(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(torch.uint8)


def assert_equal(got: list[Rank], want: list[Rank]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(bits(mine[0]), bits(theirs[0]))
        assert mine[1] is None or torch.equal(bits(mine[1]), bits(theirs[1]))


def inputs(world: int, numel: int, dtype: torch.dtype, residual: bool, start: int = 0) -> list[Rank]:
    return [
        (gradient(numel, start + rank).to(dtype), gradient(numel, start + 50 + rank) * 0.1 if residual else None)
        for rank in range(world)
    ]


@looped(
    "world, name, residual",
    tiered(
        [(world, name, residual) for world in (2, 3, 4) for name in CODECS for residual in (False, True)],
        lambda world, name, residual: world == 2 + 2 * residual and (name in INTEGERS or residual == (len(name) > 4)),
    ),
)
def test_the_sum_has_the_bits_of_the_collective(kernels: ctypes.CDLL, world: int, name: str, residual: bool) -> None:
    """Three calls of different lengths follow each other: a device may begin one while another is in the one before."""
    codec = CODECS[name]
    lengths = [(world * 5000 + 77, torch.float32), (1, torch.bfloat16), (9001, torch.float16)]
    calls = [inputs(world, numel, dtype, residual, 100 * i) for i, (numel, dtype) in enumerate(lengths)]
    with devices(kernels, world, 1 << 16, seed=len(name) + world) as several:
        got: list[list[Rank]] = []
        for number, given in enumerate(calls):
            got.append([(x.clone(), None if kept is None else kept.clone()) for x, kept in given])
            for rank, (x, kept) in enumerate(got[-1]):
                several.two_shot(rank, codec, x, x, kept, seed=number)
        assert several.run(resident=1 + world % 2)
    for number, given in enumerate(calls):
        want = wanted(codec, given, seed=number)
        assert_equal(got[number], want)
        assert all(torch.equal(bits(got[number][0][0]), bits(x)) for x, _ in got[number])


@looped("world", [2, 4])
def test_the_order_in_which_warps_run_and_bytes_arrive_changes_nothing(kernels: ctypes.CDLL, world: int) -> None:
    """Two calls, the second one longer, so that its parts lie where sums of the first would lie if calls moved them."""
    codec, lengths = CODECS["int4"], (world * 1200, world * 9000)
    calls = [inputs(world, numel, torch.float32, True, 10 * i) for i, numel in enumerate(lengths)]
    want = [wanted(codec, given, seed=i) for i, given in enumerate(calls)]
    for order in range(30):
        with devices(kernels, world, 1 << 16, seed=order) as several:
            got = [[(x.clone(), cast(Tensor, kept).clone()) for x, kept in given] for given in calls]
            for number, given in enumerate(got):
                for rank, (x, kept) in enumerate(given):
                    several.two_shot(rank, codec, x, x, kept, seed=number)
            assert several.run(resident=1 + order % 2)
        for mine, theirs in zip(got, want, strict=True):
            assert_equal(mine, theirs)


@looped("name, residual", [("int4", True), ("int8", False), ("taco", False)])
def test_rounds_of_several_spans(kernels: ctypes.CDLL, name: str, residual: bool) -> None:
    """Shares of 70 and 171 spans, for 8 warps: 2 and 4 in a round, and the last ones fewer."""
    codec = CODECS[name]
    for spans in (70, 171):
        given = inputs(2, 2 * spans * 1024 - 777, torch.bfloat16, residual, spans)
        with devices(kernels, 2, 1 << 20, seed=spans) as several:
            got = [(x.clone(), None if kept is None else kept.clone()) for x, kept in given]
            for rank, (x, kept) in enumerate(got):
                several.two_shot(rank, codec, x, x, kept, seed=spans)
            assert several.run()
        assert_equal(got, wanted(codec, given, seed=spans))


def test_launches_end_when_the_host_gives_up(kernels: ctypes.CDLL) -> None:
    """A device that never launches leaves the others waiting; the host's word ends them, and they say nothing."""
    codec, x = CODECS["int4"], [gradient(9000, rank) for rank in range(3)]
    with devices(kernels, 3, 1 << 16, seed=1) as several:
        for rank in (0, 2):
            several.two_shot(rank, codec, x[rank], x[rank].clone(), None, seed=1)
        assert not several.run(), "ranks that wait for one that does not come have ended"
    with devices(kernels, 3, 1 << 16, seed=1) as several:
        for rank in (0, 2):
            several.two_shot(rank, codec, x[rank], x[rank].clone(), None, seed=1)
        assert several.run(patience=500)


def test_one_rank_alone_quantises_twice_as_well(kernels: ctypes.CDLL) -> None:
    given = inputs(1, 3000, torch.float32, residual=True)
    with devices(kernels, 1, 1 << 16, seed=1) as several:
        (x, residual), out = (given[0][0], given[0][1].clone()), torch.empty(3000)
        several.two_shot(0, CODECS["int4"], x, out, residual, seed=3)
        assert several.run()
    assert_equal([(out, residual)], wanted(CODECS["int4"], given, seed=3))


def test_what_makes_no_sense_is_refused(kernels: ctypes.CDLL) -> None:
    codec, x = CODECS["int4"], gradient(1000)
    spec = codec.core_spec(1000, torch.float32)
    needed = kernels.fl_two_shot_bytes(spec, 512, 2, 8)
    assert needed > 2 * 2 * 512 // 2
    stop, memory = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 1 << 14, dtype=torch.uint8)
    places = [row[-row.data_ptr() % 128 :] for row in memory]

    def refused(chunk: int = 512, spec: native.Spec = spec, **changes: object) -> int:
        peers = native.Peers(0, 2, 8, needed, (ctypes.c_void_p * 16)(*[p.data_ptr() for p in places]), stop.data_ptr())
        for name, value in changes.items():
            setattr(peers, name, value)
        return int(kernels.fl_two_shot(spec, 0, chunk, x.data_ptr(), x.data_ptr(), None, peers, None))

    assert refused(chunk=500) == refused(chunk=384) == BAD_ARGUMENT, "a chunk that is not whole groups, or is too short"
    assert refused(rank=2) == refused(size=17) == refused(stop=None) == refused(bytes=needed - 1) == BAD_ARGUMENT
    assert refused(warps=6) == refused(warps=0) == BAD_ARGUMENT, "not whole blocks of warps"
    assert refused(memory=(ctypes.c_void_p * 16)(places[0].data_ptr(), places[1].data_ptr() + 8)) == BAD_ARGUMENT
    for name in ("int2", "fp8", "mxfp6", "thc", "onebit", "zip"):
        other = cast(NativeCodec, codecs.get(name).bare).core_spec(1000, torch.float32)
        assert refused(spec=other) in (BAD_ARGUMENT, UNSUPPORTED), name
        assert kernels.fl_two_shot_bytes(other, 512, 2, 8) == -1, name
