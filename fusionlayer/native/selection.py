"""The functions of ``csrc`` that select the elements of sparse messages: accumulate, measure, choose, encode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from ..base.libraries import Chooser, Spec

SPARSE_BITMAP, SPARSE_BYTE, SPARSE_SHORT = 0, 1, 2
SPARSE_RANDOM = 1
MAX_THRESHOLDS, THRESHOLD_NUMBERS = 16, 5
GIVEN, SAMPLED, NORMAL, BISECTED, TRIMMED, EXPONENTIAL, PARETO = range(7)  # enum fl_estimator
_WORKSPACE_STATS, _WORKSPACE_KTH, _WORKSPACE_ENCODE, _WORKSPACE_THRESHOLD = range(4)


def accumulate(x: Tensor, scale: float, acc: Tensor) -> None:
    """``acc`` (n,) f32 += ``scale`` * ``x`` (n,) f32, bf16 or f16; product and sum are rounded one after the other."""
    native.call("fl_accumulate", acc, native.DTYPES[x.dtype], x.data_ptr(), scale, acc.numel(), acc.data_ptr())


def accumulate_momentum(
    x: Tensor, scale: float, momentum: float, nesterov: bool, velocity: Tensor, acc: Tensor
) -> None:
    """Update ``velocity`` and ``acc``, both (n,) f32, by momentum correction (Lin et al., ICLR 2018, section 3.1).

    With s = ``scale`` * ``x``: velocity = momentum * velocity + s and acc += velocity; with ``nesterov`` velocity =
    (velocity + s) * momentum and acc += velocity + s.
    """
    pointers = velocity.data_ptr(), acc.data_ptr()
    given = native.DTYPES[x.dtype], x.data_ptr(), scale, momentum, int(nesterov), acc.numel()
    native.call("fl_accumulate_momentum", acc, *given, *pointers)


@dataclass(frozen=True)
class MagnitudeStats:
    """The result of ``magnitude_stats``.

    Attributes:
        count: elements whose magnitude bits were large enough, infinite and NaN included.
        total: sum of their finite magnitudes.
        squares: sum of their finite squares.
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


def norm(x: Tensor) -> Tensor:
    """Return () f64: the root of the sum of squares of the finite values of ``x`` (n,) f32.

    On CUDA the host does not wait.
    """
    return _sums(x, 0).view(torch.float64)[2].sqrt()


def _sums(acc: Tensor, above: int) -> Tensor:
    """Return ``fl_magnitudes``, (4,) int64 on the device of ``acc`` (n,) f32."""
    out = torch.empty(4, dtype=torch.int64, device=acc.device)
    workspace = native.workspace_for(_WORKSPACE_STATS, acc)
    native.call("fl_magnitude_stats", acc, acc.data_ptr(), acc.numel(), above, workspace.data_ptr(), out.data_ptr())
    return out


def count_above(acc: Tensor, thresholds: Sequence[int]) -> list[int]:
    """Return how many elements of ``acc`` (n,) f32 have magnitude bits >= each of 1 to 16 ``thresholds``."""
    given = (ctypes.c_uint32 * len(thresholds))(*thresholds)
    out = torch.empty(len(thresholds), dtype=torch.int64, device=acc.device)
    pointers = acc.data_ptr(), acc.numel(), ctypes.cast(given, ctypes.c_void_p), len(thresholds), out.data_ptr()
    native.call("fl_count_above", acc, *pointers)
    return [int(count) for count in out.tolist()]


def kth_magnitude(acc: Tensor, k: int) -> tuple[int, int]:
    """Return the bits of the ``k``-th largest magnitude of ``acc`` (n,) f32, and how many are larger; 1 <= k <= n."""
    out = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = native.workspace_for(_WORKSPACE_KTH, acc)
    given = acc.data_ptr(), acc.numel(), k, workspace.data_ptr(), out.data_ptr()
    native.call("fl_kth_magnitude", acc, *given)
    magnitude, above = out.tolist()
    return magnitude, above


def choose_largest(acc: Tensor, k: int) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode``: the ``k`` largest magnitudes of ``acc`` (n,) f32.

    Among equals the first go, and zeros stay unless all are. If some elements are not finite, only these are sent. On
    CUDA the host does not wait.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = native.workspace_for(_WORKSPACE_KTH, acc)
    given = acc.data_ptr(), acc.numel(), k, workspace.data_ptr(), choice.data_ptr()
    native.call("fl_choose_largest", acc, *given)
    return choice


def choose_threshold(how: Chooser, acc: Tensor, memory: Tensor, sample: Tensor | None = None) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode``: about ``how.k`` of ``acc`` (n,) f32, by a threshold.

    It is ``fl_choose_threshold``. On CUDA the host does not wait.

    Args:
        how: the way to find a threshold.
        acc: (n,) f32, the values of a tensor to send.
        memory: (``THRESHOLD_NUMBERS``,) f32, the state from call to call; zeros at first.
        sample: (``how.sampled``,) f32, for ``SAMPLED``.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = native.workspace_for(_WORKSPACE_THRESHOLD, acc)
    pointers = native.pointer(sample), memory.data_ptr(), workspace.data_ptr(), choice.data_ptr()
    native.call("fl_choose_threshold", acc, how, acc.data_ptr(), acc.numel(), *pointers)
    return choice


def choose_drawn(spec: Spec, acc: Tensor, k: int) -> Tensor:
    """Return (2,) int64, a choice for ``sparse_encode`` with ``SPARSE_RANDOM``: the ``k`` least numbers.

    One more element may be chosen: a message of capacity ``k`` leaves it out. ``acc`` (n,) f32 is what will be
    encoded: if elements are not finite, they alone are chosen. On CUDA the host does not wait.
    """
    choice = torch.empty(2, dtype=torch.int64, device=acc.device)
    workspace = native.workspace_for(_WORKSPACE_KTH, acc)
    native.call("fl_choose_drawn", acc, spec, acc.data_ptr(), k, workspace.data_ptr(), choice.data_ptr())
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
    up to the message's capacity. With ``SPARSE_RANDOM`` it sends the elements whose number in the seed's sequence is
    below ``threshold``, which is at most 2**32, and those that are not finite. ``acc`` keeps the elements that are not
    sent, as 0 if they are not finite.

    Args:
        spec: the spec of codec ``SPARSE``, for n elements; its dtype is that of ``x``.
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
    workspace = native.workspace_for(_WORKSPACE_ENCODE, acc)
    pointers = acc.data_ptr(), native.pointer(clear), threshold, ties, native.pointer(choice), workspace.data_ptr()
    native.call("fl_sparse_encode", acc, spec, native.pointer(x), scale, *pointers, native.messages(body, offsets))
