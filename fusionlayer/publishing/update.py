"""An update: the bytes that make one version of another, or of nothing. The same in a file and over TCP.

``docs/wire_format.md`` is the normative description.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..base.errors import WireError
from ..native.wire import WIRE_VERSION
from .boxes import boxes_of, fits
from .snapshot import Shard, Snapshot, digest_of, tied
from .tensors import DTYPES, Message, decode, encode, expected_bytes, memory, shape_of

__all__ = ["Update", "make", "read"]

_FORM = f"1.{WIRE_VERSION}"  # of an update, and of the codecs' messages in it
_MAGIC = b"FLV1"
_FRONT = struct.Struct("<4sII")
_MOST_HEADER_BYTES = 64 << 20
_MOST_BYTES = 1 << 56
_MOST_PLACES, _MOST_PLACE_BYTES = 1 << 14, 300
_MOST_VERSION = (1 << 63) - 1
_SAME = "same"

Source = Callable[[int], bytearray]
"""Returns exactly the requested number of bytes; raises if there are no more."""


@dataclass(frozen=True)
class Update:
    """The change from the version with the digest ``base`` to ``target``; a whole version where ``base`` is None.

    Attributes:
        target: the version that it makes.
        base: digest of the version that a receiver must have, or None.
        parts: the bytes, in their order.
    """

    target: Snapshot
    base: str | None
    parts: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def make(target: Snapshot, base: Snapshot | None = None) -> Update:
    """Return the update that makes ``target`` of ``base``; with None, of nothing.

    Tensors may have been added, removed or changed in type or shape since ``base``: missing ones are sent whole.
    """
    rows: list[list[object]] = []
    parts: list[memoryview] = []
    again = tied(target.tensors.items())
    for name, x in target.tensors.items():
        if name in again:
            continue
        digest = target.digests[name]
        message = _message(x, digest, name, base)
        rows.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), *message[:1], len(message[1]), digest])
        parts.append(message[1])
    header = {
        **{"form": _FORM, "run": target.run, "version": target.version, "base": base.digest if base else None},
        **{"digest": target.digest, "tensors": rows, "tied": again, "order": list(again and target.tensors)},
    }
    if target.shards or target.places:  # a part of what several ranks publish
        header |= {"shards": target.shards, "places": target.places}
    text = json.dumps(header, separators=(",", ":")).encode()
    front = _FRONT.pack(_MAGIC, len(text), native.crc32c(text))
    return Update(target, base.digest if base else None, [memoryview(front + text), *filter(None, parts)])


def _message(x: Tensor, digest: str, name: str, base: Snapshot | None) -> tuple[str, memoryview]:
    before = base.tensors.get(name) if base else None
    if base and base.digests.get(name) == digest:
        return _SAME, memoryview(b"")
    like = before is not None and (before.shape, before.dtype) == (x.shape, x.dtype)
    message = encode(x.view(-1), before.view(-1) if before is not None and like else None)
    return message.codec, memory(message.data)


# ---- reading --------------------------------------------------------------------------------------------------------


class _TensorEntry(NamedTuple):
    """The header's entry for one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    codec: str
    nbytes: int
    digest: str


def read(
    source: Source, nbytes: int, base: Snapshot | None, check: Callable[[bytes], object] = lambda front: None
) -> Snapshot:
    """Return the version that an update of ``nbytes`` makes; every tensor has the digest that the publisher gave it.

    Memory is allocated up to the number of received bytes. Unchanged tensors are those of ``base`` itself.

    Args:
        source: where the bytes come from.
        nbytes: length of the update, as the file or the connection announces it.
        base: the version that the receiver has, or None.
        check: called with the bytes up to the end of the header, which has the digests of all others, before its
            content is trusted; it raises an error to refuse them.

    Raises:
        WireError: the bytes were damaged, or make something of another base.
    """
    front = bytes(_take(source, _FRONT.size, nbytes))
    magic, length, checksum = _FRONT.unpack(front)
    if magic != _MAGIC:
        raise WireError(f"an update starts with {magic!r}, expected {_MAGIC!r}: these bytes are not a version")
    left = nbytes - _FRONT.size
    text = _take(source, length, min(left, _MOST_HEADER_BYTES))
    left -= length
    check(front + text)
    if native.crc32c(bytes(text)) != checksum:
        raise WireError("checksum of an update's header is wrong: it was damaged")
    header = _header(text)
    since = header["base"]
    if since is not None and (base is None or base.digest != since):
        raise WireError(f"an update of version {since} came to a follower that has {base.digest if base else 'none'}")
    rows = [_row(row) for row in header["tensors"]]
    if sum(row.nbytes for row in rows) != left:
        raise WireError(f"an update has {left} bytes for {sum(row.nbytes for row in rows)}: it was damaged")
    tensors: dict[str, Tensor] = {}
    for row in rows:
        tensors[row.name] = _tensor(row, source, base)
    for name, other in header["tied"].items():
        tensors[name] = tensors[other]
    if header["order"]:
        tensors = {name: tensors[name] for name in header["order"]}
    made = Snapshot(header["run"], header["version"], tensors, _shards(header, tensors), tuple(header["places"]))
    # They have been compared with the bytes, so that no second pass is needed.
    known = {row.name: row.digest for row in rows}
    made.__dict__["digests"] = {name: known[header["tied"].get(name, name)] for name in tensors}
    if made.digest != header["digest"]:
        raise WireError(f"version {made.version} has the digest {made.digest}, expected {header['digest']}")
    return made


def _take(source: Source, nbytes: int, most: int) -> bytearray:
    if nbytes > most:
        raise WireError(f"an update of {most} bytes announces {nbytes}: it was cut short or damaged")
    return source(nbytes)


def _header(text: bytearray) -> dict[str, Any]:
    """Return an update's header, whose fields have their types."""
    try:
        header: dict[str, Any] = {"shards": {}, "places": [], **json.loads(text)}
        if header["form"] != _FORM:
            raise WireError(f"an update has form {header['form']!r}, this is {_FORM}: install the same fusionlayer")
        names = [row[0] for row in header["tensors"]]
        again, order = header["tied"], header["order"]
        right = (
            isinstance(header["run"], str)
            and type(header["version"]) is int
            and abs(header["version"]) <= _MOST_VERSION
            and isinstance(header["base"], (str, type(None)))
            and isinstance(header["digest"], str)
            and isinstance(header["shards"], dict)
            and isinstance(header["places"], list)
            and len(header["places"]) <= _MOST_PLACES
            and all(isinstance(place, str) and len(place) <= _MOST_PLACE_BYTES for place in header["places"])
            and len({*names, *again}) == len(names) + len(again)
            and {*again.values()} <= {*names}
            and (not (again or order) or sorted(order) == sorted([*names, *again]))
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WireError(f"an update's header makes no sense ({error!r}): it was damaged") from error
    if not right:
        raise WireError("an update's header contradicts itself: it was damaged")
    return header


def _shards(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Return where tensors of a part lie in the whole ones.

    Raises:
        WireError: this makes no sense.
    """
    found = {}
    for name, given in header["shards"].items():
        try:
            box, shape = given
            ((_, ranges),) = boxes_of([[name, box]])
            found[name] = Shard(ranges, shape_of(shape))
            right = fits(ranges, found[name].shape) and tensors[name].shape == tuple(n for _, n in ranges)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an update describes a part of {name!r:.100} as {given!r:.100}: it was damaged") from error
        if not right:
            raise WireError(f"an update has a part of {name!r:.100} that does not fit in {given!r:.100}")
    return found


def _row(row: Any) -> _TensorEntry:
    try:
        name, kind, shape, codec, nbytes, digest = row
        found = _TensorEntry(name, DTYPES[kind], shape_of(shape), codec, nbytes, digest)
        right = type(nbytes) is int and 0 <= nbytes <= _MOST_BYTES
        right &= all(isinstance(text, str) for text in (name, codec, digest))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"an update describes a tensor as {row!r:.100}, which makes no sense here") from error
    if not right:
        raise WireError(f"an update describes a tensor as {row!r:.100}: it was damaged")
    return found


def _tensor(row: _TensorEntry, source: Source, base: Snapshot | None) -> Tensor:
    """Return one tensor of an update, which has the digest in the header."""
    before = base.tensors.get(row.name) if base else None
    if row.codec == _SAME:
        if base is None or before is None or base.digests[row.name] != row.digest or row.nbytes:
            raise WireError(f"{row.name!r} did not change since a version in which it was another")
        return before
    numel = math.prod(row.shape)
    least, most = expected_bytes(row.codec, numel, row.dtype)
    like = before is not None and (tuple(before.shape), before.dtype) == (row.shape, row.dtype)
    if not least <= row.nbytes <= most or (row.codec == "delta" and not like):
        raise WireError(f"{row.name!r} of {row.dtype} {list(row.shape)} in {row.nbytes} bytes of {row.codec!r}")
    data = source(row.nbytes)
    message = Message(row.codec, torch.frombuffer(data or bytearray(1), dtype=torch.uint8)[: row.nbytes])
    if before is not None and base is not None and base.digests[row.name] == row.digest:
        return before  # a whole version of which this receiver has a part
    with torch.inference_mode(False):
        out = torch.empty(row.shape, dtype=row.dtype, device="cpu")
        decode(message, before.view(-1) if before is not None and like else None, out.view(-1))
    if digest_of(out) != row.digest:
        raise WireError(f"{row.name!r} has not the digest that its publisher gave it: it was damaged on its way")
    return out
