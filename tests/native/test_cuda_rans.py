"""The CUDA kernels of ``rans``, compiled for the CPU (see cuda_on_host/), do what the CPU core does, byte for byte."""

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer import native
from fusionlayer.codecs.research.rans import Rans
from fusionlayer.native.wire import WireFormat
from tests.native.abi import GUARD, Area
from tests.synthetic import bit_patterns, gradient
from tests.tiers import exhaustive

BLOCK = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODEC = Rans(header=False)
UNSUPPORTED = 2


class Fenced:
    """Memory that ends where nothing can be read or written: an access behind it ends the process."""

    def __init__(self, nbytes: int) -> None:
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, room + mmap.PAGESIZE)
        everything = np.frombuffer(self._map, np.uint8)
        self.data = everything[room - nbytes : room]
        self.data[:] = GUARD
        self.address = int(self.data.ctypes.data)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address + nbytes), mmap.PAGESIZE, 0) == 0


class Job:
    """Messages of ``count`` equal pieces of tensors, for either library; elements have guard bytes around them."""

    def __init__(self, library: ctypes.CDLL, numel: int, dtype: torch.dtype, count: int = 1, shift: int = 0) -> None:
        self._library, self._count, self._shift = library, count, shift
        self.numel, self.dtype, self.form = numel, dtype, CODEC.wire(numel, dtype)
        self.messages = Fenced(self.form.capacity * count)
        planes = [self.messages.address + offset for offset in self.form.offsets]
        given = (ctypes.c_void_p * native.MAX_PLANES)(*planes)
        self._given = native.Messages(given, self.form.capacity if count > 1 else 0, count)

    def _spec(self, dtype: torch.dtype) -> native.Spec:
        return CODEC._params(self.dtype).spec(self.numel, dtype)

    def encode(self, x: Tensor) -> np.ndarray:
        given = Area(x.contiguous().view(torch.uint8).numpy(), self._shift * x.element_size())
        assert self._library.fl_encode(self._spec(self.dtype), given.address, None, self._given, None) == 0
        return self.messages.data.copy()

    def decode(self, messages: np.ndarray, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return the status, and the elements as ``dtype``."""
        self.messages.data[:] = messages
        size = self.numel * self._count * dtype.itemsize
        out = Area(np.full(size, GUARD, np.uint8), self._shift * dtype.itemsize)
        status = self._library.fl_decode(self._spec(dtype), self._given, out.address, None)
        assert out.guards_hold()
        return status, torch.from_numpy(out.data.copy()).view(dtype)


def same(kernels: ctypes.CDLL, x: Tensor, count: int = 1, shift: int = 0) -> int:
    """Compare messages with those of the CPU core, and what is made of them; return the form of the first one."""
    jobs = [Job(library, x.numel() // count, x.dtype, count, shift) for library in (native.cpu(), kernels)]
    want, got = (job.encode(x) for job in jobs)
    differing = np.flatnonzero(got != want)
    assert differing.size == 0, f"{differing.size} bytes differ, the first is {differing[0]}"
    for dtype in DTYPES:
        (_, expected), (status, made) = (job.decode(want, dtype) for job in jobs)
        assert status == 0 and torch.equal(made.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(jobs[1].decode(want, x.dtype)[1].view(torch.uint8), x.view(torch.uint8))
    return int(want[0])


def special(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield what makes tables hard to fill: one symbol, all of them, rare ones beside one that has nearly all."""
    yield torch.ones(BLOCK + 3, dtype=dtype)
    yield bit_patterns(dtype)[: BLOCK + 999]
    yield torch.cat([torch.ones(3 * BLOCK, dtype=dtype), bit_patterns(dtype)[:: len(bit_patterns(dtype)) // 512]])
    yield torch.cat([gradient(BLOCK, 5, dtype), torch.zeros(BLOCK, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_and_elements_are_those_of_the_cpu_core(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """No whole row, no whole block, some and a part of one; one message and several; elements that are not aligned."""
    lengths = (1, 31, 255, 700, 1000, 5000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300)
    forms = {numel: same(kernels, gradient(numel, 3, dtype), shift=i % 2) for i, numel in enumerate(lengths)}
    assert forms[31] == 0 and {forms[numel] for numel in lengths[-5:]} == {1}, "raw, then coded"
    for x in special(dtype):
        same(kernels, x)
    same(kernels, gradient(3 * 1024, 4, dtype), count=3)
    same(kernels, gradient(2 * (BLOCK + 40), 4, dtype), count=2, shift=1)


@exhaustive(guarded_by=f"{__name__.replace('.', '/')}.py::test_messages_and_elements_are_those_of_the_cpu_core")
def test_more_blocks_than_the_grid_has_warps(kernels: ctypes.CDLL) -> None:
    assert same(kernels, gradient(131 * BLOCK + 77, 8, torch.bfloat16)) == 1
    assert same(kernels, gradient(16 * 9 * BLOCK, 8, torch.bfloat16), count=16) == 1


def damages(form: WireFormat, static: int, good: np.ndarray) -> dict[str, list[tuple[int, int]]]:
    """Return places in a message, and what is added to the bytes there."""
    head, data = form.offsets
    blocks = -(-form.numel // BLOCK)
    words = int(good[head + 4 : head + 8].view(np.uint32)[0])
    states = data + -(-(512 + 4 * blocks) // 64) * 64
    return {
        "form": [(head, 2)],
        "length": [(head + 4, 2)],
        "an odd length": [(head + 4, 1)],
        "a length beyond the message": [(head + 7, 0x80)],
        "a frequency": [(data + 2 * 122, 2)],
        "a frequency beyond all": [(data + 2 * 122 + 1, 0x80)],
        "an end": [(data + 512, 2)],
        "an end beyond the words": [(data + 512 + 3, 0x80)],
        "the last end": [(data + 512 + 4 * (blocks - 1), 2)],
        "a word too many": [(head + 4, 2), (data + 512 + 4 * (blocks - 1), 1)],
        "a state": [(states + 5, 2)],
        "a state's end": [(states + 128 * blocks - 1, 2)],
        "a word": [(data + static + 1000, 2)],
        "the last word": [(data + static + words - 2, 1)],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_that_contradicts_itself_is_nan(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Where the CPU core refuses a message, at least one block is NaN, and the others are what they would be."""
    numel = 2 * BLOCK + 500
    x = gradient(numel, 3, dtype)
    cpu, job = Job(native.cpu(), numel, dtype), Job(kernels, numel, dtype)
    good = cpu.encode(x)
    static = CODEC.static_bytes(numel, dtype) - 16
    for what, changes in damages(job.form, static, good).items():
        bad = good.copy()
        for place, more in changes:
            bad[place] += np.uint8(more)
        assert cpu.decode(bad, dtype)[0] == native.BAD_MESSAGE, what
        for out in (dtype, torch.float32):
            status, made = job.decode(bad, out)
            blocks = list(zip(made.split(BLOCK), x.to(out).split(BLOCK), strict=True))
            lost = [bool(block.isnan().all()) for block, _ in blocks]
            assert status == 0 and any(lost), what
            if what in ("a word too many", "a state", "a state's end", "a word", "the last word"):  # of one block alone
                assert lost.count(True) == 1
                assert all(torch.equal(*pair) for pair, gone in zip(blocks, lost, strict=True) if not gone)


def test_any_bytes_are_decoded_within_bounds(kernels: ctypes.CDLL) -> None:
    """Noise, with a form and frequencies that get it further: nothing outside the tensor is written."""
    generator = np.random.default_rng(5)
    for dtype in DTYPES:
        numel = BLOCK + 1024  # the last plane ends with the message
        job, cpu = Job(kernels, numel, dtype), Job(native.cpu(), numel, dtype)
        good = cpu.encode(gradient(numel, 3, dtype))
        for trial in range(6):
            noise = generator.integers(0, 256, good.size, dtype=np.uint8)
            if trial % 3:
                noise[: job.form.offsets[1] + 512] = good[: job.form.offsets[1] + 512]
            if trial % 3 == 2:
                noise[job.form.offsets[1] + 512 :][:8] = good[job.form.offsets[1] + 512 :][:8]
            assert job.decode(noise, dtype)[0] == 0
            assert cpu.decode(noise, dtype)[0] in (0, native.BAD_MESSAGE)


def test_nothing_behind_a_message_that_fills_its_room_is_read(kernels: ctypes.CDLL) -> None:
    numel = BLOCK + 1024
    bytes_ = torch.randint(0, 256, (numel,), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    for exponents in range(210, 1, -1):
        bits = (torch.arange(numel) % exponents << 7) | (bytes_ & 127) | (bytes_ >> 7 << 15)
        x = bits.to(torch.int16).view(torch.bfloat16)
        job = Job(kernels, numel, torch.bfloat16)
        messages = Job(native.cpu(), numel, torch.bfloat16).encode(x)
        if messages[0] == 1:  # the first that is shorter than its elements
            break
    words = int(messages[4:8].view(np.uint32)[0])
    assert CODEC.static_bytes(numel, torch.bfloat16) - 16 + words > 2 * numel - 300
    status, made = job.decode(messages, torch.bfloat16)
    assert status == 0 and torch.equal(made.view(torch.int16), x.view(torch.int16))


def test_sums_are_made_of_elements(kernels: ctypes.CDLL) -> None:
    """On CUDA the codec decodes messages and adds what it has, as no kernel has blocks of several messages."""
    job = Job(kernels, 64, torch.bfloat16)
    out = Area(np.full(4 * 64, GUARD, np.uint8))
    assert kernels.fl_decode_sum(job._spec(torch.float32), job._given, out.address, 0, None) == UNSUPPORTED
    assert (out.data == GUARD).all()
