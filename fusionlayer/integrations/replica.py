"""All ranks' copy of weights of which each rank owns a part, kept up to date by quantised differences."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import Codec
from ..collectives import halves
from ..errors import ConfigError
from ..seeds import derive_seed
from ..transport import Transport

__all__ = ["Replica"]

_PIECE = 1 << 20
"""Elements of a rank's part that travel at a time."""


class Replica:
    """Weights as every rank has them, the same bits on all (SDP4Bit, section 3.1 and Algorithm 2).

    Whole weights travel once. After that a rank sends what its own weights are more than the replica's, quantised, and
    every rank adds what it decodes, the sender too. What a message lost is in the next one's difference.

    Args:
        codec: of differences.
        number: of this replica among those of a model; seeds depend on it.
    """

    def __init__(self, codec: Codec, number: int = 0) -> None:
        self.version: int | None = None
        """Of the weights that have travelled last; None: none have."""
        self._codec = codec
        self._number = number
        self._memory: Tensor | None = None
        self._own: Tensor | None = None
        self._whole = False

    @property
    def own(self) -> Tensor | None:
        """This rank's part of the replica (n,), which with those of all ranks is all that there is to know of it."""
        return self._own

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept between two gathers."""
        return sum(kept.nbytes for kept in (self._memory, self._own) if kept is not None)

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory (numel,) in which the parts of all ranks are kept, in the order of ranks.

        A caller may write to its own rank's part before it calls ``gather``, and to no other one.
        """
        if self._memory is None:
            # Made while gradients are off for good, it could not be written to when they are on.
            with torch.inference_mode(False):
                self._memory = torch.empty(numel, dtype=dtype, device=device)
        kept = self._memory
        if (kept.numel(), kept.dtype, kept.device) != (numel, dtype, device):
            raise ConfigError(
                f"{numel} weights of {dtype} on {device} came where {kept.numel()} of {kept.dtype} on {kept.device} "
                "were before; a model whose weights travel as differences keeps its shape, type and device"
            )
        return kept

    def restore(self, own: Tensor, version: int) -> None:
        """Begin with this rank's part (n,) of an earlier replica, and others' of theirs, that had this version."""
        self._own, self._whole, self.version = own, False, version

    def forget(self) -> None:
        """Let whole weights travel at the next gather."""
        self._own, self._whole, self.version = None, False, None

    def gather(self, shard: Tensor, transport: Transport, version: int) -> None:
        """Bring ``memory`` to what this version of all ranks' weights is, as far as messages can tell it.

        Nothing travels if that version has. All ranks call it with the same one.

        Args:
            shard: this rank's weights (n,), as the optimizer has them; may be its part of the memory.
            transport: the ranks.
            version: changes whenever weights may have.
        """
        assert self._memory is not None
        rows = self._memory.view(transport.size, -1)
        mine = rows[transport.rank]
        if self._own is None:
            with torch.inference_mode(False):
                self._own = torch.empty_like(mine)
            self._own.copy_(shard)
            self.version = version
        main = shard.to(torch.float32, copy=True) if self.version != version else None
        mine.copy_(self._own)
        if not self._whole:
            transport.all_gather(self._own.view(torch.uint8), rows.view(torch.uint8))
            self._whole = True
        if main is not None:
            seed = derive_seed(version, self._number)
            halves.all_gather(main, rows, self._codec, transport, seed=seed, piece=_PIECE, differences=True)
            self._own.copy_(mine)
            self.version = version
