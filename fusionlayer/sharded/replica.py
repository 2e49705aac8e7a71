"""A copy of all weights on every rank, which differences keep close to the owners' weights, or equal to them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..collectives import halves
from ..transport import Transport


class Replica:
    """A copy of all weights, the same bits on every rank (SDP4Bit, section 3.1 and Algorithm 2).

    Whole weights are sent once. After that, each rank sends its own weights minus the replica's, quantised. Every rank,
    the sender too, adds the decoded values to its replica. The next difference contains the loss of a message. With a
    ``ChangeCodec`` messages are exact, and the replica has the bits of all weights.

    Args:
        codec: the codec of the differences.
        number: number of this replica in its model; seeds depend on it.
    """

    def __init__(self, codec: Codec, number: int = 0) -> None:
        self.version: int | None = None
        """Version of the weights that was sent last; None before the first gather."""
        self._codec = codec
        self._number = number
        self._memory: Tensor | None = None
        self._own: Tensor | None = None
        self._whole = False

    @property
    def own(self) -> Tensor | None:
        """This rank's part of the replica (n,). The parts of all ranks together are the whole replica."""
        return self._own

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the replica keeps between two gathers."""
        return sum(kept.nbytes for kept in (self._memory, self._own) if kept is not None)

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory (numel,) that holds the parts of all ranks, in the order of ranks.

        Before ``gather``, a caller may write to its own rank's part only.
        """
        if self._memory is None:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._memory = torch.empty(numel, dtype=dtype, device=device)
        kept = self._memory
        if (kept.numel(), kept.dtype, kept.device) != (numel, dtype, device):
            raise ConfigError(
                f"{numel} weights of {dtype} on {device} came where {kept.numel()} of {kept.dtype} on {kept.device} "
                "were before; a model whose weights are sent as differences keeps its shape, type and device"
            )
        return kept

    def restore(self, own: Tensor, version: int) -> None:
        """Begin with this rank's part (n,) of a saved replica of this version; all ranks call it with their parts."""
        self._own, self._whole, self.version = own, False, version

    def forget(self) -> None:
        """Forget the replica, so that the next gather sends whole weights."""
        self._own, self._whole, self.version = None, False, None

    def gather(self, shard: Tensor, transport: Transport, version: int) -> None:
        """Fill ``memory`` with the replica of this version of all ranks' weights.

        If this version has been sent already, no differences are sent. All ranks call it with the same version.

        Args:
            shard: this rank's weights (n,), as the optimizer has them; may be its part of the memory.
            transport: connects the ranks.
            version: a number that changes whenever weights may have changed.
        """
        assert self._memory is not None
        rows = self._memory.view(transport.size, -1)
        mine = rows[transport.rank]
        if self._own is None:
            with torch.inference_mode(False):
                self._own = torch.empty_like(mine)
            self._own.copy_(shard)
            self.version = version
        kind = shard.dtype if self._codec.lossless else torch.float32
        main = shard.to(kind, copy=True) if self.version != version else None
        mine.copy_(self._own)
        if not self._whole:
            transport.all_gather(self._own.view(torch.uint8), rows.view(torch.uint8))
            self._whole = True
        if main is not None:
            seed = derive_seed(version, self._number)
            halves.all_gather(main, rows, self._codec, transport, seed=seed, differences=True)
            self._own.copy_(mine)
            self.version = version
