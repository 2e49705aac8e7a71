"""The object that ``fsdp.compress`` returns: counts of bytes, and the state that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.errors import ConfigError
from .fsdp_collectives import AllGather, Direction, ReduceScatter, ReplicaGather
from .fsdp_replicas import ReplicaGroup
from .fsdp_shards import Shards


@dataclass(frozen=True)
class Module:
    """The collectives that replace those of torch in one sharded module."""

    shards: Shards
    gather: AllGather | ReplicaGather | None
    scatter: ReduceScatter | None
    between: ReplicaGroup | None = None

    @property
    def replica(self) -> ReplicaGather | None:
        """The copies of weights, if they are sent as differences."""
        return self.gather if isinstance(self.gather, ReplicaGather) else None


class FSDPCompression:
    """The collectives with which ``compress`` has replaced those of torch.

    It is ``Stateful`` in the sense of ``torch.distributed.checkpoint``. Save it with the model and the optimizer:
    after all three are loaded, training continues bit for bit.

    Attributes:
        weights: description of all-gathers of weights; None: torch's own all-gather.
        gradients: description of reduce-scatters of gradients; None: torch's own reduce-scatter.
        replicas: description of all-reduces between replicas; None: torch's own all-reduce, or no replicas.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        gathering: Direction | None,
        reducing: Direction | None,
        between: Direction | None,
    ) -> None:
        self.weights = str(gathering) if gathering else None
        self.gradients = str(reducing) if reducing else None
        self.replicas = str(between) if between else None
        self._between = between
        self._modules = modules
        self._directions = [direction for direction in (gathering, reducing, between) if direction]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent in these collectives so far; torch's own are not counted."""
        return sum(direction.bytes_sent for direction in self._directions)

    @property
    def bytes_between_replicas(self) -> int:
        """The part of ``bytes_sent`` that all-reduces between replicas have sent."""
        return self._between.bytes_sent if self._between else 0

    @property
    def replica_bytes(self) -> int:
        """Bytes of this rank's copies of all weights; 0 unless weights are sent as differences."""
        return sum(module.replica.replica.nbytes for module in self._modules if module.replica)

    def weights_changed(self, whole: bool = False) -> None:
        """Notify the collectives that something other than an optimizer's step changed weights.

        All ranks call it together. Steps of torch's optimizers are noticed without it.

        Args:
            whole: send whole weights once. Set it after a large change, such as loading other weights. Otherwise the
                difference is sent, as after a step.
        """
        for module in self._modules:
            module.shards.changed()
            module.shards.unsee()
            if whole and module.replica:
                module.replica.forget()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that determines messages and is saved neither by the model nor by the optimizer.

        It holds this rank's shard of the weights' copies. It also holds counters for seeds, which are the same on all
        ranks.

        With error feedback between replicas all ranks call it together. It holds the sum of the replicas' feedback, and
        each replica continues with a share of it. Other state of codecs, such as the factors of PowerSGD, is not saved.

        Raises:
            TransportError: a step has failed; the last state that was saved before it is the one to continue from.
        """
        for direction in self._directions:
            direction.drain()
        counts = torch.zeros(len(self._modules), 3, dtype=torch.int64, device="cpu")
        parts: dict[str, Tensor] = {}
        for row, module in zip(counts, self._modules, strict=True):
            sent_version = -1
            if module.replica:
                sent_version, of_module = module.replica.state()
                # Copies, as parts of one row would share a storage, which torch.save does not take in DTensors.
                parts |= {f"replica.{name}": part.clone() for name, part in of_module.items()}
            row.copy_(
                torch.tensor(
                    [module.shards.version, sent_version, module.scatter.sums if module.scatter else 0], device="cpu"
                )
            )
        rows = self._rows() if self._sharded_keys() else None
        state = {"counts": counts, **({} if rows is None else {"rows": rows}), **parts}
        if groups := self._lossy_groups:
            state["sums"] = torch.tensor([group.sums for group in groups], device="cpu")
        for group in self._feedback_groups:
            state |= {f"residual.{name}": part for name, part in group.state().items()}
        return state

    def _sharded_keys(self) -> list[str]:
        copies = [f"replica.{name}" for module in self._modules if module.replica for name in module.shards.names]
        return copies + [f"residual.{name}" for group in self._feedback_groups for name in group.shards.trained]

    @property
    def _lossy_groups(self) -> list[ReplicaGroup]:
        groups = [module.between for module in self._modules if module.between]
        return groups if self._between and not self._between.choice.codec.lossless else []

    @property
    def _feedback_groups(self) -> list[ReplicaGroup]:
        return self._lossy_groups if self._between and self._between.feeds_back else []

    def _rows(self) -> DTensor | None:
        found = [rows for module in self._modules if (rows := module.shards.rows()) is not None]
        return max(found, key=len, default=None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict`` in a job of the same size, before or after the weights are loaded.

        Raises:
            ConfigError: the state belongs to another model, of other codecs, or of another rank.
        """
        expected = ["counts", *(["sums"] if self._lossy_groups else []), *self._sharded_keys()]
        missing = sorted({*expected} - state_dict.keys())
        if missing or len(state_dict["counts"]) != len(self._modules):
            raise ConfigError(
                f"the state of fsdp.compress lacks {missing[:3] or 'modules'}; load what was saved of the same model, "
                "compressed alike"
            )
        rows, theirs = self._rows(), state_dict.get("rows")
        if isinstance(theirs, DTensor) and rows is not None and not torch.equal(rows.to_local(), theirs.to_local()):
            raise ConfigError(
                f"the state of fsdp.compress is that of another rank: it has rows {_span(theirs)} of the longest "
                f"weight, this rank {_span(rows)}; save with torch.distributed.checkpoint, or on every rank its own"
            )
        for row, module in zip(state_dict["counts"].tolist(), self._modules, strict=True):
            module.shards.version, sent_version, sums = row
            module.shards.unsee()
            if module.scatter:
                module.scatter.sums = sums
            if module.replica:
                module.replica.load(sent_version, {n: state_dict[f"replica.{n}"] for n in module.shards.names})
        if groups := self._lossy_groups:
            for group, sums in zip(groups, state_dict["sums"].tolist(), strict=True):
                group.sums = sums
        for group in self._feedback_groups:
            group.load({name: state_dict[f"residual.{name}"] for name in group.shards.trained})


def _span(rows: DTensor) -> str:
    local = rows.to_local().tolist()
    return f"{local[0]} to {local[-1]}" if local else "none"
