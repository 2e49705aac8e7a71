"""Anchors of a rank's parameters, and the outer optimizer that moves them: what a sync sends, and what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from ..errors import PlanMismatch
from ..transport import Transport
from .local import Local
from .parameters import local_part

__all__ = ["LocalSteps"]


class LocalSteps:
    """One rank's local steps since the last sync.

    Args:
        sync: how often ranks sync, and by which outer optimizer.

    Attributes:
        sync: as given.
        since_sync: local steps since the last sync.
        anchors: of each parameter that is trained, the values that all ranks had after the last sync.
    """

    def __init__(self, sync: Local) -> None:
        self.sync = sync
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all: the next local step notes its parameters as the anchors, and outer momentum begins at zero."""
        self.since_sync = 0
        self.anchors: dict[Tensor, Tensor] = {}
        sync = self.sync
        self._outer = SGD([{"params": []}], lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def anchor(self, parameters: Iterable[Tensor]) -> None:
        """Note the values of those ``parameters`` that have no anchor yet; call it before they are first trained."""
        for parameter in parameters:
            if parameter not in self.anchors:
                self._add(parameter, local_part(parameter.detach()).clone())

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Forget anchors and outer momentum of all other parameters."""
        kept = set(parameters)
        for parameter in [p for p in self.anchors if p not in kept]:
            self._outer.state.pop(self.anchors.pop(parameter), None)
        self._outer.param_groups[0]["params"] = list(self.anchors.values())

    def differences(self) -> dict[Tensor, Tensor]:
        """Return the anchor minus the parameter, for each that has an anchor."""
        if not self.anchors:
            return {}
        return dict(zip(self.anchors, torch._foreach_sub(self._anchors, self._parameters), strict=True))

    def move(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Let the outer optimizer move the anchors by the averaged differences, and set parameters to them."""
        for parameter, anchor in self.anchors.items():
            anchor.grad = averages[parameter].view(anchor.shape)
        self._outer.step()
        self._outer.zero_grad()
        if self.anchors:
            torch._foreach_copy_(self._parameters, self._anchors)
        self.since_sync = 0

    def compare(self, transport: Transport, joined: bool) -> None:
        """Check that all ranks have made equally many local steps, except those that have ``joined`` (``hvd.join``).

        Raises:
            PlanMismatch: they have not. All ranks raise it; it names those that differ from the first.
        """
        every = torch.empty(transport.size, 1, dtype=torch.int64)
        mine = torch.tensor([-1 if joined else self.since_sync])
        with transport.doing("a sync of local steps"):
            transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
        counts = {rank: count for rank, count in enumerate(every.flatten().tolist()) if count >= 0}
        first = min(counts, default=0)
        differ = [rank for rank, count in counts.items() if count != counts[first]]
        if differ:
            shown = ", ".join(f"rank {rank}: {counts[rank]}" for rank in [first, *differ][:8])
            raise PlanMismatch(
                f"ranks sync after other numbers of local steps (this is rank {transport.rank}): {shown}; call "
                "synchronize() in the same place on all ranks, and load checkpoints of one moment",
                ranks=differ,
            )

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return copies of all that the next steps depend on; tensors by name."""
        momenta = ((names[p], self._outer.state.get(anchor, {})) for p, anchor in self.anchors.items())
        return {
            "since_sync": self.since_sync,
            "anchors": {names[p]: anchor.clone() for p, anchor in self.anchors.items()},
            "momentum": {name: kept[_MOMENTUM].clone() for name, kept in momenta if kept.get(_MOMENTUM) is not None},
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None, named: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned; from None, begin anew. Parameters are the caller's to load."""
        self.begin_anew()
        if saved is None:
            return
        self.since_sync = saved["since_sync"]
        for name, values in saved["anchors"].items():
            if name in named:
                like = local_part(named[name].detach())
                anchor = torch.empty_like(like).copy_(values)
                self._add(named[name], anchor)
                if name in saved["momentum"]:
                    self._outer.state[anchor][_MOMENTUM] = torch.empty_like(like).copy_(saved["momentum"][name])

    def _add(self, parameter: Tensor, anchor: Tensor) -> None:
        self.anchors[parameter] = anchor
        self._outer.param_groups[0]["params"].append(anchor)

    @property
    def _anchors(self) -> list[Tensor]:
        return list(self.anchors.values())

    @property
    def _parameters(self) -> list[Tensor]:
        return [local_part(parameter.detach()) for parameter in self.anchors]


_MOMENTUM = "momentum_buffer"
