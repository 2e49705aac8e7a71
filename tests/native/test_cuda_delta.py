"""The CUDA kernels of ``delta``, compiled for the CPU (see cuda_on_host/), do what the CPU core does, byte for byte."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer import native
from fusionlayer.codecs.lossless.delta import Delta
from tests.codecs.conformance import as_bits
from tests.codecs.test_delta import moved
from tests.loops import looped
from tests.native.abi import GUARD, Area
from tests.synthetic import bit_patterns, gradient
from tests.tiers import tiered

BLOCK = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OK, BAD_MESSAGE, OTHER_BASE = 0, native.BAD_MESSAGE, native.OTHER_BASE
CHANGES = (
    *((0, 1), (0.003, 1), (0.03, 1), (0.15, 1.3), (0.4, 1), (0.5, 1), (0.6, 3), (0.97, 2)),
    *((1, 1), (1, 40), (1, 5000), (0.01, 9000)),
)


class Job:
    """Messages of ``count`` equal pieces of a tensor, for either library; all memory has guard bytes around it."""

    def __init__(self, library: ctypes.CDLL, like: Tensor, count: int = 1, shift: int = 0) -> None:
        self._library, self._count, self._shift = library, count, shift * like.element_size()
        numel = like.numel() // count
        self._spec = native.CodecParams(native.DELTA).spec(numel, like.dtype)
        form = Delta(header=False).wire(numel, like.dtype)
        self.messages = Area(np.full(form.capacity * count, GUARD, np.uint8))
        planes = [self.messages.address + offset for offset in form.offsets]
        self._given = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(*planes), form.capacity, count)
        verb = 5 if like.dtype is torch.float32 else 4
        self._room = Area(np.full(library.fl_workspace_bytes(verb, numel), GUARD, np.uint8))

    def area(self, x: Tensor) -> Area:
        return Area(x.contiguous().view(torch.uint8).numpy(), self._shift)

    def encode(self, x: Tensor, base: Tensor | None) -> np.ndarray:
        given, before = self.area(x), None if base is None else self.area(base)
        pointers = given.address, None if before is None else before.address
        status = self._library.fl_delta_encode(self._spec, *pointers, self._given, self._room.address, None)
        assert status == 0 and self.messages.guards_hold() and self._room.guards_hold()
        return self.messages.data.copy()

    def decode(self, messages: np.ndarray, base: Tensor | None, like: Tensor, in_place: bool) -> tuple[int, np.ndarray]:
        """Return the status, the CPU's or that which a device leaves, and what was made."""
        self.messages.data[:] = messages
        before = None if base is None else self.area(base)
        out = before if in_place and before else self.area(torch.full_like(like, 3.0))
        told = np.full(1, -1, np.int32)
        status = self._library.fl_delta_decode(
            self._spec,
            self._given,
            None if before is None else before.address,
            out.address,
            self._room.address,
            told.ctypes.data,
            None,
        )
        assert out.guards_hold() and self._room.guards_hold()
        return status or max(0, int(told[0])), out.data.copy()


def same(kernels: ctypes.CDLL, x: Tensor, base: Tensor | None, count: int = 1, shift: int = 0) -> None:
    """Compare messages with those of the CPU core, and what becomes of them with what was encoded."""
    want = Job(native.cpu(), x, count).encode(x, base)
    job = Job(kernels, x, count, shift)
    got = job.encode(x, base)
    differing = np.flatnonzero(got != want)
    assert differing.size == 0, f"{differing.size} bytes differ, the first is {differing[0]}"
    for in_place in (False, True):
        status, made = job.decode(want, base, x, in_place)
        assert status == OK and np.array_equal(made, x.view(torch.uint8).numpy())


def special(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all bits of a 16-bit type, NaNs and signed zeros too, or many of f32: each to others near and far."""
    base = bit_patterns(dtype)
    for x in (as_bits(base).roll(1).view(dtype), torch.cat([base[:100], -base[100:]]), base.flip(0)):
        yield x, base
    yield moved(base, 0.05), base
    yield base, torch.zeros_like(base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_and_elements_are_those_of_the_cpu_core(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Unchanged, all changed, one in many; whole, ragged and no blocks; values that are not finite, and none."""
    base = gradient(BLOCK + 700, 3, dtype)
    for i, (share, reach) in enumerate(CHANGES):
        same(kernels, moved(base, share, reach), base, shift=i % 2)
        numel = (1, 2, 5, 1000, 3 * 31)[i % 5]
        same(kernels, moved(base[:numel], share, reach), base[:numel], shift=i % 3)
    for x, before in special(dtype):
        same(kernels, x, before)
    same(kernels, base, None)
    same(kernels, base[:0], base[:0])
    same(kernels, moved(base[: 3 * 500], 0.1), base[: 3 * 500], count=3)
    same(kernels, base[: 3 * 77], None, count=3)


@looped(
    "dtype, share, reach",
    tiered(
        ((dtype, *change) for dtype in DTYPES for change in CHANGES),
        lambda dtype, share, reach: dtype is torch.bfloat16 and share == 0.15,
    ),
    ids=str,
)
def test_blocks_beside_one_another(kernels: ctypes.CDLL, dtype: torch.dtype, share: float, reach: float) -> None:
    """Some of them unchanged, or changed altogether; in one case more than the emulation has warps for."""
    blocks = 150 if (share, reach) == (0.15, 1.3) and dtype is torch.bfloat16 else 9
    base = gradient(blocks * BLOCK + 13, 4, dtype)
    x = moved(base, share, reach)
    for block in range(0, blocks, 3):
        x[block * BLOCK : (block + 1) * BLOCK] = base[block * BLOCK : (block + 1) * BLOCK]
    x[BLOCK : 2 * BLOCK] = base[BLOCK : 2 * BLOCK].flip(0)
    same(kernels, x, base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_layers(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """All elements move by as many steps; one in ten moves much farther than the others."""
    base = gradient(3000, 9, dtype)
    for steps in (1, 2, 3, 7, 8, 12, 200, 30_000):
        bits = as_bits(base) + steps
        same(kernels, bits.view(dtype), base)
        bits[::10] += 4000
        same(kernels, bits.view(dtype), base)


@pytest.mark.parametrize("tries", tiered([600, 5_000], lambda tries: tries == 600, lambda _: False))
def test_a_damaged_message_is_told_as_on_the_cpu(kernels: ctypes.CDLL, tries: int) -> None:
    """And nothing is written outside; with garbage in place of a message, and with another base."""
    draw = np.random.default_rng(2)
    n, seen = 1500, set()
    for attempt in range(tries):
        dtype, (share, reach) = DTYPES[attempt % 3], ((0.02, 1), (0.3, 4), (1, 60))[attempt // 3 % 3]
        base = gradient(n, 2, dtype)
        x = moved(base, share, reach)
        cpu, job = Job(native.cpu(), x), Job(kernels, x)
        message = cpu.encode(x, base)
        form = Delta(header=False).wire(n, dtype)
        used = int(message[4:8].view(np.uint32)[0]) or n * dtype.itemsize
        meaningful = np.array([*range(16), *range(form.offsets[1], form.offsets[1] + used)])
        places = meaningful[draw.integers(0, len(meaningful), draw.integers(1, 4))]
        message[places] ^= draw.integers(1, 256, len(places), dtype=np.uint8)
        if attempt % 50 == 7:
            message[form.offsets[1] + 2 :] = draw.integers(0, 256, len(message) - form.offsets[1] - 2, dtype=np.uint8)
        if attempt % 10 == 9:
            as_bits(base)[n // 2] ^= 1
        in_place = attempt % 2 == 0
        want, got = (each.decode(message, base, x, in_place) for each in (cpu, job))
        assert got[0] == want[0]
        if got[0] == OK:
            assert np.array_equal(got[1], x.view(torch.uint8).numpy()), "wrong weights were accepted"
        if got[0] == OTHER_BASE and in_place:
            assert np.array_equal(got[1], base.view(torch.uint8).numpy()), "another base was written to"
        seen.add(got[0])
    assert {BAD_MESSAGE, OTHER_BASE} <= seen


def test_the_first_message_that_is_wrong_is_told_and_the_others_are_left(kernels: ctypes.CDLL) -> None:
    base = gradient(3 * 400, 1)
    x = moved(base, 0.2)
    cpu, job = Job(native.cpu(), x, 3), Job(kernels, x, 3)
    messages = cpu.encode(x, base)
    row = len(messages) // 3
    messages[row + 8] ^= 1  # the digest of the second one's base
    messages[2 * row] = 9  # the form of the third one
    for each in (cpu, job):
        status, made = each.decode(messages, base, x, in_place=True)
        rows, now, before = (v.reshape(3, -1) for v in (made, *(t.view(torch.uint8).numpy() for t in (x, base))))
        assert status == OTHER_BASE
        assert np.array_equal(rows[0], now[0]) and np.array_equal(rows[1:], before[1:])


def test_what_the_kernels_refuse(kernels: ctypes.CDLL) -> None:
    area = Area(np.full(4096, GUARD, np.uint8))
    at, spec = area.address, native.CodecParams(native.DELTA).spec(64, torch.float32)
    planes = (ctypes.c_void_p * native.MAX_PLANES)(at, at + 64)
    messages, wrong = native.Messages(planes, 0, 1), native.CodecParams(native.DELTA, (1,)).spec(64, torch.float32)
    for bad, x, room, told in ((spec, None, at, at), (spec, at, None, at), (spec, at, at + 8, at), (wrong, at, at, at)):
        assert kernels.fl_delta_encode(bad, x, None, messages, room, None) == 1
        assert kernels.fl_delta_decode(bad, messages, None, x, room, told, None) == 1
    assert kernels.fl_delta_decode(spec, messages, None, at, at, None, None) == 1
    assert (area.data == GUARD).all()
    assert kernels.fl_workspace_bytes(4, -1) == -1 and native.cpu().fl_workspace_bytes(4, 1 << 20) == 0
    kernels.fail_next_cuda_call()
    room = Area(np.zeros(kernels.fl_workspace_bytes(5, 64), np.uint8))
    assert kernels.fl_delta_encode(spec, at, None, messages, room.address, None) == native.DEVICE_ERROR
