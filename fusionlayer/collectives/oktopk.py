"""``oktopk``: sparse all-reduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TensorState
from ..codecs.research.oktopk import BALANCE, OkTopk
from ..codecs.sparse.sparsifier import MEMORY
from ..transport import Transport
from ..transport.composed import by_rank
from ._base import check_pair, collective

INFINITY = 0x7F800000  # bits of f32; larger magnitudes are NaN
DIGITS = ((31, 24), (24, 16), (16, 8), (8, 0))  # the bits of a magnitude, in four numbers

Pairs = tuple[Tensor, Tensor]

_KEY = "oktopk "  # before the names of what is kept, which other codecs keep next to it


@collective("oktopk", takes=lambda codec, size: codec.ahead, because="sums sparse selections")
def oktopk(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum the elements that ranks select, each rank one region of the tensor, and keep the largest sums (PPoPP 2022).

    1. Select: the codec selects elements of this rank, about k of them.
    2. Regions: ranks agree on the ends of regions, the means over ranks of the quantiles of selected positions.
    3. Split and reduce: elements selected in region j go to rank j, which sums them in rank order in f32.
    4. Threshold: the k-th largest magnitude of all sums, where k is the mean number of selected elements. It is exact:
       four histograms are summed over ranks. Sums that equal it pass too, and all sums that are not finite.
    5. Balance: if one rank has far more sums that pass than the mean, ranks deal them out evenly.
    6. All-gather: every rank gets every sum that passed.

    With the codec ``oktopk`` and the parts of a bucket, regions serve ``tau`` sums and the threshold ``reuse`` sums.
    Each rank first announces its kept state; if ranks have kept different things, all of them search both again.

    A pair is a 32-bit position and an f32 value. A rank sends at most 3 (size - 1) / size * 8k bytes in pairs, if its
    selection is spread evenly over regions, and its sizes; a search for a threshold adds some KiB of histograms.
    Regions only decide which rank adds an element; no result depends on them. Selected elements whose sums did not pass
    go back into ``residual``.
    """
    check_pair("oktopk", codec, transport.size)
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    rank, size, numel = transport.rank, transport.size, x.numel()
    own = codec if isinstance(codec, OkTopk) and codec.parts else None
    state = own.parts[0].state if own and own.parts else None
    known = None if state is None else _recall(state, numel, size)
    if state is not None and known is None:
        state.tensors.pop(MEMORY, None)  # the threshold of other tensors
    positions, values = _select(x, codec, state, transport, seed, residual)

    counts = torch.zeros(0, device="cpu")
    if own is not None:
        token = 0 if known is None else known.token
        counts = _count(positions, [0] * (size - 1) if known is None else known.ends, token, transport)
        known = known if token and bool((counts[:, 0] == token).all()) else None
    now = known or _Agreed([], 0, 0, 0)
    if own is None or not 0 < now.sums < own.tau:
        now = replace(now, ends=_boundaries(positions, numel, transport)[1:-1], sums=0)
        counts = _count(positions, now.ends, 0, transport)
    counts = counts[:, 1:]
    bounds = [0, *now.ends, numel]

    region = torch.zeros(bounds[rank + 1] - bounds[rank], device=x.device)
    touched = torch.zeros_like(region, dtype=torch.bool)
    for where, what in _to_owners(positions, values, counts, transport):
        local = where - bounds[rank]
        region[local] += what
        touched[local] = True
    places = torch.nonzero(touched).view(-1)
    magnitudes = (region.view(torch.int32) & 0x7FFFFFFF)[places]
    k = max(1, int(counts.sum()) // size)
    passed, lengths = places[:0], [0]
    if own is not None and 0 < now.passes < own.reuse:
        passed = places[magnitudes >= now.threshold]
        lengths = _lengths(passed.numel(), transport)
    if own is None or not k <= 4 * sum(lengths) <= 4 * own.slack * k:
        threshold = min(_kth_largest(magnitudes, k, transport), INFINITY)
        now = replace(now, threshold=threshold, passes=0)
        passed = places[magnitudes >= threshold]
        lengths = _lengths(passed.numel(), transport)
    if state is not None:
        _remember(state, replace(now, sums=now.sums + 1, passes=now.passes + 1), numel, size)

    total = torch.zeros(numel, device=x.device)
    survived = torch.zeros_like(total, dtype=torch.bool)
    sums = passed + bounds[rank], region[passed]
    if size * max(lengths) > (own.balance if own else BALANCE) * sum(lengths):
        sums, lengths = _dealt_out(*sums, lengths, transport)
    for where, what in _to_all(*sums, lengths, transport):
        total[where] = what
        survived[where] = True
    if residual is not None:
        failed = ~survived[positions]
        residual[positions[failed]] += values[failed]
    x.copy_(total)


# ---- state kept from sum to sum --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Agreed:
    """State that all ranks share from an earlier sum of the same tensors.

    Attributes:
        ends: where the regions end, but for the last one; ascending.
        threshold: bits of the magnitude from which on a sum passes.
        sums: how many sums these regions have served.
        passes: how many sums this threshold has served.
    """

    ends: list[int]
    threshold: int
    sums: int
    passes: int

    @property
    def token(self) -> int:
        """A number above 0 that differs if anything differs."""
        return 1 + zlib.crc32(repr(self).encode())


def _recall(state: TensorState, numel: int, size: int) -> _Agreed | None:
    """Return the state that ``_remember`` kept for ``numel`` elements and ``size`` ranks; None if it kept nothing for
    these."""
    kept = {key.removeprefix(_KEY): int(value) for key, value in state.numbers.items() if key.startswith(_KEY)}
    if (kept.get("numel"), kept.get("size")) != (numel, size):
        return None
    return _Agreed([kept[f"end {i}"] for i in range(1, size)], kept["threshold"], kept["sums"], kept["passes"])


def _remember(state: TensorState, agreed: _Agreed, numel: int, size: int) -> None:
    """Keep ``agreed`` with the first tensor of the bucket, where checkpoints find it."""
    for key in [key for key in state.numbers if key.startswith(_KEY)]:
        del state.numbers[key]
    kept = {"numel": numel, "size": size, "threshold": agreed.threshold, "sums": agreed.sums, "passes": agreed.passes}
    kept |= {f"end {i}": end for i, end in enumerate(agreed.ends, 1)}
    state.numbers.update({_KEY + key: float(value) for key, value in kept.items()})


# ---- steps of a sum -------------------------------------------------------------------------------------------------


def _select(
    x: Tensor, codec: Codec, state: TensorState | None, transport: Transport, seed: int, residual: Tensor | None
) -> Pairs:
    """Return positions (m,) int64, ascending, and values (m,) f32 of the elements of ``x`` that the codec sends."""
    message = transport.scratch("outgoing", codec.wire(x.numel(), x.dtype).capacity, x.device)
    sent = torch.zeros(x.numel(), device=x.device)
    if x.numel():
        if state is None:
            codec.encode(x, message, seed=derive_seed(seed), residual=residual)
        else:
            if MEMORY in state.tensors:
                state.tensors[MEMORY] = state.tensors[MEMORY].to(x.device)  # a checkpoint may have it elsewhere
            codec.encode_tensor(x, message, TensorState(residual, state.tensors), seed=derive_seed(seed))
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
        quantiles = torch.arange(1, size, device="cpu") * numel // size
    transport.all_reduce(quantiles)
    return [0, *(quantiles // size).tolist(), numel]


def _count(positions: Tensor, ends: Sequence[int], token: int, transport: Transport) -> Tensor:
    """Return (size, 1 + size) int64: in row r the token of rank r, and how many elements it selected in each region."""
    edges = torch.searchsorted(positions, torch.tensor(ends, dtype=torch.int64, device=positions.device)).cpu()
    first, last = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.tensor([len(positions)], device="cpu")
    mine = torch.cat([torch.tensor([token], device="cpu"), torch.diff(edges, prepend=first, append=last)])
    every = torch.empty(transport.size, 1 + transport.size, dtype=torch.int64, device="cpu")
    transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
    return every


def _lengths(mine: int, transport: Transport) -> list[int]:
    """Return ``mine`` of every rank, in rank order."""
    every = torch.empty(transport.size, 1, dtype=torch.int64, device="cpu")
    transport.all_gather(torch.tensor([mine], device="cpu").view(torch.uint8), every.view(torch.uint8))
    return [int(n) for n in every]


def _to_owners(positions: Tensor, values: Tensor, counts: Tensor, transport: Transport) -> list[Pairs]:
    """Return the pairs of this rank's region from every rank, in rank order; ``counts`` (size, size) are all pairs."""
    return _swap(positions, values, counts[transport.rank].tolist(), counts[:, transport.rank].tolist(), transport)


def _dealt_out(
    positions: Tensor, values: Tensor, lengths: Sequence[int], transport: Transport
) -> tuple[Pairs, list[int]]:
    """Return this rank's even share of the pairs of all ranks, whose order stays, and the lengths of all shares.

    Each rank sends its surplus to the ranks with fewer (section 3.1.2).
    """
    size, rank, total = transport.size, transport.rank, sum(lengths)
    begins = [0, *accumulate(lengths)]
    edges = [total * share // size for share in range(size + 1)]

    def moved(source: int, to: int) -> int:
        return max(0, min(begins[source + 1], edges[to + 1]) - max(begins[source], edges[to]))

    sends, recvs = [moved(rank, to) for to in range(size)], [moved(source, rank) for source in range(size)]
    where, what = zip(*_swap(positions, values, sends, recvs, transport), strict=True)
    shares = [end - begin for begin, end in zip(edges, edges[1:], strict=False)]
    return (torch.cat(where), torch.cat(what)), shares


def _to_all(positions: Tensor, values: Tensor, lengths: Sequence[int], transport: Transport) -> list[Pairs]:
    """Return the pairs of every rank, in rank order."""
    mine = _pack(positions, values)
    recvs = [mine.new_empty(8 * n) for n in lengths]
    transport.exchange(by_rank([mine] * transport.size, recvs))
    return [_unpack(data) for data in recvs]


def _swap(
    positions: Tensor, values: Tensor, sends: list[int], recvs: Sequence[int], transport: Transport
) -> list[Pairs]:
    """Send the first ``sends[0]`` pairs to rank 0 and so on; return ``recvs[r]`` pairs of each rank r."""
    outgoing = [_pack(*part) for part in zip(positions.split(sends), values.split(sends), strict=True)]
    incoming = [outgoing[0].new_empty(8 * n) for n in recvs]
    transport.exchange(by_rank(outgoing, incoming))
    return [_unpack(data) for data in incoming]


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
