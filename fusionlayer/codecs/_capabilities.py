"""What some codecs can do and others cannot: a codec inherits from each of these that it is one of.

Collectives ask ``isinstance``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ._arrangement import Arrangement
from ._base import Codec
from ._state import Part

if TYPE_CHECKING:
    from ..transport import Transport

__all__ = [
    "AgreeingCodec",
    "PartsCodec",
    "StatefulCodec",
    "TransformCodec",
    "TwoLevelCodec",
    "VariableSizeCodec",
    "ZippedCodec",
]


class VariableSizeCodec(Codec):
    """A codec whose messages may use fewer bytes than their capacity."""

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a ``payload`` (capacity,) must travel; on CUDA this waits for it.

        Raises:
            WireError: the message contradicts itself.
        """
        return self.compact(payload, numel, dtype).numel()

    @abstractmethod
    def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the bytes that must travel of a ``payload`` (capacity,) of ``numel`` elements."""

    @abstractmethod
    def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
        """Fill ``payload`` (capacity,) from what ``compact`` made of it.

        Raises:
            WireError: ``data`` is nothing that ``compact`` makes for this codec and size.
        """


class ZippedCodec(VariableSizeCodec):
    """A lossless codec of variable size, which the collectives of ``zipped`` carry.

    What a message uses lies at its start: a static extent, as long for all data, then what the data need.
    """

    lossless: ClassVar[bool] = True
    zips: ClassVar[bool] = True
    collective: ClassVar[str | None] = "zipped"

    @abstractmethod
    def static_extent(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a payload, from its start, must travel whatever the data."""

    @abstractmethod
    def extents(self, payloads: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return how many bytes of each payload, from its start, hold all of its data; on CUDA this waits for them.

        Only the first ``static_extent`` bytes of a payload are looked at.

        Raises:
            WireError: a message contradicts itself.
        """


class AgreeingCodec(Codec):
    """A codec that exchanges statistics of all ranks before each sum."""

    @property
    def arrangement(self) -> Arrangement | None:
        """In which order and relative to which means the elements of this one sum travel; None: as they are."""
        return None

    @abstractmethod
    def agree(
        self,
        x: Tensor,
        transport: Transport,
        *,
        seed: int = 0,
        residual: Tensor | None = None,
        chunks: Sequence[int] | None = None,
        movable: bool = True,
    ) -> Codec:
        """Return the codec for the sum of ``x`` over ranks, after what statistics they have to exchange for it.

        Every collective that sums calls it first, on all ranks together. What was agreed on lives in fields with
        ``compare=False``: they are no options, change no layout, and belong to this one call. Such a codec may look its
        facts up by ``offset``, which in these calls is the place in ``x``.

        Args:
            x: (n,), this rank's summand; left as it is.
            transport: the ranks; only the calling thread uses it.
            seed: the same on all ranks.
            residual: (n,) f32 that is going to be sent along.
            chunks: where the collective heeds ``arrangement`` and every rank encodes every element once at most: how
                many elements each message has. All but the last are whole blocks.
            movable: whether blocks may change places between chunks.
        """

    def agree_rows(self, rows: Tensor, numel: int, transport: Transport, *, seed: int = 0) -> Codec:
        """Return what ``agree`` does, for rows that become messages of their own.

        Args:
            rows: (k, m), of which the first ``numel`` elements each are values, others 0; m is a multiple of the block.
                The place of an element is that in the rows one behind the other.
            numel: elements of a row.
            transport: as for ``agree``.
            seed: as for ``agree``.
        """
        return self.agree(rows.reshape(-1), transport, seed=seed)


class TwoLevelCodec(Codec):
    """A codec for messages between nodes that names another one for messages inside them."""

    collective: ClassVar[str | None] = "two_level"

    @property
    @abstractmethod
    def within(self) -> Codec:
        """The codec of messages inside a node."""


class TransformCodec(Codec):
    """A codec that transforms values before it quantises them, linearly: sums can be made of transformed values."""

    @property
    @abstractmethod
    def untransformed(self) -> Codec:
        """A codec of the same layout that leaves the transform out; this one if it has none.

        It decodes this one's messages to transformed values, and it encodes transformed values.
        """

    @property
    @abstractmethod
    def transform_run(self) -> int:
        """Elements that are transformed together; it divides ``block``. Sums are made of whole runs."""


class StatefulCodec(Codec):
    """A codec that carries numbers from one sum to the next, which belong into checkpoints."""

    @abstractmethod
    def kept(self) -> dict[str, float]:
        """Return these numbers by name."""

    @abstractmethod
    def restore(self, numbers: Mapping[str, float]) -> None:
        """Take over what ``kept`` returned; without it begin anew. Other keys are ignored."""


class PartsCodec(Codec):
    """A codec that treats each tensor of a flat one by its shape, and may keep something of each."""

    @abstractmethod
    def for_parts(self, parts: Sequence[Part]) -> Codec:
        """Return the codec for sums of flat tensors that are made of ``parts``.

        Whoever fuses tensors tells it. The parts are no options: codecs with different ones are equal, and their
        messages have the same layout.
        """
