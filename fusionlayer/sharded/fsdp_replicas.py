"""The all-reduce between HSDP's replicas of a shard: a process group that stands in for torch's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import codecs, collectives, context
from ..backend import arguments
from ..backend.calls import scaling_of
from ..backend.work import JoinedWork
from ..base.plan import Bucket, Slot, TensorInfo
from ..base.seeds import derive_seed
from ..collectives import UNSCALED, reduce_flat
from ..native.wire import DTYPE_CODES
from ..observe.timeline import Timeline
from ..scheduler import Memory, located
from ..scheduler.buffers import Buffer
from ..scheduler.memory import merged_residuals
from ..scheduler.plan_state import BufferMaker
from ..transport import Transport
from .fsdp_collectives import Direction
from .fsdp_shards import Shards, local, sharded_like

# torch's stubs give some methods narrower types than torch calls them with.
_ProcessGroup: Any = dist.ProcessGroup
_RAW = codecs.get("raw").bare
_logger = logging.getLogger("fusionlayer")


class ReplicaGroup(_ProcessGroup):  # type: ignore[misc]
    """The ranks that hold copies of one module's shard. They sum its gradient after the reduce-scatter.

    FSDP2 calls ``all_reduce`` on a group of its own, and calls ``set_all_reduce_hook``'s hook only after that. So this
    group replaces FSDP2's. torch still decides when to call, accumulates gradients, and scales before and after.

    The bucket is the flat shard that the reduce-scatter has filled. Each replica keeps error feedback for it, by
    parameter. All replicas get the same bits.

    Args:
        direction: codec, collective and error feedback.
        shards: the shards of the module.
        number: the module's position in the model; seeds depend on it.
        native: torch's group. The two are equal, so torch finds ranks and name of this one.

    Attributes:
        native: as given.
        shards: as given.
        sums: number of all-reduces so far; the same on all ranks.
    """

    def __init__(self, direction: Direction, shards: Shards, number: int, native: dist.ProcessGroup) -> None:
        super().__init__(native.rank(), native.size())
        self.native = native
        self.sums = 0
        self._direction = direction
        self.shards = shards
        self._number = number
        self._memory = Memory(context.settings().feedback_bits)
        self._made: tuple[Bucket, Buffer] | None = None

    def __hash__(self) -> int:
        return hash(self.native)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.native

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Replace the flat shard in ``tensors`` with its scaled sum over replicas.

        The result is complete when the call returns (CPU), or is ordered on the current stream (CUDA).
        """
        (x,) = arguments.tensors(tensors)
        with self._direction.sending(self.native) as transport:
            scaling = scaling_of(arguments.reduction(args, kwargs), x.dtype, transport.size)
            scaling.scale_before_(x)
            if (bucket := self._bucket(x, transport)) is None:
                reduce_flat(x, _RAW, transport)
            else:
                buffer = self._buffer(x, bucket, transport)
                buffer.put_whole(x, self.sums)
                with located(self.sums, self._number, bucket, transport):
                    buffer.run(transport, self._seed())
                buffer.take()
            scaling.scale_after_(x)
        self.sums += 1
        return JoinedWork([], [x])

    def _seed(self) -> int:
        # Shards must not round alike; the first rank of the group identifies the shard.
        return derive_seed(self.sums, self._number, dist.get_process_group_ranks(self.native)[0])

    def _bucket(self, x: Tensor, transport: Transport) -> Bucket | None:
        """Return the layout of ``x``, or None if ``x`` must be summed without codec.

        torch leaves out parameters without a gradient and does not report which. Error feedback then waits.
        """
        if x.dtype not in DTYPE_CODES:
            return None
        trained = self.shards.trained
        if x.numel() != sum(length for _, length in trained.values()):
            if not self._direction.choice.codec.lossless:
                _warn_of_unused(next(iter(trained)))
            return None
        slots, start = [], 0
        for name, (p, length) in trained.items():
            if numel := p.to_local().numel():
                slots.append(Slot(name, numel, start))
            start += length
        if not slots:
            return None
        codec = self._direction.choice.codec.at_step(self.sums)
        algorithm = collectives.choose(codec, transport.node_sizes, self._direction.algorithm, ahead=None)
        dtype = str(x.dtype).removeprefix("torch.")
        ahead = collectives.is_gather(algorithm)
        return Bucket(tuple(slots), x.numel(), dtype, codec.name, codec.options, algorithm, ahead)

    def _buffer(self, x: Tensor, bucket: Bucket, transport: Transport) -> Buffer:
        """Return the buffer of ``bucket``; a new one takes over the error feedback of an earlier layout."""
        if self._made is None or self._made[0] != bucket:
            maker = BufferMaker(
                memory=self._memory,
                device=x.device,
                scaling=UNSCALED,
                timeline=Timeline(context.settings().timeline, dist.get_rank()),
                error_feedback=self._direction.error_feedback,
                in_place=True,
                rank=transport.rank,
                size=transport.size,
                at_once=x.is_cuda,
                undoable=False,
            )
            tensors = {
                name: TensorInfo(name, p.to_local().numel(), bucket.dtype, x.element_size(), shape=p.to_local().shape)
                for name, (p, _) in self.shards.trained.items()
            }
            self._made = bucket, maker.make(self._number, bucket, maker.codec_of(bucket), tensors)
        return self._made[1]

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return the replicas' error feedback, summed, by parameter and sharded as parameters are.

        All replicas call it. Each continues with its share of the sum, as it would after ``load``.
        """
        trained, kept = self.shards.trained, merged_residuals([self._memory.state_dict()])
        rows = {
            name: kept[name].to(p.device) if name in kept else torch.zeros(p.to_local().numel(), device=p.device)
            for name, (p, _) in trained.items()
        }
        if self.sums:
            flat = torch.cat(list(rows.values()))
            with self._direction.sending(self.native) as transport:
                reduce_flat(flat, _RAW, transport)
            rows = dict(zip(rows, flat.split([len(row) for row in rows.values()]), strict=True))
            self._share(rows)
        # Copies, as for the copies of weights.
        return {name: sharded_like(trained[name][0], row.clone()) for name, row in rows.items()}

    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Continue from the result of ``state``, also with another number of replicas."""
        self._share({name: local(parts[name]).flatten() for name in self.shards.trained})

    def _share(self, sums: Mapping[str, Tensor]) -> None:
        """Replace this replica's error feedback with its share of ``sums``."""
        shares = {name: each / self.native.size() for name, each in sums.items() if each.numel()}
        self._memory.load_state_dict({**self._memory.state_dict(), "residuals": shares, "packed": {}})


@cache
def _warn_of_unused(name: str) -> None:
    _logger.warning(
        "fsdp.compress: parameters next to %s have no gradient, so their module's sum over replicas is sent "
        "uncompressed; freeze them with requires_grad_(False), or call set_reduce_scatter_unused_params(True)",
        name,
    )
