"""Collectives: how messages travel. ``get`` and ``names`` are the way to them."""

from ..codecs import Codec
from ..errors import ConfigError
from ._base import AllReduce, Gather, MessageSpan, collective, gather_collective, gathers, registry

__all__ = [
    "AllReduce",
    "Gather",
    "MessageSpan",
    "choose",
    "collective",
    "gather_collective",
    "gather_names",
    "get",
    "get_gather",
    "names",
    "settle",
]

names = registry.names
gather_names = gathers.names


def get(name: str) -> AllReduce:
    """Return the collective of flat tensors called ``name``; ``ConfigError`` if it is none."""
    if name in gathers.names():
        raise ConfigError(
            f"algorithm {name!r} carries tensors that were encoded one by one, ahead of fusion, and cannot sum a flat "
            f"tensor; use ahead=True, or choose one of: {', '.join(names())}"
        )
    return registry.get(name)


def get_gather(name: str) -> Gather:
    """Return the collective of messages called ``name``; ``ConfigError`` if it is none."""
    if name in registry.names():
        raise ConfigError(
            f"algorithm {name!r} sums a flat tensor and cannot carry tensors that were encoded ahead of fusion; use "
            f"ahead=False, or choose one of: {', '.join(gather_names())}"
        )
    return gathers.get(name)


def choose(lossless: bool, size: int, *, ahead: bool = False, wanted: str | None = None) -> str:
    """Return the name of the collective for a number of ranks and a codec, which may want one, by default."""
    if ahead:
        return "gather"
    if wanted is not None:
        return wanted
    if lossless:
        return "dense"
    return "one_shot" if size <= 2 else "two_shot"


def settle(algorithm: str | None, ahead: bool | None, codec: Codec, size: int) -> tuple[str, bool]:
    """Return the name of a collective, and whether tensors are encoded ahead of fusion for it.

    Where ``ahead`` is None the algorithm decides, or without one the codec.

    Raises:
        ConfigError: there is no such collective, or none such for ``ahead``.
    """
    if ahead is None:
        ahead = codec.ahead if algorithm is None else algorithm in gather_names()
    algorithm = algorithm or choose(codec.lossless, size, ahead=ahead, wanted=codec.collective)
    _ = get_gather(algorithm) if ahead else get(algorithm)
    return algorithm, ahead
