"""Capabilities that only some codecs have. A codec inherits each one that it has; collectives ask ``isinstance``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arrangement import Arrangement
from .base import Codec
from .state import Part

if TYPE_CHECKING:
    from ..transport import Transport


class VariableSizeCodec(Codec):
    """A codec whose messages may use fewer bytes than their capacity."""

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of ``payload`` (capacity,) must be sent; on CUDA the host waits for the encoder.

        Raises:
            WireError: the message contradicts itself.
        """
        return self.compact(payload, numel, dtype).numel()

    @abstractmethod
    def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the bytes of ``payload`` (capacity,), a message of ``numel`` elements, that must be sent."""

    @abstractmethod
    def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
        """Fill ``payload`` (capacity,) from ``data``, the bytes that ``compact`` returned for it.

        Raises:
            WireError: ``compact`` of this codec never returns ``data`` for this size.
        """


class ZippedCodec(VariableSizeCodec):
    """A lossless codec of variable size, which the collectives of ``zipped`` carry.

    The used bytes of a message lie at its start: first a static extent, whose length does not depend on the data, then
        the rest.
    """

    lossless: ClassVar[bool] = True
    zips: ClassVar[bool] = True
    collective: ClassVar[str | None] = "zipped"

    @abstractmethod
    def static_extent(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a payload, from its start, must be sent for any data."""

    @abstractmethod
    def extents(self, payloads: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return how many bytes of each payload, from its start, hold all its data; on CUDA the host waits for them.

        This reads only the first ``static_extent`` bytes of a payload.

        Raises:
            WireError: a message contradicts itself.
        """


class ChangeCodec(ZippedCodec):
    """A lossless codec whose messages list changes since a base, which sender and receivers have to the bit."""

    @abstractmethod
    def encode_change(self, x: Tensor, base: Tensor, payload: Tensor) -> None:
        """Write into ``payload`` (capacity,) the change from ``base`` (n,) to ``x`` (n,), of one type; no tensor
        changes."""

    @abstractmethod
    def apply_change(self, payload: Tensor, base: Tensor, out: Tensor) -> None:
        """Fill ``out`` (n,) with the ``x`` of ``encode_change``, to the bit; ``out`` may be ``base`` (n,).

        Raises:
            WireError: ``base`` is not the sender's, and is as it was, or the message was damaged. An ``out`` apart from
                ``base`` holds anything then.
        """


class AgreeingCodec(Codec):
    """A codec that exchanges statistics of all ranks before each sum."""

    @property
    def arrangement(self) -> Arrangement | None:
        """The order in which the elements of this sum are sent, and their means; None if they are sent uncompressed."""
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
        """Exchange statistics with the other ranks, and return the codec for the sum of ``x`` over ranks.

        Every collective that sums calls this first, on all ranks together. The returned codec holds the result of the
        agreement in fields with ``compare=False``: these are no options, change no layout, and belong to this one sum.
        In this sum ``offset`` is the position in ``x``, with which the codec may look up its agreed values.

        Args:
            x: (n,), this rank's summand; it is not changed.
            transport: the ranks; only the calling thread uses it.
            seed: the same on all ranks.
            residual: (n,) f32 that will be sent along.
            chunks: elements of each message; all but the last are whole blocks. A collective gives them only if it
                heeds ``arrangement`` and every rank encodes every element at most once.
            movable: whether blocks may change places between chunks.
        """


class TwoLevelCodec(Codec):
    """A codec for messages between nodes that names another one for messages inside them."""

    collective: ClassVar[str | None] = "two_level"

    @property
    @abstractmethod
    def within(self) -> Codec:
        """The codec of messages inside a node."""


class TransformCodec(Codec):
    """A codec that applies a linear transform before it quantises, so that transformed values can be summed."""

    @property
    @abstractmethod
    def untransformed(self) -> Codec:
        """The codec of the same layout without the transform; this codec itself if it has none.

        It decodes this codec's messages to transformed values, and it encodes transformed values.
        """

    @property
    @abstractmethod
    def transform_run(self) -> int:
        """Number of elements that are transformed together; a divisor of ``block``. Sums cover whole runs."""


class StatefulCodec(Codec):
    """A codec that carries numbers from one sum to the next; checkpoints must keep them."""

    @abstractmethod
    def kept(self) -> dict[str, float]:
        """Return the numbers by name."""

    @abstractmethod
    def restore(self, numbers: Mapping[str, float]) -> None:
        """Load the numbers that ``kept`` returned; without them, reset. Other keys are ignored."""


class PartsCodec(Codec):
    """A codec that treats each part of a flat tensor by its shape, and may keep a state of each."""

    @abstractmethod
    def for_parts(self, parts: Sequence[Part]) -> Codec:
        """Return the codec for sums of flat tensors that consist of ``parts``.

        The code that fuses tensors calls this. Parts are no options: codecs with different parts are equal, and their
        messages have the same layout.
        """
