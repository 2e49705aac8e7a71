"""What a rank is doing in a transport, as far as another rank must know it to see whether the two fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's side of a call.

    Attributes:
        what: operation and what must be equal on all ranks ("all_reduce of 10 x float32").
        sends: bytes for each rank; empty where ``what`` says it all.
        recvs: bytes expected of each rank; likewise.
    """

    what: str
    sends: tuple[int, ...] = ()
    recvs: tuple[int, ...] = ()

    @classmethod
    def exchange(cls, rank: int, size: int, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Call:
        """Return the call ``exchange(sends, recvs)``.

        Raises:
            ConfigError: the arguments cannot be exchanged, whatever the other ranks do.
        """
        if len(sends) != size or len(recvs) != size:
            raise ConfigError(f"exchange got {len(sends)} sends and {len(recvs)} recvs; give {size} of each, one per rank")
        for x in (*sends, *recvs):
            if x.dtype != torch.uint8 or not x.is_contiguous():
                raise ConfigError(
                    f"exchange got a tensor of {x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}; give contiguous "
                    "uint8 (x.contiguous().view(torch.uint8))"
                )
        lengths = tuple(x.numel() for x in sends), tuple(x.numel() for x in recvs)
        if lengths[0][rank] != lengths[1][rank]:
            raise ConfigError(
                f"exchange on rank {rank} has {lengths[0][rank]} bytes for itself and expects {lengths[1][rank]}; give "
                "entries of this rank the same length"
            )
        return cls("exchange", *lengths)

    @classmethod
    def all_reduce(cls, x: Tensor) -> Call:
        """Return the call ``all_reduce(x)``."""
        return cls(f"all_reduce of {_describe(x, 'all_reduce')}")

    @classmethod
    def broadcast(cls, x: Tensor, root: int, size: int) -> Call:
        """Return the call ``broadcast(x, root)``."""
        check_rank(root, size, "broadcast from")
        return cls(f"broadcast from rank {root} of {_describe(x, 'broadcast')}")

    def conflict(self, rank: int, other: Call, other_rank: int) -> str | None:
        """Return what does not fit between this rank's call and the ``other`` rank's, or None if they fit."""
        if self.what != other.what:
            return f"rank {rank} is in {self.what}, rank {other_rank} in {other.what}"
        if not self.sends:
            return None
        for sender, given, receiver, expected in (
            (rank, self.sends[other_rank], other_rank, other.recvs[rank]),
            (other_rank, other.sends[rank], rank, self.recvs[other_rank]),
        ):
            if given != expected:
                return f"rank {sender} sends {given} bytes to rank {receiver}, which expects {expected} bytes"
        return None


def check_rank(rank: int, size: int, what: str) -> None:
    """Raise ConfigError unless 0 <= rank < size."""
    if not 0 <= rank < size:
        raise ConfigError(f"{what} rank {rank}; give a rank of this group, 0 to {size - 1}")


def _describe(x: Tensor, name: str) -> str:
    if not x.is_contiguous():
        raise ConfigError(f"{name} got strides {x.stride()} for shape {tuple(x.shape)}; give x.contiguous()")
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"
