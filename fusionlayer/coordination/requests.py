"""The requests of ranks and the responses of the coordinator, and how both are sent as bytes."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..base.errors import WireError
from ..collectives import Scaling

ALL_RANKS = 0
"""The process set of all ranks."""

PLAIN_OPS = (None, "Average", "Sum", "Min", "Max", "Product")

Bytes = bytes | memoryview
"""The bytes of a message, written or received."""

Key = tuple[int, str, "str | int"]
"""Process set, kind and name of an operation. An operation without name has a number in its place."""

Begun = dict[tuple[int, int], int]
"""How many steps of each optimizer have begun. The key is its process set and its index among the set's optimizers."""

_LENGTHS = struct.Struct("<II")
# Begins a farewell. No message of requests begins with it, because it would need that many numbers.
_FAREWELL = _LENGTHS.pack(0xFFFFFFFF, 0)


_MOST_ELEMENTS = 1 << 48
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, struct.error)


class Signature(NamedTuple):
    """The arguments of an operation that must be equal on all ranks. None: the operation has no such argument.

    Attributes:
        kind: "allreduce", "allgather", ... Requests of "begin" and "join" carry the steps that the rank has begun.
            Those of "blocked" carry the operation for which the rank's only thread waits.
        process_set: number of the set of ranks that take part.
        dtypes: element type of each tensor.
        shapes: shape of each tensor, without the first dimension if that may differ over ranks.
        device: "cpu" or "cuda".
        op: how values are reduced. It contains everything that changes the result.
        prescale: factor before the reduction.
        postscale: factor after it.
        root: rank that broadcasts, or the process set that is removed.
        ranks: ranks of the process set that is added.
    """

    kind: str
    process_set: int = ALL_RANKS
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the reduction is elementwise, or there is none. Then several tensors may share a message."""
        return self.op in PLAIN_OPS

    def scaling(self, dtype: torch.dtype, size: int) -> Scaling:
        """Return the scaling of a reduction of ``dtype`` over ``size`` ranks."""
        average = self.op is not None and self.op.startswith("Average")
        if self.op == "Average" and dtype in (torch.float32, torch.float64) and size & (size - 1):
            # The order of Horovod, to the bit. Sums of these types stay in range, so nothing asks for the other one.
            # With a power of two both orders give the same bits, and the other order saves a pass.
            return Scaling(self.prescale, self.postscale / size)
        return Scaling.of(dtype, size, average=average, prescale=self.prescale, postscale=self.postscale)

    def nbytes(self, numbers: Sequence[int] = ()) -> int:
        """Return the bytes of the tensors. ``numbers``: their first dimensions, if the shapes lack them."""
        rows = numbers if self.kind == "allgather" else [1] * len(self.shapes)
        return sum(
            prod(shape) * n * getattr(torch, dtype).itemsize
            for shape, dtype, n in zip(self.shapes, self.dtypes, rows, strict=True)
        )

    def difference(self, other: Signature) -> str:
        """Return the first difference to ``other`` as a clause: "shapes (3, 4), not (3, 5)"."""
        for name, mine, theirs in zip(self._fields, self, other, strict=True):
            if mine != theirs:
                return f"{name} {_show(mine)}, not {_show(theirs)}"
        return "nothing"


def _show(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        return str(value[0])
    return str(value)


class Request(NamedTuple):
    """One rank's request to take part in an operation.

    Attributes:
        handle: this rank's number for it. Below 0: the rank has refused it, and the others must be notified.
        name: name of the operation, or a number if the user gave none.
        signature: the part that must be equal on all ranks.
        numbers: the part that may differ over ranks: first dimensions, rows for each rank, or steps that have begun.
        data: the bytes of the tensors, if they are sent with the request; else None.
    """

    handle: int
    name: str | int
    signature: Signature
    numbers: tuple[int, ...] = ()
    data: Bytes | None = None

    @property
    def key(self) -> Key:
        """The key that requests of all ranks for the same operation share."""
        return self.signature.process_set, self.signature.kind, self.name


class Item(NamedTuple):
    """One operation of a response.

    Attributes:
        handle: the receiving rank's handle; None if it has joined and has no request.
        numbers: first dimensions of all ranks' tensors, rows from each rank, or the one result of the operation.
        signature: the signature of the operation, for a rank that has no request.
    """

    handle: int | None
    numbers: tuple[int, ...] = ()
    signature: Signature | None = None


class Reason(NamedTuple):
    """Why operations fail.

    Attributes:
        text: the reason, as a clause.
        ranks: the ranks that are at fault; empty if ranks only differ.
    """

    text: str
    ranks: tuple[int, ...] = ()


class Response(NamedTuple):
    """The next task of one rank.

    Attributes:
        code: one of "execute": run the items as one message; "take": take the results of the items from ``data``;
            "fail": the items fail, because ranks differ; "lost": the items fail, because a rank is lost; "end":
            everything fails, now and later; "ready": the coordinator is ready for the rank's next requests; "joined": a
            rank has joined, so notify the coordinator of steps that begin; "begun": to a joined rank: the steps that
            have begun, for which it substitutes zeros.
        items: the operations.
        why: the reason of "fail", "lost" and "end".
        data: the results, concatenated.
    """

    code: str
    items: tuple[Item, ...] = ()
    why: Reason = Reason("")
    data: Bytes = b""


_CODES = ("ready", "execute", "take", "fail", "lost", "end", "joined", "begun")
READY = Response("ready")


class Writer:
    """Writes a rank's requests as messages. A name or signature is sent once; later messages have its number.

    Args:
        capacity: names and signatures that are remembered. With more, writer and reader forget all and start again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: dict[Any, int] = {}

    def write(self, requests: Sequence[Request]) -> bytes:
        """Return a message with the requests. The reader must read messages in the order of these calls."""
        forget = len(self._known) > self._capacity
        if forget:
            self._known.clear()
        fresh: list[Any] = []
        payload: list[Bytes] = []
        facts: list[int] = []
        last: Signature | None = None
        signature = 0
        for handle, label, given, numbers, data in requests:
            if given is not last:
                signature, last = self._number(given, fresh), given
            unnamed = isinstance(label, int)
            name = label if isinstance(label, int) else self._number(label, fresh)
            facts += (handle, unnamed, name, signature, -1 if data is None else len(data), len(numbers), *numbers)
            if data:
                payload.append(data)
        return _pack(array("q", (forget, len(requests), *facts)), fresh, payload)

    def _number(self, thing: str | Signature, fresh: list[Any]) -> int:
        number = self._known.get(thing)
        if number is None:
            number = self._known[thing] = len(self._known)
            fresh.append(thing)
        return number


class Reader:
    """Reads the messages of one ``Writer``, in the order in which they were written."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def read(self, message: Bytes) -> list[Request]:
        """Return the requests of a message."""
        try:
            return self._read(message)
        except _NONSENSE as error:
            raise WireError(f"a message of {len(message)} bytes holds no requests ({error!r:.100})") from error

    def _read(self, message: Bytes) -> list[Request]:
        numbers, fresh, payload = _unpack(message)
        forget, count = numbers[:2]
        if forget:
            self._known.clear()
        self._known += [_signature(thing) if isinstance(thing, list) else thing for thing in fresh or ()]
        known, requests = self._known, []
        at, begin = 2, 0
        for _ in range(count):
            handle, unnamed, name, signature, size, length = numbers[at : at + 6]
            at += 6 + _among(length, numbers)
            data = None if size < 0 else payload[begin : begin + size]
            begin += max(size, 0)
            of_rank = tuple(numbers[at - length : at]) if length else ()
            requests.append(Request(handle, name if unnamed else known[name], known[signature], of_rank, data))
        return requests


def flatten(begun: Begun) -> tuple[int, ...]:
    """Return counts of steps as a sequence of numbers, which is how they are sent."""
    return tuple(n for key, count in begun.items() for n in (*key, count))


def unflatten(numbers: Sequence[int]) -> Begun:
    """Return the counts of steps from the numbers that ``flatten`` made."""
    return {(numbers[i], numbers[i + 1]): numbers[i + 2] for i in range(0, len(numbers), 3)}


def write_farewell(why: Reason) -> bytes:
    """Return the last message of a rank that leaves, with the reason."""
    return _FAREWELL + json.dumps(why).encode()


def read_farewell(message: Bytes) -> Reason | None:
    """Return the reason in a rank's last message; None if the message has requests."""
    size = len(_FAREWELL)
    try:
        return _reason(json.loads(bytes(message[size:]))) if message[:size] == _FAREWELL else None
    except _NONSENSE as error:
        raise WireError(f"a farewell of {len(message)} bytes gives no reason ({error!r:.100})") from error


def write_response(response: Response) -> bytes:
    """Return the message of a response."""
    facts = [_CODES.index(response.code), len(response.items)]
    signatures = []
    for handle, numbers, signature in response.items:
        facts += (handle is not None, handle or 0, len(numbers), *numbers)
        if signature is not None:
            signatures.append(signature)
    texts = [response.why, *signatures] if signatures or response.why.text else None
    return _pack(array("q", facts), texts, [response.data])


def read_response(message: Bytes) -> Response:
    """Return the response of a message."""
    try:
        return _read_response(message)
    except _NONSENSE as error:
        raise WireError(f"a message of {len(message)} bytes holds no response ({error!r:.100})") from error


def _read_response(message: Bytes) -> Response:
    numbers, texts, data = _unpack(message)
    why, *signatures = texts or [Reason("")]
    items = []
    at = 2
    for _ in range(numbers[1]):
        given, handle, length = numbers[at : at + 3]
        at += 3 + _among(length, numbers)
        signature = None if given else _signature(signatures.pop(0))
        items.append(Item(handle if given else None, tuple(numbers[at - length : at]) if length else (), signature))
    return Response(_CODES[numbers[0]], tuple(items), _reason(why), data)


def _among(length: int, numbers: Sequence[int]) -> int:
    """Return how many numbers come next: one below 0 would let a reader continue for ever."""
    if not 0 <= length <= len(numbers):
        raise ValueError(f"a list of {length} among {len(numbers)} numbers")
    return length


def _reason(fields: Sequence[Any]) -> Reason:
    text, ranks = fields
    return Reason(text, tuple(ranks))


def _pack(numbers: array[int], texts: list[Any] | None, data: Sequence[Bytes]) -> bytes:
    text = json.dumps(texts).encode() if texts else b""
    return b"".join((_LENGTHS.pack(len(numbers), len(text)), numbers.tobytes(), text, *data))


def _unpack(message: Bytes) -> tuple[list[int], list[Any] | None, Bytes]:
    count, length = _LENGTHS.unpack_from(message)
    numbers = array("q")
    middle = _LENGTHS.size + count * numbers.itemsize
    numbers.frombytes(message[_LENGTHS.size : middle])
    texts = json.loads(bytes(message[middle : middle + length])) if length else None
    return numbers.tolist(), texts, message[middle + length :]


def _signature(fields: Sequence[Any]) -> Signature:
    plain = Signature(*fields)
    # Sizes are multiplied: thousands of digits would take minutes.
    if any(type(n) is not int or not 0 <= n <= _MOST_ELEMENTS for shape in plain.shapes for n in shape):
        raise ValueError("a shape that no tensor has")
    return plain._replace(
        dtypes=tuple(plain.dtypes),
        shapes=tuple(tuple(shape) for shape in plain.shapes),
        ranks=None if plain.ranks is None else tuple(plain.ranks),
    )
