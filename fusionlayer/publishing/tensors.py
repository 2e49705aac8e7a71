"""A tensor as a lossless message: whole, or as changes since the same tensor of another version."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import WireError, kind_of
from ..codecs.lossless.delta import Delta
from ..codecs.lossless.zip import Zip
from ..native.wire import DTYPE_CODES

__all__ = ["DTYPES", "Message", "decode", "encode", "expected_bytes", "memory", "shape_of"]

DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
"""Types of elements by the names that messages have for them."""


_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 48


class Message(NamedTuple):
    """A tensor's bytes, and their codec.

    Attributes:
        codec: "zip", "delta", or "raw" for types that these do not take.
        data: (m,) uint8.
    """

    codec: str
    data: Tensor


def encode(x: Tensor, base: Tensor | None = None, *, header: bool = False) -> Message:
    """Return the message of ``x`` (n,): the difference to ``base`` (n,), or all of it if that is shorter.

    Args:
        x: on the CPU.
        base: of the same type; None: there is none.
        header: messages of codecs get a header, which has a checksum.
    """
    if x.dtype not in DTYPE_CODES:
        return Message("raw", _raw_bytes(x))
    whole = _codec("zip", header)
    if base is None:
        return _encoded(whole, x, None)
    change = _encoded(_codec("delta", header), x, base)
    # A step that changes nearly all bits leaves more than `zip` needs at least; then both are tried.
    if change.data.numel() <= expected_bytes("zip", x.numel(), x.dtype, header=header)[0]:
        return change
    return min(change, _encoded(whole, x, None), key=lambda message: message.data.numel())


def decode(message: Message, base: Tensor | None, out: Tensor, *, header: bool = False) -> None:
    """Fill ``out`` (n,) with the values that ``encode`` was given.

    Raises:
        WireError: the message was damaged, or is of another base.
    """
    if message.codec == "raw":
        if message.data.numel() != out.nbytes:
            raise WireError(f"{message.data.numel()} bytes for {out.numel()} of {out.dtype}: the message was damaged")
        _raw_bytes(out).copy_(message.data)
        return
    codec = _codec(message.codec, header)
    payload = torch.zeros(codec.wire(out.numel(), out.dtype).capacity, dtype=torch.uint8, device="cpu")
    codec.expand(message.data, payload, out.numel(), out.dtype)
    if isinstance(codec, Delta):
        codec.apply_change(payload, out.new_empty(0) if base is None else base, out)
    else:
        codec.decode(payload, out)


def expected_bytes(name: str, numel: int, dtype: torch.dtype, *, header: bool = False) -> tuple[int, int]:
    """Return the least and the most bytes of a message of ``numel`` elements.

    Raises:
        WireError: there are no such messages.
    """
    if name == "raw":
        return numel * dtype.itemsize, numel * dtype.itemsize
    if dtype not in DTYPE_CODES:
        raise WireError(f"a message of {name!r} with elements of {dtype}: it was damaged")
    codec = _codec(name, header)
    return codec.static_bytes(numel, dtype), codec.wire(numel, dtype).capacity


def shape_of(given: object) -> tuple[int, ...]:
    """Return the shape of a tensor that a file or a peer announces.

    Raises:
        WireError: it is none, or that of more elements than any memory holds.
    """
    if not isinstance(given, list) or len(given) > _MOST_DIMENSIONS:
        raise WireError(f"a tensor of shape {kind_of(given)}; expected up to {_MOST_DIMENSIONS} sizes: it was damaged")
    # Each number is bounded before they are multiplied: thousands of digits take minutes.
    if not all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in given):
        raise WireError(f"a size of a tensor is no whole number up to {_MOST_ELEMENTS}: it was damaged")
    strides = 1
    for n in given:
        strides *= max(n, 1)
        if strides > _MOST_ELEMENTS:
            raise WireError(f"a tensor of more than {_MOST_ELEMENTS} elements: it was damaged")
    return tuple(given)


def _raw_bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` (n,), which share its memory."""
    return x.view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def memory(x: Tensor) -> memoryview:
    """Return the bytes of ``x`` (n,), on the CPU, for callers without tensors; they share its memory."""
    array: Any = _raw_bytes(x).numpy()  # for mypy NumPy's arrays are no buffers before Python 3.12
    return memoryview(array)


def _encoded(codec: Zip | Delta, x: Tensor, base: Tensor | None) -> Message:
    payload = torch.zeros(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8, device="cpu")
    if isinstance(codec, Delta) and base is not None:
        codec.encode_change(x, base, payload)
    else:
        codec.encode(x, payload)
    return Message(codec.name, codec.compact(payload, x.numel(), x.dtype))


def _codec(name: str, header: bool) -> Zip | Delta:
    if name == "zip":
        return Zip(header=header)
    if name == "delta":
        return Delta(header=header)
    raise WireError(f"a tensor is coded by {name!r}; expected 'zip', 'delta' or 'raw': the message was damaged")
