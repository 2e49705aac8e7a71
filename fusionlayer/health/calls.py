"""Descriptions of collective calls and messages: two ranks compare theirs to see whether they can complete together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..base.errors import ConfigError

MODULUS = (1 << 61) - 1
"""A prime that the balances of calls are less than."""

# Operations of torch for which every rank must give tensors of the same shape and type. Others may differ, such as an
# uneven all-to-all or a gather: for these only the operation is compared.
_ALIKE = {"all_reduce", "broadcast", "reduce", "barrier", "all_reduce_sparse"}
_ALIKE |= {"_reduce_scatter_base", "_all_gather_base"}


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's side of a call.

    Attributes:
        what: the operation and everything that must be equal on all ranks ("all_reduce of 10 x float32").
        sends: bytes for each rank; empty if ``what`` describes the call completely. With a partner, only its bytes.
        recvs: bytes expected from each rank, by the same rules.
        partner: the other rank of a send or a receive; None for a collective call.
        purpose: the user's purpose of a collective call, if given (``Transport.purpose``).
        why: this rank's reason for the call, for the errors of other ranks; it may differ between ranks.
        where: line of the program that has made it, such as "train.py:31"; "" if it was not looked up.
        balance: the balance of a call whose lengths were left out, a number. Their sum over all ranks is a multiple of
            ``MODULUS`` if each rank sends what the others expect, and hardly ever otherwise.
    """

    what: str
    sends: tuple[int, ...] = ()
    recvs: tuple[int, ...] = ()
    partner: int | None = None
    purpose: str = ""
    why: str = ""
    where: str = ""
    balance: int = 0

    @property
    def text(self) -> str:
        """A description of the call, for messages."""
        return self.purpose or self.what

    @property
    def common(self) -> str:
        """The part of a call that torch has recorded that must be equal on all ranks."""
        operation = self.what.partition(" of ")[0]
        return self.what if operation in _ALIKE else operation

    @classmethod
    def exchange(cls, rank: int, size: int, messages: Mapping[int, tuple[Tensor, Tensor]], purpose: str = "") -> Call:
        """Return the call ``exchange(messages)``."""
        sends, recvs = [0] * size, [0] * size
        for peer, pair in messages.items():
            if not 0 <= peer < size:
                raise ConfigError(f"exchange got a message for rank {peer}; give ranks from 0 to {size - 1}")
            for x in pair:
                if x.dtype != torch.uint8 or not x.is_contiguous():
                    raise ConfigError(
                        f"exchange got a tensor of {x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}; give "
                        "contiguous uint8, such as x.contiguous().view(torch.uint8)"
                    )
            sends[peer], recvs[peer] = map(Tensor.numel, pair)
        if sends[rank] != recvs[rank]:
            raise ConfigError(
                f"exchange on rank {rank} has {sends[rank]} bytes for itself and expects {recvs[rank]}; give the "
                "message and the room of this rank the same length"
            )
        return _exchange(tuple(sends), tuple(recvs), purpose)

    @classmethod
    def rows(cls, size: int, nbytes: int, purpose: str = "") -> Call:
        """Return the call ``exchange`` in which every rank sends ``nbytes`` to every rank."""
        each = (nbytes,) * size
        return _exchange(each, each, purpose)

    @classmethod
    def all_reduce(cls, x: Tensor, purpose: str = "") -> Call:
        """Return the call ``all_reduce(x)``."""
        return cls(f"all_reduce of {_describe(x, 'all_reduce')}", purpose=purpose)

    @classmethod
    def broadcast(cls, x: Tensor, root: int, size: int, purpose: str = "") -> Call:
        """Return the call ``broadcast(x, root)``."""
        _check_rank(root, size, "broadcast from")
        return cls(f"broadcast from rank {root} of {_describe(x, 'broadcast')}", purpose=purpose)

    @classmethod
    def send(cls, x: Tensor, rank: int, to: int, tag: int, size: int) -> Call:
        """Return the call ``send(x, to, tag)`` on ``rank``."""
        _check_rank(to, size, "send to", rank)
        _describe(x, "send")
        return cls(f"message with tag {tag}", sends=(x.nbytes,), partner=to)

    @classmethod
    def recv(cls, x: Tensor, rank: int, source: int, tag: int, size: int) -> Call:
        """Return the call ``recv(x, source, tag)`` on ``rank``."""
        _check_rank(source, size, "recv from", rank)
        _describe(x, "recv")
        return cls(f"message with tag {tag}", recvs=(x.nbytes,), partner=source)

    def brief(self, rank: int) -> Call:
        """Return the call of ``rank`` in a form whose size does not depend on the number of ranks."""
        if self.partner is not None or not self.sends:
            return self
        balance = sum(_weight(rank, to) * n for to, n in enumerate(self.sends))
        balance -= sum(_weight(source, rank) * n for source, n in enumerate(self.recvs))
        return replace(self, sends=(), recvs=(), balance=balance % MODULUS)

    def conflict(self, rank: int, other: Call, other_rank: int) -> str | None:
        """Return why this rank's call and the ``other`` rank's call can never complete together, or None."""
        if self.partner is None and other.partner is None:
            if self.purpose != other.purpose:
                mine, theirs = (
                    (call.purpose or call.what) + (f" ({call.why})" if call.why else "") for call in (self, other)
                )
                return f"rank {rank} is in {mine}, rank {other_rank} in {theirs}"
            if self.what != other.what:
                return f"rank {rank} is in {self.what}, rank {other_rank} in {other.what}"
            if self.sends and other.sends:
                return _difference(rank, self.sends[other_rank], other_rank, other.recvs[rank]) or _difference(
                    other_rank, other.sends[rank], rank, self.recvs[other_rank]
                )
        elif self.partner == other_rank and other.partner == rank and self.what == other.what:
            if self.sends and other.recvs:
                return _difference(rank, self.sends[0], other_rank, other.recvs[0])
            if self.recvs and other.sends:
                return _difference(other_rank, other.sends[0], rank, self.recvs[0])
            verb = "send to" if self.sends else "receive from"
            return f"ranks {rank} and {other_rank} both wait to {verb} each other"
        return None


@lru_cache(maxsize=1024)
def _exchange(sends: tuple[int, ...], recvs: tuple[int, ...], purpose: str) -> Call:
    """Return the call of an exchange. It is cached, because every step makes the same few exchanges."""
    return Call("exchange", sends, recvs, purpose=purpose)


def _weight(sender: int, receiver: int) -> int:
    """Return a number of its own for each pair of ranks."""
    mixed = ((sender << 32 | receiver) + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % MODULUS


def _difference(sender: int, given: int, receiver: int, expected: int) -> str | None:
    if given == expected:
        return None
    return f"rank {sender} sends {given} bytes to rank {receiver}, which expects {expected} bytes"


def _check_rank(rank: int, size: int, what: str, own: int | None = None) -> None:
    if not 0 <= rank < size or rank == own:
        another = "" if own is None else f", but not this rank {own}"
        raise ConfigError(f"{what} rank {rank}; give a rank from 0 to {size - 1}{another}")


def _describe(x: Tensor, name: str) -> str:
    if not x.is_contiguous():
        raise ConfigError(f"{name} got strides {x.stride()} for shape {tuple(x.shape)}; give x.contiguous()")
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"
