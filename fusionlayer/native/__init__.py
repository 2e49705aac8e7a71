"""The functions of ``csrc`` on tensors: they pass pointers, and turn a status into an exception.

ctypes releases the GIL for the length of a call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..base.errors import FusionLayerError, WireError
from ..base.libraries import MAX_PLANES, SEEDS, Messages, Peers, Spec, cpu, cuda

CAST, INT, SPARSE, BLOCK, ZIP, THC, TAHQUANT, DYNAMIQ, RANS, CHUNKED, DELTA, ONEBIT, QSDP = range(13)
INT_HADAMARD, INT_STOCHASTIC, INT_FULL = 1, 2, 4
FORMATS = {"e4m3": 0, "e5m2": 1, "int8": 2, "e2m3": 3, "e3m2": 4, "e2m1": 5}
FORMAT_BITS = {"e4m3": 8, "e5m2": 8, "int8": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
SCALE_F32, SCALE_DUAL, SCALE_E8M0, SCALE_BF16, SCALE_MESSAGE = 0, 1, 2, 3, 4
BLOCK_HADAMARD, BLOCK_GIVEN, BLOCK_UNLIMITED = 1, 2, 4
ZIP_AUTO, ZIP_WINDOW, ZIP_TABLE = 0, 1, 2
THC_UNIFORM, THC_STOCHASTIC, THC_GIVEN, THC_RANKS_SHIFT = 1, 2, 4, 16
DYNAMIQ_FLAT = 1
QSDP_STOCHASTIC = 1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

DEVICE_ERROR, BAD_MESSAGE, OTHER_BASE = 3, 4, 5
_STATUS = {
    1: "the codec core refused an argument",
    2: "this build of the codec core does not have that codec or option",
    DEVICE_ERROR: "CUDA reported an error",
    BAD_MESSAGE: "a message contradicts itself; it was damaged on its way, or the ranks differ in codec or options",
    OTHER_BASE: "a message was made with another base than this rank has; send the whole values once",
}
# One packer for each number of planes. Packing bytes takes a third of the time that setting a structure's fields does.
_MESSAGES = [struct.Struct(f"@{planes}Q{(MAX_PLANES - planes) * 8}xqq") for planes in range(MAX_PLANES + 1)]
_WORKSPACE_DELTA_16, _WORKSPACE_DELTA_32 = 4, 5


def crc32c(data: bytes | Tensor, crc: int = 0) -> int:
    """Return the crc32c of ``data`` (bytes, or a contiguous CPU tensor's memory), continued from ``crc``."""
    if isinstance(data, Tensor):
        pointer, nbytes = data.data_ptr(), data.numel() * data.element_size()
        return int(cpu().fl_crc32c(crc, pointer, nbytes))
    return int(cpu().fl_crc32c(crc, data, len(data)))


@dataclass(frozen=True)
class CodecParams:
    """The part of ``fl_spec`` that depends on the codec alone."""

    codec: int
    param: tuple[int, ...] = ()

    def spec(self, numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> Spec:
        """Return the ``fl_spec`` for messages of ``numel`` elements of ``dtype``."""
        param = (ctypes.c_uint32 * 4)(*self.param)
        return Spec(self.codec, DTYPES[dtype], param, seed & SEEDS, offset, numel)


def messages(bodies: Tensor, offsets: Sequence[int]) -> Messages:
    """Return the ``fl_messages`` of ``bodies`` (count, nbytes), or of one body (nbytes,), planes at ``offsets``."""
    rows = (bodies.stride(0), bodies.size(0)) if bodies.dim() == 2 else (bodies.numel(), 1)
    return Messages.from_buffer_copy(_MESSAGES[len(offsets)].pack(*map(bodies.data_ptr().__add__, offsets), *rows))


def seeded(spec: Spec, seed: int, offset: int) -> Spec:
    """Return a copy of ``spec`` that draws the random numbers of ``seed`` from number ``offset`` on."""
    copy = Spec.from_buffer_copy(spec)
    copy.seed, copy.offset = seed & SEEDS, offset
    return copy


def call(verb: str, x: Tensor, *arguments: object) -> None:
    """Call the core's function ``verb`` on the device of ``x``, on CUDA on its current stream."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            library = cuda()
            status = getattr(library, verb)(*arguments, torch.cuda.current_stream(x.device).cuda_stream)
    else:
        library = cpu()
        status = getattr(library, verb)(*arguments, None)
    if status:
        _raise(verb, status, f": {library.fl_last_error().decode()}" if status == DEVICE_ERROR else "")


def _raise(verb: str, status: int, detail: str = "") -> NoReturn:
    kind = WireError if status in (BAD_MESSAGE, OTHER_BASE) else FusionLayerError
    raise kind(f"{verb}: {_STATUS.get(status, f'status {status}')}{detail}")


def pointer(tensor: Tensor | None) -> int | None:
    """Return where a tensor's elements are; None is NULL."""
    return None if tensor is None else tensor.data_ptr()


def encode(spec: Spec, offsets: Sequence[int], x: Tensor, residual: Tensor | None, bodies: Tensor) -> None:
    """``fl_encode``: encode consecutive pieces of ``x`` into ``bodies`` (count, nbytes), planes at ``offsets``."""
    call("fl_encode", x, spec, x.data_ptr(), pointer(residual), messages(bodies, offsets))


def decode(spec: Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor) -> None:
    """``fl_decode``: decode ``bodies`` (count, nbytes) uint8 into consecutive pieces of ``out``."""
    call("fl_decode", out, spec, messages(bodies, offsets), out.data_ptr())


def decode_sum(spec: Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor, *, add: bool) -> None:
    """``fl_decode_sum``: sum all ``bodies`` (count, nbytes) uint8 into ``out``; with ``add``, on top of ``out``."""
    call("fl_decode_sum", out, spec, messages(bodies, offsets), out.data_ptr(), int(add))


def recode(
    spec: Spec, offsets: Sequence[int], bodies: Tensor, x: Tensor | None, residual: Tensor | None, body: Tensor
) -> None:
    """``fl_recode``: encode the sum of ``x`` and all ``bodies`` (count, nbytes) uint8 into ``body`` (nbytes,) uint8."""
    out = messages(body, offsets)
    call("fl_recode", body, spec, messages(bodies, offsets), pointer(x), pointer(residual), out)


def recode_rows(
    source: Spec | None,
    source_offsets: Sequence[int],
    bodies: Tensor,
    spec: Spec,
    offsets: Sequence[int],
    starts: Sequence[int],
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """``fl_recode_rows``: encode the sum of all ``bodies[:, i]`` (count, rows, nbytes) into ``out[i]`` (nbytes,).

    Row i begins at number ``starts[i]`` of the seed's sequence and of ``residual``. ``source`` is the spec of the
    bodies if it is another one.
    """
    summands = messages(bodies[:, 0], source_offsets), bodies.stride(1)
    places = (ctypes.c_int64 * len(starts))(*starts)
    rows = ctypes.cast(places, ctypes.c_void_p), pointer(residual), messages(out, offsets)
    call("fl_recode_rows", out, source, *summands, spec, *rows)


def two_shot(
    spec: Spec, sum_seed: int, chunk: int, x: Tensor, out: Tensor, residual: Tensor | None, peers: Peers
) -> None:
    """``fl_two_shot``: fill ``out`` (n,) with the sum over ranks of ``x`` (n,), in one launch; ``out`` may be ``x``."""
    given = x.data_ptr(), out.data_ptr(), pointer(residual), peers
    call("fl_two_shot", x, spec, sum_seed, chunk, *given)


def two_shot_bytes(spec: Spec, chunk: int, size: int, warps: int) -> int:
    """Return the bytes of each rank's memory that ``two_shot`` needs, or -1: it has no such codec. CUDA alone."""
    return int(cuda().fl_two_shot_bytes(spec, chunk, size, warps))


def most_warps(device: torch.device) -> int:
    """Return how many warps of ``two_shot`` a CUDA device runs at a time."""
    with torch.cuda.device(device):
        warps = int(cuda().fl_most_warps())
    if warps < 0:
        _raise("fl_most_warps", DEVICE_ERROR, f": {cuda().fl_last_error().decode()}")
    return warps


def encode_difference(spec: Spec, offsets: Sequence[int], x: Tensor, base: Tensor, body: Tensor) -> None:
    """``fl_encode_difference``: encode ``x`` (n,) f32 minus ``base`` (n,), of any type, into ``body`` (nbytes,)."""
    given = x.data_ptr(), base.data_ptr()
    call("fl_encode_difference", x, spec, *given, messages(body, offsets))


def delta_encode(spec: Spec, offsets: Sequence[int], x: Tensor, base: Tensor | None, bodies: Tensor) -> None:
    """``fl_delta_encode``: encode pieces of ``x`` since ``base``, None: zeros, into ``bodies``; all on one device."""
    given = spec, x.data_ptr(), pointer(base), messages(bodies, offsets)
    workspace = _delta_workspace(spec, x)
    call("fl_delta_encode", x, *given, workspace.data_ptr())


def delta_decode(spec: Spec, offsets: Sequence[int], bodies: Tensor, base: Tensor | None, out: Tensor) -> None:
    """``fl_delta_decode``: fill ``out``, which may be ``base``, from ``bodies``; all on one device.

    On CUDA the host waits, and learns whether the messages were sound.
    """
    status = torch.empty(1, dtype=torch.int32, device=out.device)
    workspace = _delta_workspace(spec, out)
    given = spec, messages(bodies, offsets), pointer(base), out.data_ptr(), workspace.data_ptr()
    call("fl_delta_decode", out, *given, status.data_ptr())
    if out.is_cuda and (found := int(status.item())):
        _raise("fl_delta_decode", found)


def _delta_workspace(spec: Spec, x: Tensor) -> Tensor:
    verb = _WORKSPACE_DELTA_32 if x.element_size() == 4 else _WORKSPACE_DELTA_16
    return workspace_for(verb, x, spec.numel)


def add_codes(spec: Spec, offsets: Sequence[int], bodies: Tensor, total: Tensor) -> None:
    """``fl_add_codes``: sum the integers that the codes of all ``bodies`` stand for into ``total`` uint8."""
    call("fl_add_codes", total, spec, messages(bodies, offsets), total.data_ptr())


def decode_codes_sum(spec: Spec, rms: Tensor, total: Tensor, out: Tensor) -> None:
    """``fl_decode``: decode a ``total`` of ``add_codes`` by ``rms``, (sections,) f32 on which ranks have agreed."""
    planes = (ctypes.c_void_p * MAX_PLANES)(rms.data_ptr(), total.data_ptr())
    call("fl_decode", out, spec, Messages(planes, 0, 1), out.data_ptr())


def thc_rms(spec: Spec, x: Tensor, residual: Tensor | None, sections: int) -> Tensor:
    """``fl_thc_rms``: return (sections,) f32, the root mean squares of ``x``, with a residual of ``x + residual``."""
    rms = torch.empty(sections, device=x.device)
    call("fl_thc_rms", x, spec, x.data_ptr(), pointer(residual), rms.data_ptr())
    return rms


def dynamiq_stats(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squares, (ceil(n / 256),) f32 each, of every 256 elements of ``x`` (n,) + ``residual``."""
    means, squares = torch.empty(2, -(-x.numel() // 256), device=x.device)
    given = DTYPES[x.dtype], x.data_ptr(), pointer(residual), x.numel(), means.data_ptr(), squares.data_ptr()
    call("fl_dynamiq_stats", x, *given)
    return means, squares


def dynamiq_widths(bits: Tensor, plane: Tensor) -> None:
    """Write the plane of widths (24 * ceil(n / 64),) uint8 for super-groups of ``bits`` (n,) uint8; both on the CPU."""
    if cpu().fl_dynamiq_widths(bits.data_ptr(), bits.numel(), plane.data_ptr()):
        raise FusionLayerError("fl_dynamiq_widths: a width is neither 2, 4 nor 8")


def workspace_for(verb: int, acc: Tensor, numel: int | None = None) -> Tensor:
    """Return the memory that the core's function number ``verb`` needs for ``numel`` elements, or for those of
    ``acc``."""
    library = cuda() if acc.is_cuda else cpu()
    nbytes = library.fl_workspace_bytes(verb, acc.numel() if numel is None else numel)
    return torch.empty(max(16, nbytes), dtype=torch.uint8, device=acc.device)
