"""Byte layouts: planes inside a message, and the header that makes a message self-checking.

``docs/wire_format.md`` is the normative description; this module is the one place that computes it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from .. import native
from ..base.errors import WireError

WIRE_VERSION = 2
ALIGN = 128

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def aligned(nbytes: int, align: int = ALIGN) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``align``; most messages have the default, 128 bytes."""
    return -(-nbytes // align) * align


def digest(*facts: object) -> bytes:
    """Return 32 bytes that are equal on two ranks only if the wire version and ``facts`` are.

    Facts are numbers, strings, bytes, dtypes, and objects with a complete text: dataclasses, codecs, planners. Order
        counts in lists and tuples, but not in mappings and sets.
    """
    return hashlib.sha256(_rendered((WIRE_VERSION, *facts)).encode()).digest()


def _rendered(fact: object) -> str:
    """Return ``fact`` as text, the same in every process."""
    if isinstance(fact, Mapping):
        return f"{{{', '.join(sorted(f'{_rendered(key)}: {_rendered(value)}' for key, value in fact.items()))}}}"
    if isinstance(fact, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_rendered, fact)))}}}"
    if isinstance(fact, (list, tuple)):
        return f"[{', '.join(map(_rendered, fact))}]"
    if is_dataclass(fact) and not isinstance(fact, type):
        return f"{type(fact).__name__}{_rendered({f.name: getattr(fact, f.name) for f in fields(fact) if f.compare})}"
    # An object without str and repr would show its address, which differs from rank to rank.
    if type(fact).__str__ is object.__str__ and type(fact).__repr__ is object.__repr__:
        raise TypeError(f"{fact!r} cannot be compared over ranks; expected a value that prints what it is")
    # Strings are quoted, so that two different lists of strings never look alike.
    return repr(fact) if isinstance(fact, (str, bytes)) else str(fact)


@dataclass(frozen=True)
class Plane:
    """One kind of value in a message: ``count`` elements of ``dtype``."""

    name: str
    count: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Section:
    """A plane and its offset, in bytes from the start of the message."""

    plane: Plane
    offset: int


@dataclass(frozen=True)
class WireFormat:
    """The layout of one message: a pure function of codec, numel and dtype.

    Attributes:
        numel: elements of the message.
        dtype: type of the elements that are encoded.
        sections: planes in their order, each at a multiple of the codec's alignment, 128 bytes for most.
        body: offset of the first plane: 0 without a header, 128 with one.
        capacity: bytes of the message, a multiple of that alignment; an upper bound for codecs of variable size.
        offsets: offset of each plane in the body, the message without its header.
    """

    numel: int
    dtype: torch.dtype
    sections: tuple[Section, ...]
    body: int
    capacity: int
    offsets: tuple[int, ...]

    def views(self, payload: Tensor) -> tuple[Tensor, ...]:
        """Return the planes of ``payload`` (capacity,) uint8 as typed tensors that share its memory."""
        return self.planes(payload[self.body :])

    def planes(self, body: Tensor) -> tuple[Tensor, ...]:
        """Return the planes of ``body`` (capacity - self.body,) uint8 as typed tensors that share its memory."""
        return tuple(
            body[offset : offset + section.plane.nbytes].view(section.plane.dtype)
            for offset, section in zip(self.offsets, self.sections, strict=True)
        )


def lay_out(planes: Sequence[Plane], numel: int, dtype: torch.dtype, *, header: bool, align: int = ALIGN) -> WireFormat:
    """Return the layout of a message of ``numel`` elements of ``dtype``.

    The message begins with a header if ``header`` is set. Its ``planes`` lie one after the other, each padded to a
    multiple of ``align`` bytes.
    """
    body = ALIGN if header else 0
    offsets = [0]
    for plane in planes:
        offsets.append(offsets[-1] + aligned(plane.nbytes, align))
    sections = tuple(Section(plane, body + offset) for plane, offset in zip(planes, offsets, strict=False))
    return WireFormat(numel, dtype, sections, body, body + offsets[-1], tuple(offsets[:-1]))


@dataclass(frozen=True)
class Header:
    """The first 64 bytes of a checked message (64 zero bytes follow), little endian.

    Attributes:
        codec: name of the codec, at most 16 ASCII characters.
        options: crc32c of the codec's canonical text, options included.
        dtype: type of the elements that were encoded.
        numel: number of elements.
        used: bytes of the body that carry data, from the end of the header's 128 bytes.
        sequence: the sender's number for this message; 0 if the sender does not count.
        body_crc: crc32c of the used bytes of the body.
    """

    codec: str
    options: int
    dtype: torch.dtype
    numel: int
    used: int
    sequence: int
    body_crc: int

    _MAGIC = b"FLW1"
    _STRUCT = struct.Struct("<4sBBBx16sQQQIII")
    _CRC = struct.Struct("<I")

    def pack(self) -> bytes:
        """Return the header's 128 bytes."""
        fields = self._STRUCT.pack(
            self._MAGIC,
            WIRE_VERSION,
            DTYPE_CODES[self.dtype],
            0,
            self.codec.encode("ascii"),
            self.numel,
            self.used,
            self.sequence,
            self.options,
            self.body_crc,
            0,
        )
        return fields + self._seal(fields)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Return the header that ``data`` starts with."""
        size = cls._STRUCT.size
        if len(data) < ALIGN:
            raise WireError(f"message of {len(data)} bytes; a header alone takes {ALIGN}: the message was cut short")
        magic, version, dtype, _, codec, numel, used, sequence, options, body_crc, _ = cls._STRUCT.unpack(data[:size])
        if magic != cls._MAGIC:
            raise WireError(f"message starts with {magic!r}, expected {cls._MAGIC!r}: these bytes are not a message")
        if data[size:ALIGN] != cls._seal(data[:size]):
            raise WireError("checksum of the message header is wrong: the message was damaged on its way")
        if version != WIRE_VERSION:
            raise WireError(
                f"message has wire version {version}, this is {WIRE_VERSION}: install the same fusionlayer everywhere"
            )
        if dtype not in _DTYPES:
            raise WireError(f"message header names element type {dtype}, known: {sorted(_DTYPES)}")
        name = codec.rstrip(b"\0").decode("ascii", "replace")
        return cls(name, options, _DTYPES[dtype], numel, used, sequence, body_crc)

    @classmethod
    def _seal(cls, fields: bytes) -> bytes:
        """Return the bytes that follow ``fields``: their checksum, then zeros."""
        return cls._CRC.pack(native.crc32c(fields)).ljust(ALIGN - len(fields), b"\0")
