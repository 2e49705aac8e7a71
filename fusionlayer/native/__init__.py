"""The functions of ``csrc`` on tensors: they pass pointers, and turn a status into an exception.

ctypes releases the GIL for the length of a call.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..base.errors import FusionLayerError, WireError
from ..base.libraries import (
    MAX_PLANES,
    SEEDS,
    BuildInfo,
    Chooser,
    Messages,
    Peers,
    Spec,
    build_info,
    cpu,
    cuda,
    isa,
    library_path,
    select_isa,
    set_threads,
)

__all__ = [
    "BuildInfo",
    "Chooser",
    "MagnitudeStats",
    "Messages",
    "Peers",
    "Spec",
    "accumulate",
    "accumulate_momentum",
    "add_codes",
    "build_info",
    "call",
    "choose_drawn",
    "choose_largest",
    "choose_threshold",
    "count_above",
    "cpu",
    "crc32c",
    "decode",
    "decode_codes_sum",
    "decode_sum",
    "delta_decode",
    "delta_encode",
    "dynamiq_stats",
    "dynamiq_widths",
    "encode",
    "encode_difference",
    "isa",
    "kth_magnitude",
    "library_path",
    "magnitude_stats",
    "messages",
    "most_warps",
    "norm",
    "recode",
    "recode_from",
    "root_mean_square",
    "seeded",
    "select_isa",
    "set_threads",
    "sparse_decode_sum",
    "sparse_encode",
    "thc_rms",
    "two_shot",
    "two_shot_bytes",
]

CAST, INT, SPARSE, BLOCK, ZIP, THC, TAHQUANT, DYNAMIQ, RANS, CHUNKED, DELTA, ONEBIT, QSDP = range(13)
INT_HADAMARD, INT_STOCHASTIC, INT_FULL = 1, 2, 4
FORMATS = {"e4m3": 0, "e5m2": 1, "int8": 2, "e2m3": 3, "e3m2": 4, "e2m1": 5}
FORMAT_BITS = {"e4m3": 8, "e5m2": 8, "int8": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
SCALE_F32, SCALE_DUAL, SCALE_E8M0, SCALE_BF16, SCALE_MESSAGE = 0, 1, 2, 3, 4
BLOCK_HADAMARD, BLOCK_GIVEN, BLOCK_UNLIMITED = 1, 2, 4
SPARSE_BITMAP, SPARSE_BYTE, SPARSE_SHORT = 0, 1, 2
SPARSE_RANDOM = 1
ZIP_AUTO, ZIP_WINDOW, ZIP_TABLE = 0, 1, 2
THC_UNIFORM, THC_STOCHASTIC, THC_GIVEN, THC_RANKS_SHIFT = 1, 2, 4, 16
DYNAMIQ_FLAT = 1
QSDP_STOCHASTIC = 1
MAX_THRESHOLDS, THRESHOLD_NUMBERS = 16, 5
GIVEN, SAMPLED, NORMAL, BISECTED, TRIMMED, EXPONENTIAL, PARETO = range(7)  # enum fl_estimator
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
_WORKSPACE_STATS, _WORKSPACE_KTH, _WORKSPACE_ENCODE, _WORKSPACE_THRESHOLD = range(4)
_WORKSPACE_DELTA_16, _WORKSPACE_DELTA_32 = 4, 5
_INFINITY = 0x7F800000  # the bits of Inf as f32


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


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def encode(spec: Spec, offsets: Sequence[int], x: Tensor, residual: Tensor | None, bodies: Tensor) -> None:
    """``fl_encode``: encode consecutive pieces of ``x`` into ``bodies`` (count, nbytes), planes at ``offsets``."""
    call("fl_encode", x, spec, x.data_ptr(), _pointer(residual), messages(bodies, offsets))


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
    call("fl_recode", body, spec, messages(bodies, offsets), _pointer(x), _pointer(residual), out)


def recode_from(
    source: Spec,
    source_offsets: Sequence[int],
    bodies: Tensor,
    spec: Spec,
    offsets: Sequence[int],
    residual: Tensor | None,
    body: Tensor,
) -> None:
    """``fl_recode_from``: encode the sum of all ``bodies`` (count, nbytes) of ``source`` into ``body`` (nbytes,)."""
    given = source, messages(bodies, source_offsets), spec, _pointer(residual)
    call("fl_recode_from", body, *given, messages(body, offsets))


def two_shot(
    spec: Spec, sum_seed: int, chunk: int, x: Tensor, out: Tensor, residual: Tensor | None, peers: Peers
) -> None:
    """``fl_two_shot``: fill ``out`` (n,) with the sum over ranks of ``x`` (n,), in one launch; ``out`` may be ``x``."""
    given = x.data_ptr(), out.data_ptr(), _pointer(residual), peers
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
    given = spec, x.data_ptr(), _pointer(base), messages(bodies, offsets)
    workspace = _delta_workspace(spec, x)
    call("fl_delta_encode", x, *given, workspace.data_ptr())


def delta_decode(spec: Spec, offsets: Sequence[int], bodies: Tensor, base: Tensor | None, out: Tensor) -> None:
    """``fl_delta_decode``: fill ``out``, which may be ``base``, from ``bodies``; all on one device.

    On CUDA the host waits, and learns whether the messages were sound.

    Raises:
        WireError: ``base`` is not that of the message, or the message is damaged.
    """
    status = torch.empty(1, dtype=torch.int32, device=out.device)
    workspace = _delta_workspace(spec, out)
    given = spec, messages(bodies, offsets), _pointer(base), out.data_ptr(), workspace.data_ptr()
    call("fl_delta_decode", out, *given, status.data_ptr())
    if out.is_cuda and (found := int(status.item())):
        _raise("fl_delta_decode", found)


def _delta_workspace(spec: Spec, x: Tensor) -> Tensor:
    verb = _WORKSPACE_DELTA_32 if x.element_size() == 4 else _WORKSPACE_DELTA_16
    return _workspace(verb, x, spec.numel)


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
    call("fl_thc_rms", x, spec, x.data_ptr(), _pointer(residual), rms.data_ptr())
    return rms


def accumulate(x: Tensor, scale: float, acc: Tensor) -> None:
    """``acc`` (n,) f32 += ``scale`` * ``x`` (n,) f32, bf16 or f16; product and sum are rounded one after the other."""
    call("fl_accumulate", acc, DTYPES[x.dtype], x.data_ptr(), scale, acc.numel(), acc.data_ptr())


def accumulate_momentum(
    x: Tensor, scale: float, momentum: float, nesterov: bool, velocity: Tensor, acc: Tensor
) -> None:
    """Update ``velocity`` and ``acc``, both (n,) f32, by momentum correction (Lin et al., ICLR 2018, section 3.1).

    With s = ``scale`` * ``x``: velocity = momentum * velocity + s and acc += velocity; with ``nesterov`` velocity =
    (velocity + s) * momentum and acc += velocity + s.
    """
    pointers = velocity.data_ptr(), acc.data_ptr()
    given = DTYPES[x.dtype], x.data_ptr(), scale, momentum, int(nesterov), acc.numel()
    call("fl_accumulate_momentum", acc, *given, *pointers)


@dataclass(frozen=True)
class MagnitudeStats:
    """The result of ``magnitude_stats``.

    Attributes:
        count: elements whose magnitude bits were large enough, infinite and NaN included.
        total: sum of their magnitudes, without those that are not finite.
        squares: sum of their squares, without those that are not finite.
        largest: the largest magnitude's bits, 0 if there is none; at least 0x7f800000 if any is not finite.
    """

    count: int
    total: float
    squares: float
    largest: int


def magnitude_stats(acc: Tensor, above: int = 0) -> MagnitudeStats:
    """Return sums over the elements of ``acc`` (n,) f32 whose magnitude bits are >= ``above``.

    The sums are f64, in an order that depends on n alone.
    """
    out = _sums(acc, above).cpu()
    count, _, _, largest = out.tolist()
    _, total, squares, _ = out.view(torch.float64).tolist()
    return MagnitudeStats(count, total, squares, largest)


def root_mean_square(x: Tensor) -> Tensor:
    """Return () f32: the root mean square of ``x`` (n,) f32; 0 for no elements, NaN if one is not finite.

    The sum is that of ``magnitude_stats``. On CUDA the host does not wait.
    """
    out = _sums(x, 0)
    root = (out.view(torch.float64)[2] / max(1, x.numel())).sqrt().float()
    return torch.where(out[3] >= _INFINITY, math.nan, root)


def norm(x: Tensor) -> Tensor:
    """Return () f64: the root of the sum of squares of ``x`` (n,) f32, without those that are not finite.

    On CUDA the host does not wait.
    """
    return _sums(x, 0).view(torch.float64)[2].sqrt()


def _sums(acc: Tensor, above: int) -> Tensor:
    """Return ``fl_magnitudes``, (4,) int64 on the device of ``acc`` (n,) f32."""
    out = torch.empty(4, dtype=torch.int64, device=acc.device)
    workspace = _workspace(_WORKSPACE_STATS, acc)
    call("fl_magnitude_stats", acc, acc.data_ptr(), acc.numel(), above, workspace.data_ptr(), out.data_ptr())
    return out


def count_above(acc: Tensor, thresholds: Sequence[int]) -> list[int]:
    """Return how many elements of ``acc`` (n,) f32 have magnitude bits >= each of 1 to 16 ``thresholds``."""
    given = (ctypes.c_uint32 * len(thresholds))(*thresholds)
    out = torch.empty(len(thresholds), dtype=torch.int64, device=acc.device)
    pointers = acc.data_ptr(), acc.numel(), ctypes.cast(given, ctypes.c_void_p), len(thresholds), out.data_ptr()
    call("fl_count_above", acc, *pointers)
    return [int(count) for count in out.tolist()]


def kth_magnitude(acc: Tensor, k: int) -> tuple[int, int]:
    """Return the bits of the ``k``-th largest magnitude of ``acc`` (n,) f32, and how many are larger; 1 <= k <= n."""
    out = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = _workspace(_WORKSPACE_KTH, acc)
    given = acc.data_ptr(), acc.numel(), k, workspace.data_ptr(), out.data_ptr()
    call("fl_kth_magnitude", acc, *given)
    magnitude, above = out.tolist()
    return magnitude, above


def choose_largest(acc: Tensor, k: int) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode``: the ``k`` largest magnitudes of ``acc`` (n,) f32.

    Among equals the first go, and zeros stay unless all are. Where elements are not finite, these go and no others. On
    CUDA the host does not wait.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = _workspace(_WORKSPACE_KTH, acc)
    given = acc.data_ptr(), acc.numel(), k, workspace.data_ptr(), choice.data_ptr()
    call("fl_choose_largest", acc, *given)
    return choice


def choose_threshold(how: Chooser, acc: Tensor, memory: Tensor, sample: Tensor | None = None) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode``: about ``how.k`` of ``acc`` (n,) f32, by a threshold.

    It is ``fl_choose_threshold``. On CUDA the host does not wait.

    Args:
        how: the way to find a threshold.
        acc: (n,) f32, what a tensor has to send.
        memory: (``THRESHOLD_NUMBERS``,) f32, what is kept from call to call; zeros to begin with.
        sample: (``how.sampled``,) f32, for ``SAMPLED``.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = _workspace(_WORKSPACE_THRESHOLD, acc)
    pointers = _pointer(sample), memory.data_ptr(), workspace.data_ptr(), choice.data_ptr()
    call("fl_choose_threshold", acc, how, acc.data_ptr(), acc.numel(), *pointers)
    return choice


def choose_drawn(spec: Spec, acc: Tensor, k: int) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode`` with ``SPARSE_RANDOM``: the ``k`` least numbers.

    One more element may be chosen: a message with room for ``k`` leaves it out. ``acc`` (n,) f32 is what will be
    encoded: if elements are not finite, they alone are chosen. On CUDA the host does not wait.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = _workspace(_WORKSPACE_KTH, acc)
    call("fl_choose_drawn", acc, spec, acc.data_ptr(), k, workspace.data_ptr(), choice.data_ptr())
    return choice


def sparse_encode(
    spec: Spec,
    offsets: Sequence[int],
    acc: Tensor,
    threshold: int,
    ties: int,
    body: Tensor,
    *,
    x: Tensor | None = None,
    scale: float = 1.0,
    clear: Tensor | None = None,
    choice: Tensor | None = None,
) -> None:
    """``fl_sparse_encode``: send the largest elements of ``acc`` (n,) f32 as ``body`` (nbytes,) uint8.

    It sends the elements whose magnitude bits are above ``threshold`` and the first ``ties`` (-1: all) that equal it,
    as far as the message has room. With ``SPARSE_RANDOM`` it sends the elements whose number in the seed's sequence is
    below ``threshold``, which is at most 2**32, and those that are not finite. ``acc`` keeps the elements that are not
    sent, as 0 if they are not finite.

    Args:
        spec: of codec ``SPARSE``, for n elements; its dtype is that of ``x``.
        offsets: where the four planes begin in ``body``.
        acc: (n,) f32, becomes the residual.
        threshold: magnitude bits, or with ``SPARSE_RANDOM`` a bound on random numbers.
        ties: how many elements that equal ``threshold`` may be sent.
        body: (nbytes,) uint8, the message without header.
        x: (n,), added to ``acc`` times ``scale`` first, in the same pass.
        scale: factor on ``x``.
        clear: (n,) f32 that becomes 0 where an element was sent or was not finite.
        choice: (2,) int64 on the device of ``acc``, takes the place of ``threshold`` and ``ties``.
    """
    workspace = _workspace(_WORKSPACE_ENCODE, acc)
    pointers = acc.data_ptr(), _pointer(clear), threshold, ties, _pointer(choice), workspace.data_ptr()
    call("fl_sparse_encode", acc, spec, _pointer(x), scale, *pointers, messages(body, offsets))


def sparse_decode_sum(spec: Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor, *, add: bool) -> None:
    """``fl_decode_sum`` of sparse messages: sum all ``bodies`` into ``out`` (n,); with ``add``, on top of ``out``.

    Raises:
        WireError: a message contradicts itself; nothing was written. On CUDA the host does not wait for the result, so
            such pairs are left out instead.
    """
    decode_sum(spec, offsets, bodies, out, add=add)


def dynamiq_stats(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squares, (ceil(n / 256),) f32 each, of every 256 elements of ``x`` (n,) + ``residual``."""
    means, squares = torch.empty(2, -(-x.numel() // 256), device=x.device)
    given = DTYPES[x.dtype], x.data_ptr(), _pointer(residual), x.numel(), means.data_ptr(), squares.data_ptr()
    call("fl_dynamiq_stats", x, *given)
    return means, squares


def dynamiq_widths(bits: Tensor, plane: Tensor) -> None:
    """Write the plane of widths (24 * ceil(n / 64),) uint8 for super-groups of ``bits`` (n,) uint8; both on the CPU."""
    if cpu().fl_dynamiq_widths(bits.data_ptr(), bits.numel(), plane.data_ptr()):
        raise FusionLayerError("fl_dynamiq_widths: a width is neither 2, 4 nor 8")


def _workspace(verb: int, acc: Tensor, numel: int | None = None) -> Tensor:
    library = cuda() if acc.is_cuda else cpu()
    nbytes = library.fl_workspace_bytes(verb, acc.numel() if numel is None else numel)
    return torch.empty(max(16, nbytes), dtype=torch.uint8, device=acc.device)
