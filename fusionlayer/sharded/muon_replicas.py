"""``MuonOfReplicas``: a ``ShardedOptimizer`` whose matrices belong to one rank each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..codecs import Codec
from ..functional import Group
from ..training.weights import Weights
from .flat_shard import FlatShard
from .layout import Layout
from .sharded import ShardedOptimizer


class MuonOfReplicas(ShardedOptimizer):
    """The result of ``Muon`` for replicas.

    Args:
        groups: groups of matrices with all options of ``torch.optim.Muon``, and groups with those of AdamW.
        gradients: codec of the gradients.
        updates: how weights are sent; as differences if the codec loses anything.
        group: as for ``ShardedOptimizer``.
        check_replicas: as for ``ShardedOptimizer``.
    """

    _inner: _Owner

    def __init__(
        self,
        groups: list[dict[str, Any]],
        gradients: Codec,
        updates: Weights,
        group: Group,
        check_replicas: bool | int | None,
    ) -> None:
        weights = replace(updates, differences=updates.differences or not updates.codec.lossless)
        super().__init__(
            groups, _Owner, weights=weights, gradients=gradients, group=group, check_replicas=check_replicas
        )
        rank = self._transport.rank
        self._inner.matrices = {
            i: [(place, tuple(part.params[j].shape)) for j, place in part.layout.owned(rank).items()]
            for i, part in enumerate(self._parts)
            if part.layout.whole
        }

    def _cut(self, group: Mapping[str, Any], align: int) -> FlatShard:
        numels = tuple(p.numel() for p in group["params"])
        size = self._transport.size
        layout = Layout(numels, size, align, whole="momentum" in group)
        return FlatShard(group["params"], self._transport, layout, feedback=size > 1 and not self._gradients.lossless)


class _Owner(Optimizer):
    """Steps a rank's flat parts: those with ``matrices`` by Muon, all others by AdamW.

    In each step it makes torch's optimizers anew, of views of the parts and of their states, so that a state is as flat
    as its part.

    Attributes:
        matrices: places and shapes of this rank's matrices in the part of a group, by the group's number.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.matrices: dict[int, list[tuple[slice, tuple[int, ...]]]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for i, group in enumerate(self.param_groups):
            (main,) = group["params"]
            inner: Any
            if i in self.matrices:
                state = self.state[main]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(main)
                places = self.matrices[i]
                own = [nn.Parameter(main.detach()[place].view(shape)) for place, shape in places]
                inner = torch.optim.Muon([{"params": own}], **known(torch.optim.Muon, group))
                for matrix, (place, shape) in zip(own, places, strict=True):
                    matrix.grad = main.grad[place].view(shape)
                    inner.state[matrix] = {"momentum_buffer": state["momentum_buffer"][place].view(shape)}
            else:
                inner = AdamW([main], **known(AdamW, group))
                inner.state[main] = self.state[main]
            inner.step()


def known(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that an optimizer has: schedulers add others."""
    return {key: group[key] for key in inspect.signature(kind).parameters if key in group and key != "params"}
