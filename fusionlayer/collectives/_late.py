"""``two_shot`` without the ranks that are late: what they bring waits in their error feedback, and travels later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..codecs import AgreeingCodec, Codec, PartsCodec
from ..errors import ConfigError
from ..transport import Transport
from ._base import AllReduce, split_evenly
from ._unequal import by_shares
from .two_shot import two_shot

__all__ = ["LEAVES_OUT", "MOST_MISSED", "Graceful", "check_grace"]

LEAVES_OUT = "two_shot"
"""The collective that can leave ranks out."""

MOST_MISSED = 8
"""Sums of one bucket in a row that a rank may miss. Then all wait for it: what it owes would grow old, and what has
been posted to it takes memory."""


def check_grace(name: str, codec: Codec) -> None:
    """Raise ``ConfigError`` unless the collective ``name`` with ``codec`` can leave out ranks that are late."""
    if name != LEAVES_OUT:
        raise ConfigError(
            f"grace with algorithm {name!r}; only {LEAVES_OUT!r} leaves out ranks that are late: give "
            f"algorithm={LEAVES_OUT!r}, or leave grace out"
        )
    if isinstance(codec, (AgreeingCodec, PartsCodec)):
        raise ConfigError(
            f"grace with codec {codec}, for which all ranks agree on something before each sum; choose another codec, "
            "or leave grace out"
        )


class Graceful:
    """The sum of one bucket over the ranks that are there; all ranks get its bits. An ``AllReduce`` with a memory.

    Before each sum ``attend`` finds out who is there. If all are, it is the sum without a grace. Else the others alone
    make a ``two_shot``, and post its second half, the encoded sums, to those who are late. A late rank adds what it
    would have summed to its residual, to be sent with the next sum that it is in, and decodes the same messages as the
    others. So nothing is lost, and the factor of an average stays one over all ranks.

    Args:
        shares: as for ``two_shot_by_shares``; they count while all ranks are there.
        grace: seconds for which half of the ranks wait for the rest.
        size: number of ranks.
    """

    def __init__(self, shares: Sequence[int], grace: float, size: int) -> None:
        self._whole: AllReduce = by_shares(LEAVES_OUT, shares)
        self._grace = grace
        self._missed = [0] * size
        self._present: tuple[int, ...] = ()

    def attend(self, transport: Transport, is_due: Callable[[], bool] = lambda: True) -> None:
        """Find out who is there for the next sum. It may run on another thread, over another transport, than that.

        Args:
            transport: for this question.
            is_due: as for ``Transport.attend``.
        """
        must = [rank for rank, missed in enumerate(self._missed) if missed >= MOST_MISSED]
        self._present = present = transport.attend(self._grace, must, is_due)
        self._missed = [0 if rank in present else missed + 1 for rank, missed in enumerate(self._missed)]

    def __call__(
        self, x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None
    ) -> None:
        """Sum as ``AllReduce`` says, after ``attend``. ``residual`` is given, for lossless codecs too."""
        assert residual is not None
        present = self._present
        if transport.rank not in present:
            _miss(x, codec, transport, present, residual)
            return
        if codec.lossless:
            _take_along(x, residual)
            residual = None
        if len(present) == transport.size:
            self._whole(x, codec, transport, seed=seed, residual=residual)
        else:
            two_shot(x, codec, cast(Transport, _Present(transport, present)), seed=seed, residual=residual)


class _Present:
    """The ranks that are there, numbered anew in the same order: what ``two_shot`` needs of a transport over them.

    What goes to all of them is posted to the others too.
    """

    peer_bytes = 0  # no launch waits for those who are late

    def __init__(self, whole: Transport, present: Sequence[int]) -> None:
        self._whole = whole
        self._present = present
        self._late = [rank for rank in range(whole.size) if rank not in present]
        self.rank, self.size = present.index(whole.rank), len(present)
        self.scratch = whole.scratch

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self._exchange(list(x), list(out))

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        self._exchange([x] * self.size, list(out))
        for rank in self._late:
            self._whole.post(x, rank, self._whole.sequence)

    def _exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        nothing = sends[0][:0]
        outgoing, incoming = ([nothing] * self._whole.size for _ in range(2))
        for rank, send, recv in zip(self._present, sends, recvs, strict=True):
            outgoing[rank], incoming[rank] = send, recv
        self._whole.exchange(outgoing, incoming)


def _miss(x: Tensor, codec: Codec, transport: Transport, present: Sequence[int], residual: Tensor) -> None:
    """Add ``x`` to the residual of a rank that is late, and replace it by the sum of those who were ``present``."""
    # NaN and Inf stay behind, as they do in codecs: they would come back in every step from here on.
    residual.add_(torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0))
    nothing = [x.new_empty(0, dtype=torch.uint8)] * transport.size
    for _ in range(2):  # those of ``two_shot``: numbers of calls stay alike
        transport.exchange(nothing, nothing)
    chunk = split_evenly(x.numel(), len(present), codec.block)
    capacity = codec.wire(chunk, x.dtype).capacity
    incoming = transport.scratch("incoming 0", len(present) * capacity, x.device).view(len(present), capacity)
    for row, rank in zip(incoming, present, strict=True):
        transport.recv(row, rank, transport.sequence)
    codec.decode_chunks(incoming, x, chunk)


def _take_along(x: Tensor, residual: Tensor) -> None:
    """Add what this rank has kept to ``x``; keep what ``x`` cannot hold of it."""
    if residual.any():
        x.copy_(residual.add_(x))
        residual.sub_(x)
