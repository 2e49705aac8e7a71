"""``grid``: sums along rows of ranks, then along columns, so that each rank exchanges messages with few others."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import check_pair, collective, sums_anew
from ._levels import Grid, grid_of, in_rows
from .two_level import sum_on
from .two_shot import two_shot


@collective("grid", takes=sums_anew, because="encodes partial sums anew, where nothing may be left out,")
def grid(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """Sum over rows of ranks, then between rows: ``two_level`` on about as many rows as a row has ranks.

    It is for many nodes of one rank. Each rank sends at most 4 sqrt(size) messages instead of 2 (size - 1) as in
    ``two_shot``: half of them have 1 / sqrt(size) of the tensor's message, the others 1 / size. It sends as many bytes
    as ``two_shot``, and quantises three times instead of twice. Rows have neighbours in the order of nodes, and may
    differ by one rank in length. Both ways use the codec between nodes; up to two ranks this is ``two_shot``.

    Arguments are ``two_level``'s.
    """
    check_pair("grid", codec, transport.size)
    here = _grid(transport.nodes, transport.rank)
    if len(here.ranks) == 1:
        return two_shot(x, codec, transport, seed=seed, residual=residual, out=out, piece=piece)
    sum_on(here, x, codec, None, transport, seed=seed, residual=residual, out=out, piece=piece)


@lru_cache(maxsize=64)
def _grid(nodes: tuple[tuple[int, ...], ...], rank: int) -> Grid:
    return grid_of(in_rows(tuple(chain(*nodes))), rank)
