"""Residuals in 8 bits: error feedback between two steps at a byte for each element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .quantized.integer import Int

# Fused tensors begin at multiples of 128 elements, so that groups of 128 never hold values of two of them.
_GROUP = 128
_NEAREST = Int(bits=8, group_size=_GROUP, header=False)
_STOCHASTIC = Int(bits=8, group_size=_GROUP, rounding="stochastic", header=False)


@dataclass(frozen=True)
class PackedPart:
    """The residual of one tensor of n elements in 8 bits, in groups of its own.

    Attributes:
        codes: (n,) int8.
        scales: (ceil(n / 128),) f32, one for each 128 codes: an element is its code times its scale.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, x: Tensor) -> PackedPart:
        """Return ``x`` (n,) f32, rounded to the nearest codes."""
        whole = PackedResidual([(0, x.numel())], x.numel(), x.device)
        whole.pack(x.contiguous())
        return whole.parts[0]

    def expanded(self) -> Tensor:
        """Return the residual, (n,) f32: the bits that ``PackedResidual.unpack`` gives."""
        n = self.codes.numel()
        return self.scales.repeat_interleave(_GROUP)[:n].mul_(self.codes)

    def copy_(self, other: PackedPart) -> None:
        """Take the values of ``other``, of the same size."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)

    def zero_(self) -> None:
        """Forget everything that was not sent."""
        self.codes.zero_()
        self.scales.zero_()

    def to(self, device: torch.device | None) -> PackedPart:
        """Return a copy on ``device``; None: where it is."""
        return PackedPart(*(x.detach().to(device or x.device, copy=True) for x in (self.codes, self.scales)))


class PackedResidual:
    """The residual of tensors in a flat tensor, in messages of the codec ``int8`` without headers.

    The encoding process expands it into memory of its own, and packs it again afterwards. A message holds tensors that
    begin at a multiple of 128 after its first one: a whole bucket if fusion aligns tensors so.

    Args:
        spans: (offset, number of elements) of each tensor in the flat tensor, in order of offsets.
        numel: elements of the flat tensor.
        device: the device of the residual.

    Attributes:
        parts: the residual of each tensor: views of the messages.
    """

    def __init__(self, spans: Iterable[tuple[int, int]], numel: int, device: torch.device) -> None:
        self.numel = numel
        self._runs: list[tuple[int, int, Tensor]] = []
        self._gaps: list[tuple[int, int]] = []
        self.parts: list[PackedPart] = []
        runs: list[list[tuple[int, int]]] = []
        end = 0
        for offset, size in spans:
            if offset > end:
                self._gaps.append((end, offset))
            if not runs or (offset - runs[-1][0][0]) % _GROUP:
                runs.append([])
            runs[-1].append((offset, size))
            end = offset + size
        if end < numel:
            self._gaps.append((end, numel))
        for run in runs:
            start, stop = run[0][0], sum(run[-1])
            form = _NEAREST.wire(stop - start, torch.float32)
            message = torch.zeros(form.capacity, dtype=torch.uint8, device=device)
            if stop > start:
                self._runs.append((start, stop, message))
            scales, codes = form.views(message)
            for offset, size in run:
                first = (offset - start) // _GROUP
                own = codes[offset - start : offset - start + size].view(torch.int8)
                self.parts.append(PackedPart(own, scales[first : first + -(-size // _GROUP)]))

    def unpack(self, out: Tensor) -> Tensor:
        """Fill ``out`` (numel,) f32 with the residual, with zeros between the tensors; return it."""
        for start, stop, message in self._runs:
            _NEAREST.decode(message, out[start:stop])
        for start, stop in self._gaps:
            out[start:stop].zero_()
        return out

    def pack(self, x: Tensor, seed: int | None = None) -> None:
        """Keep the residual ``x`` (numel,) f32.

        Args:
            x: the residual.
            seed: the seed of stochastic rounding; None rounds to the nearest codes.
        """
        codec, numbers = _NEAREST if seed is None else _STOCHASTIC, 0
        for start, stop, message in self._runs:
            codec.encode(x[start:stop], message, seed=seed or 0, offset=numbers)
            numbers += -(-(stop - start) // _GROUP) * _GROUP
