"""The state that a joining process gets from a member: all bits of it, in few bytes.

A tensor that the joining process has already, such as a frozen one or one from a checkpoint, is not sent. Between hosts
the others are sent by ``zip``; within a host that would take longer than sending them uncompressed.
"""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import native
from ...base.errors import WireError
from ...publishing.snapshot import digest_of
from ...publishing.tensors import DTYPES, Message, decode, encode, expected_bytes, shape_of
from ...transport import Transport
from ...transport._announced import pass_on, take_in

_CODECS = ("same", "raw", "zip")
_MOST_BYTES = 1 << 40
_LEAST_BYTES = 1 << 14
"""A smaller tensor is sent with the other objects: a message of its own would cost more than it saves."""

_AHEAD = 2
"""Tensors that are encoded, or received, before the one that is sent, or decoded, is done."""


class Fingerprint(NamedTuple):
    """Shows whether two processes have the same tensor: its crc32c is compared first, because it is quick.

    Attributes:
        crc: of its bytes.
        digest: of its type and bytes, by SHA-256.
    """

    crc: int
    digest: str


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each tensor."""
    flat = {name: _flat(x) for name, x in tensors.items()}
    return {name: Fingerprint(native.crc32c(x), digest_of(x)) for name, x in flat.items()}


def parted(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state without its large tensors, and these tensors by their places in it."""
    tensors: dict[str, Tensor] = {}

    def without(value: Any, *path: str | int) -> Any:
        if isinstance(value, Tensor) and _is_plain(value) and value.nbytes >= _LEAST_BYTES:
            tensors[json.dumps(path)] = value.detach()
            return None
        if type(value) is dict and all(isinstance(key, (str, int)) for key in value):
            return {key: without(each, *path, key) for key, each in value.items()}
        if type(value) is list:
            return [without(each, *path, place) for place, each in enumerate(value)]
        return value

    return without(state), tensors


def joined(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that ``parted`` has divided into ``rest`` and ``tensors``; it changes ``rest``."""
    for name, x in tensors.items():
        *path, last = json.loads(name)
        place = rest
        for key in path:
            place = place[key]
        place[last] = x
    return rest


def send(state: Any, theirs: Mapping[str, Fingerprint], transport: Transport, to: int) -> None:
    """Send ``state`` to rank ``to``, which calls ``receive``.

    Args:
        state: see ``parted``.
        theirs: the fingerprints of the receiver's tensors, by position.
        transport: connects the two.
        to: rank of the receiver.

    Raises:
        TransportError: it was lost.
    """
    rest, tensors = parted(state)
    near = any(transport.rank in node and to in node for node in transport.nodes)
    buffer = io.BytesIO()
    rows = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]
    torch.save({"rest": rest, "tensors": rows}, buffer)
    send_bytes(buffer.getvalue(), transport, to)

    def message_of(x: Tensor, known: Fingerprint | None) -> tuple[str, Tensor, int]:
        crc = native.crc32c(x)
        if known is not None and known.crc == crc and known.digest == digest_of(x):
            return "same", x[:0], crc
        return (*(Message("raw", x) if near else encode(x, header=True)), crc)

    def send_message(message: tuple[str, Tensor, int]) -> None:
        codec, data, crc = message
        _send_numbers([_CODECS.index(codec), data.nbytes, crc], transport, to)
        if data.numel():
            transport.send(data, to)

    with _in_turn(send_message) as put:
        for name, x in tensors.items():
            put(message_of, _flat(x), theirs.get(name))


def receive(own: Mapping[str, Tensor], transport: Transport, source: int) -> Any:
    """Return the state that rank ``source`` sends.

    Args:
        own: the tensors that this process has, by place. Those on the CPU are written in place, so that no second copy
            is needed, and are part of the result.
        transport: connects the two.
        source: rank of the sender.

    Raises:
        WireError: a message was damaged. Tensors of ``own`` may have been written to then.
        TransportError: the sender was lost.
    """
    told = torch.load(io.BytesIO(receive_bytes(transport, source)), map_location="cpu", weights_only=True)
    tensors: dict[str, Tensor] = {}

    def take(name: str, message: Message, out: Tensor, crc: int, shape: Sequence[int]) -> tuple[str, Tensor]:
        if message.codec == "zip":
            decode(message, None, out, header=True)
        if native.crc32c(out) != crc:
            raise WireError(f"{name} of a newcomer's state is not what the member has sent: it was damaged")
        return name, out.view(shape)

    with _in_turn(lambda taken: tensors.update([taken])) as put, torch.no_grad():
        for name, kind, shape in told["tensors"]:
            dtype, numel = DTYPES[kind], math.prod(shape_of(shape))
            mine = own.get(name)
            number, nbytes, crc = _receive_numbers(3, transport, source)
            codec = _CODECS[number] if 0 <= number < len(_CODECS) else "unknown"
            fits = mine is not None and (mine.dtype, mine.numel()) == (dtype, numel)
            least, most = (0, 0) if codec == "same" and fits else expected_bytes(codec, numel, dtype, header=True)
            if not least <= nbytes <= most:
                raise WireError(f"{name} of {kind} {shape} in {nbytes} bytes of {codec!r}: it was damaged")
            if mine is not None and fits and (codec == "same" or _is_writable(mine)):
                out = _flat(mine)
            else:
                out = torch.empty(numel, dtype=dtype, device="cpu")
            data = out if codec == "raw" else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes:
                transport.recv(data, source)
            put(take, name, Message(codec, data), out, crc, shape)
    return joined(told["rest"], tensors)


def send_bytes(data: bytes, transport: Transport, to: int) -> None:
    """Send ``data`` to rank ``to``, which calls ``receive_bytes``."""
    _send_numbers([len(data), native.crc32c(data)], transport, to)
    pass_on(data, lambda piece: transport.send(piece, to))


def receive_bytes(transport: Transport, source: int) -> bytes:
    """Return the message of rank ``source``."""
    nbytes, crc = _receive_numbers(2, transport, source)
    if not 0 <= nbytes <= _MOST_BYTES:
        raise WireError(f"a message of {nbytes} bytes of a newcomer's state: it was damaged")
    data = bytes(take_in(nbytes, lambda piece: transport.recv(piece, source)))
    if native.crc32c(data) != crc:
        raise WireError("a newcomer's state is not what the member has sent: it was damaged")
    return data


def _send_numbers(numbers: list[int], transport: Transport, to: int) -> None:
    """Send numbers and their checksum: by them a receiver knows how many bytes come next."""
    x = torch.tensor([*numbers, 0], device="cpu")
    x[-1] = native.crc32c(x[:-1])
    transport.send(x, to)


def _receive_numbers(count: int, transport: Transport, source: int) -> list[int]:
    """Return this many numbers, which ``_send_numbers`` sends."""
    x = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    transport.recv(x, source)
    if native.crc32c(x[:-1]) != x[-1]:
        raise WireError("the size of a message of a newcomer's state is wrong: it was damaged")
    numbers: list[int] = x[:-1].tolist()
    return numbers


@contextmanager
def _in_turn(end: Callable[[Any], object]) -> Iterator[Callable[..., None]]:
    """Return a function that lets a thread call another one, and calls ``end`` with the result, in order."""
    under_way: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1, "fusionlayer handover") as pool:

        def put(call: Callable[..., object], *arguments: object) -> None:
            under_way.append(pool.submit(call, *arguments))
            while len(under_way) > _AHEAD:
                end(under_way.popleft().result())

        yield put
        while under_way:
            end(under_way.popleft().result())


def _flat(x: Tensor) -> Tensor:
    """Return the values of ``x`` on the CPU, (n,); they share its memory if it is contiguous there."""
    return x.detach().cpu().contiguous().view(-1)


def _is_writable(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous()


def _is_plain(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return plain and not (x.is_quantized or x.is_meta or x.is_complex())
