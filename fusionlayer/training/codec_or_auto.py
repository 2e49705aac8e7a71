"""The codec that a user gives for a collective of the model: a fixed codec, or ``zip`` where it takes less time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import codecs
from ..codecs import Codec
from ..functional import AUTO, make_codec


@dataclass(frozen=True)
class CodecOrAuto:
    """A codec, and whether every message uses it.

    Attributes:
        codec: the codec of the messages.
        auto: whether elements are sent uncompressed if measured faster; the codec is lossless.
    """

    codec: Codec
    auto: bool = False

    @classmethod
    def of(cls, codec: str | Codec | None, options: Mapping[str, Any]) -> CodecOrAuto:
        """Return the codec that a user's ``codec`` and options name; without a name, the configured one."""
        auto = codec == AUTO
        chosen = codecs.get("zip", **options) if auto else make_codec(codec, options)
        return cls(chosen.bare, auto)

    def __str__(self) -> str:
        return f"auto, {self.codec}" if self.auto else str(self.codec)
