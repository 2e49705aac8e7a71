"""``oktopk``: sparse all-reduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import AgreeingCodec, Codec
from ..seeds import derive_seed
from ..transport import Transport
from ._base import check_pair, collective

__all__ = ["oktopk"]

INFINITY = 0x7F800000  # bits of f32; larger magnitudes are NaN
DIGITS = ((31, 24), (24, 16), (16, 8), (8, 0))  # the bits of a magnitude, in four numbers

Pairs = tuple[Tensor, Tensor]


@collective("oktopk", takes=lambda codec, size: codec.ahead, because="sums sparse selections")
def oktopk(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum the elements that ranks select, each rank one region of the tensor, and keep the largest sums (PPoPP 2022).

    1. Select: the codec selects elements of this rank, about k of them.
    2. Balance: ranks agree on the ends of regions, the means over ranks of the quantiles of selected positions.
    3. Split and reduce: elements selected in region j go to rank j, which sums them in rank order in f32.
    4. Threshold: the k-th largest magnitude of all sums, where k is the mean number of selected elements. It is exact:
       four histograms are summed over ranks. Sums that equal it pass too, and all sums that are not finite.
    5. All-gather: every rank gets every sum that passed.

    A pair is a 32-bit position and an f32 value. If the sums that pass are spread over the regions as the selected
    elements are, a rank sends 2 (size - 1) / size * 8k bytes, some KiB of histograms, and its sizes. Regions only
    decide which rank adds an element; no result depends on them. Selected elements whose sums did not pass go back into
    ``residual``.
    """
    check_pair("oktopk", codec, transport.size)
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    rank, numel = transport.rank, x.numel()
    positions, values = _select(x, codec, transport, seed, residual)
    bounds = _boundaries(positions, numel, transport)
    received, chosen = _to_owners(positions, values, bounds, transport)

    region = torch.zeros(bounds[rank + 1] - bounds[rank], device=x.device)
    touched = torch.zeros_like(region, dtype=torch.bool)
    for where, what in received:
        local = where - bounds[rank]
        region[local] += what
        touched[local] = True
    magnitudes = (region.view(torch.int32) & 0x7FFFFFFF)[touched]
    threshold = min(_kth_largest(magnitudes, max(1, chosen // transport.size), transport), INFINITY)
    passed = torch.nonzero(touched).view(-1)[magnitudes >= threshold]

    total = torch.zeros(numel, device=x.device)
    survived = torch.zeros_like(total, dtype=torch.bool)
    for where, what in _to_all(passed + bounds[rank], region[passed], transport):
        total[where] = what
        survived[where] = True
    if residual is not None:
        failed = ~survived[positions]
        residual[positions[failed]] += values[failed]
    x.copy_(total)


def _select(x: Tensor, codec: Codec, transport: Transport, seed: int, residual: Tensor | None) -> Pairs:
    """Return positions (m,) int64, ascending, and values (m,) f32 of the elements of ``x`` that the codec sends."""
    message = transport.scratch("outgoing", codec.wire(x.numel(), x.dtype).capacity, x.device)
    sent = torch.zeros(x.numel(), device=x.device)
    if x.numel():
        codec.encode(x, message, seed=derive_seed(seed), residual=residual)
        codec.decode(message, sent, dtype=x.dtype)
    positions = torch.nonzero(sent).view(-1)
    return positions, sent[positions]


def _boundaries(positions: Tensor, numel: int, transport: Transport) -> list[int]:
    """Return ``size + 1`` ascending positions, the same on all ranks: where each region begins, and ``numel``."""
    size, count = transport.size, positions.numel()
    if count:
        ranks = torch.arange(1, size, device=positions.device) * count // size
        quantiles = positions[ranks].cpu()
    else:
        quantiles = torch.arange(1, size) * numel // size
    transport.all_reduce(quantiles)
    return [0, *(quantiles // size).tolist(), numel]


def _to_owners(positions: Tensor, values: Tensor, bounds: list[int], transport: Transport) -> tuple[list[Pairs], int]:
    """Return the pairs of this rank's region from every rank, in rank order, and how many pairs all ranks have sent."""
    edges = torch.searchsorted(positions, torch.tensor(bounds[1:-1], dtype=torch.int64, device=positions.device))
    lengths = torch.diff(edges.cpu(), prepend=torch.zeros(1, dtype=torch.int64), append=torch.tensor([len(positions)]))
    every = torch.empty(transport.size, transport.size, dtype=torch.int64)
    transport.all_gather(lengths.view(torch.uint8), every.view(torch.uint8))
    parts = zip(positions.split(lengths.tolist()), values.split(lengths.tolist()), strict=True)
    sends = [_pack(where, what) for where, what in parts]
    recvs = [sends[0].new_empty(8 * int(n)) for n in every[:, transport.rank]]
    transport.exchange(sends, recvs)
    return [_unpack(data) for data in recvs], int(every.sum())


def _to_all(positions: Tensor, values: Tensor, transport: Transport) -> list[Pairs]:
    """Return the pairs of every rank, in rank order."""
    lengths = torch.empty(transport.size, 1, dtype=torch.int64)
    transport.all_gather(torch.tensor([len(positions)]).view(torch.uint8), lengths.view(torch.uint8))
    mine = _pack(positions, values)
    recvs = [mine.new_empty(8 * int(n)) for n in lengths]
    transport.exchange([mine] * transport.size, recvs)
    return [_unpack(data) for data in recvs]


def _kth_largest(magnitudes: Tensor, k: int, transport: Transport) -> int:
    """Return the bits of the k-th largest of all ranks' ``magnitudes`` (m,) int32; 0 if there are fewer than k."""
    found = 0
    for high, low in DIGITS:
        same = magnitudes[(magnitudes >> high) == (found >> high)] if high < 31 else magnitudes
        digits = (same >> low) & ((1 << (high - low)) - 1)
        histogram = torch.bincount(digits, minlength=1 << (high - low)).to("cpu", torch.int32)
        transport.all_reduce(histogram)
        from_above = histogram.flip(0).cumsum(0)
        if int(from_above[-1]) < k:
            return 0
        step = int(torch.searchsorted(from_above, k))
        k -= int(from_above[step] - histogram.flip(0)[step])
        found |= (len(histogram) - 1 - step) << low
    return found


def _pack(positions: Tensor, values: Tensor) -> Tensor:
    """Return (8 * m,) uint8: positions as 32-bit integers, then values."""
    # Positions beyond 2^31 wrap around here and back in _unpack.
    return torch.cat([positions.to(torch.int32), values.view(torch.int32)]).view(torch.uint8)


def _unpack(data: Tensor) -> Pairs:
    """Return positions (m,) int64 and values (m,) f32 from the bytes of ``_pack``."""
    words, count = data.view(torch.int32), data.numel() // 8
    return words[:count].to(torch.int64) & 0xFFFFFFFF, words[count:].view(torch.float32)
