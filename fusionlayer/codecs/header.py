"""The header of a checked message: ``seal`` writes it when the body is complete, ``verify`` compares it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from ..base.errors import WireError
from ..native.wire import Header, WireFormat


class Sender(NamedTuple):
    """The codec of a message: its name, the checksum of its options, and both in words."""

    name: str
    options_crc: int
    words: str


def seal(codec: Sender, payload: Tensor, form: WireFormat) -> None:
    """Write the header of ``payload`` (capacity,), whose body is complete."""
    body = payload[form.body : form.capacity]
    header = Header(codec.name, codec.options_crc, form.dtype, form.numel, body.numel(), 0, native.crc32c(body.cpu()))
    payload[: form.body].copy_(torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8))


def verify(codec: Sender, payload: Tensor, form: WireFormat) -> None:
    """Compare the header of ``payload`` (capacity,) with the one of ``codec``, and its checksum with the body."""
    body = payload[form.body : form.capacity]
    given = Header.unpack(payload[: form.body].cpu().numpy().tobytes())
    facts = codec.name, codec.options_crc, form.dtype, form.numel, body.numel()
    expected = Header(*facts, given.sequence, given.body_crc)
    if given != expected:
        differ = [
            f"{f.name} {getattr(given, f.name)}, expected {getattr(expected, f.name)}"
            for f in dataclasses.fields(Header)
            if getattr(given, f.name) != getattr(expected, f.name)
        ]
        raise WireError(f"{codec.words}: the message does not fit its receiver: {'; '.join(differ)}")
    if native.crc32c(body.cpu()) != given.body_crc:
        raise WireError(f"{codec.words}: checksum of the message body is wrong: the message was damaged on its way")
