"""The signatures and registries of collectives: all-reduces of a flat tensor, and gathers of encoded messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..base.registry import Registry
from ..codecs import Codec
from ..transport import Transport


class AllReduce(Protocol):
    """The signature of a collective that sums a flat tensor."""

    def __call__(
        self, x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None
    ) -> None:
        """Replace ``x`` (n,), f32, bf16 or f16, by its sum over ranks: the same bits on every rank.

        Args:
            x: flat and contiguous, equally long on all ranks.
            codec: the codec of the messages, the same on all ranks.
            transport: the ranks; only the calling thread uses it.
            seed: the seed of stochastic rounding; the same on all ranks.
            residual: (n,) f32, this rank's error feedback: added before encoding, then replaced by the loss.
        """


@dataclass(frozen=True)
class MessageSpan:
    """The place of one message in a payload: bytes ``start`` to ``stop``, for ``numel`` elements of ``dtype``."""

    numel: int
    dtype: torch.dtype
    start: int
    stop: int


class Gather(Protocol):
    """The signature of a collective that gathers messages."""

    def __call__(
        self, payload: Tensor, every: Tensor, messages: Sequence[MessageSpan], codec: Codec, transport: Transport
    ) -> None:
        """Fill row r of ``every`` (size, nbytes) with the messages of rank r's ``payload`` (nbytes,), both uint8.

        Bytes between messages need not be sent.

        Args:
            payload: this rank's messages.
            every: takes the messages of all ranks, in rank order.
            messages: the places of the messages, the same on all ranks.
            codec: the codec that encoded them.
            transport: the ranks; only the calling thread uses it.
        """


Reduce = TypeVar("Reduce", bound=AllReduce)
Takes = Callable[[Codec, int], bool]
Suits = Callable[[int], bool]

registry: Registry[AllReduce] = Registry("collective", __package__, "fusionlayer.collectives")
gathers: Registry[Gather] = Registry("gathering collective", __package__, "fusionlayer.gathers")
_demands: dict[str, tuple[Takes, str]] = {}
_suits: dict[str, tuple[Suits, str | None]] = {}
_enclosing: set[str] = set()


def collective(
    name: str,
    *,
    takes: Takes | None = None,
    because: str = "",
    suits: Suits | None = None,
    instead: str | None = None,
    encloses: bool = False,
) -> Callable[[Reduce], Reduce]:
    """Register a function as the collective ``name`` of flat tensors.

    Args:
        name: the name of the collective.
        takes: returns whether the collective can use a codec over this many ranks; None: it can use every codec.
        because: the unique ability of the collective, as a clause without subject.
        suits: returns whether codecs that were made for the collective should take it over this many ranks, if the user
            names none; None: over any number.
        instead: the collective that these codecs take over other numbers of ranks; None: the usual one.
        encloses: the collective has the argument ``enclosed`` (see ``encloses``).
    """

    def register(function: Reduce) -> Reduce:
        registry.add(name, lambda: function)
        if takes is not None:
            _demands[name] = takes, because
        if suits is not None:
            _suits[name] = suits, instead
        if encloses:
            _enclosing.add(name)
        return function

    return register


def instead_of(name: str | None, size: int) -> str | None:
    """Return the collective that codecs made for the collective ``name`` take over ``size`` ranks; None: the usual."""
    while name is not None:
        registry.get(name)  # loads it: only then is it known over how many ranks it suits
        suits, instead = _suits.get(name, (None, None))
        if suits is None or suits(size):
            break
        name = instead
    return name


def encloses(name: str) -> bool:
    """Return whether every rank sends every other rank a message in the collective ``name``, which can carry more.

    Its argument ``enclosed`` (size, n) uint8 has a row for each rank. The row of this rank is sent with its messages,
    and the other ranks' rows are filled with theirs. ``n`` is a multiple of ``wire.ALIGN``, as messages are.
    """
    registry.get(name)  # its module says so
    return name in _enclosing


def sums_anew(codec: Codec, size: int) -> bool:
    """Return whether ``codec`` can encode partial sums: a codec that selects elements would select others each time."""
    return not codec.ahead


def check_pair(name: str, codec: Codec, size: int) -> None:
    """Raise ``ConfigError`` if the collective ``name`` of flat tensors cannot use ``codec`` over ``size`` ranks."""
    takes, because = _demands.get(name, (None, ""))
    if takes is None or takes(codec, size):
        return
    others = [other for other in registry.names() if other not in _demands or _demands[other][0](codec, size)]
    raise ConfigError(
        f"algorithm {name!r} {because} and cannot use {codec}; choose another algorithm, such as {', '.join(others)}, "
        "or another codec"
    )


def gather_collective(name: str) -> Callable[[Gather], Gather]:
    """Register a function as the collective ``name`` of messages."""

    def register(function: Gather) -> Gather:
        gathers.add(name, lambda: function)
        return function

    return register


def is_gather(name: str) -> bool:
    """Return whether the collective ``name`` carries messages that were encoded ahead of fusion."""
    return gathers.knows(name)


def get(name: str) -> AllReduce:
    """Return the collective of flat tensors called ``name``; raise ``ConfigError`` if there is none."""
    if not registry.knows(name) and is_gather(name):
        raise ConfigError(
            f"algorithm {name!r} carries tensors that were encoded one by one, ahead of fusion, and cannot sum a flat "
            f"tensor; use ahead=True, or choose one of: {', '.join(registry.names())}"
        )
    return registry.get(name)


def get_gather(name: str) -> Gather:
    """Return the collective of messages called ``name``; raise ``ConfigError`` if there is none."""
    if not is_gather(name) and registry.knows(name):
        raise ConfigError(
            f"algorithm {name!r} sums a flat tensor and cannot carry tensors that were encoded ahead of fusion; use "
            f"ahead=False, or choose one of: {', '.join(gathers.names())}"
        )
    return gathers.get(name)


def split_evenly(numel: int, parts: int, block: int) -> int:
    """Return the length that cuts ``numel`` elements into ``parts`` pieces: a positive multiple of ``block``."""
    return max(1, -(-numel // (parts * block))) * block
