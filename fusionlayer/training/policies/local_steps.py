"""Anchors of a rank's parameters, and the outer optimizer that moves them: the values that a sync sends, and its
effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...base.errors import PlanMismatch, UsageError
from ...process.clock import HOST, Clock
from ...transport import Transport
from ..parameters import local_part
from ..sends import FollowsSyncs
from .gradient_noise import GradientNoise, norm_of
from .local import Local, state_name
from .pace import Pace


@dataclass
class Flight:
    """A fragment that is in flight.

    Attributes:
        parameters: the parameters of the fragment, by name.
        left: local steps until its results are taken.
        take: waits for the averaged differences, and returns them by name; states too.
        states: the states of the wrapped optimizer that sync too, by name; averages replace them.
        left_with: values of the parameters, by name, when the fragment was sent; None: no rank asks for them.
        norm: 2-norm of this rank's differences; None: nothing needs it.
        reports: what each rank reported, by rank; filled by ``take``.
    """

    parameters: dict[str, Tensor]
    left: int
    take: Callable[[], Mapping[str, Tensor]]
    states: dict[str, Tensor] = field(default_factory=dict)
    left_with: dict[str, Tensor] | None = None
    norm: Tensor | float | None = None
    reports: list[list[float]] = field(default_factory=list)

    @property
    def learned(self) -> list[Tensor] | None:
        """The change of each parameter since the fragment was sent; None where that is not carried."""
        if not self.left_with:
            return None
        parts = [local_part(parameter.detach()) for parameter in self.parameters.values()]
        return [*torch._foreach_sub(parts, [*self.left_with.values()])]


class LocalSteps:
    """One rank's local steps since the last sync, and the fragments that are in flight.

    Args:
        sync: how often ranks sync, and by which outer optimizer.
        clock: the clock of the parameters' device.

    Attributes:
        sync: as given.
        pace: changes the number of local steps between two syncs; None: nothing does.
        noise: how much ranks' differences disagree.
        count: local steps in this round.
        moved: whether a parameter may differ from its anchor.
        anchors: of each parameter that is trained, the value that all ranks had after the last sync.
        flights: in the order in which they were sent.
        own: of each parameter that holds its anchor for the moment, the rank's own value.
        restored: of each parameter that was loaded in the middle of a round, its value, until the next local step.
    """

    def __init__(self, sync: Local, clock: Clock = HOST) -> None:
        self.sync = sync
        self.pace = Pace(clock) if sync.adapts else None
        self.noise = GradientNoise()
        self.begin_anew()

    @property
    def every(self) -> int:
        """Local steps of this round."""
        return self.sync.first_every if self.pace is None else self.pace.state.every

    @property
    def departs(self) -> bool:
        """Whether a fragment leaves after the local step that was made last."""
        # More than a round has: the last sync was refused.
        due = self.count in self.sync.departures if self.pace is None else self.count == self.every
        return due or self.count > self.every

    def scaled(
        self, optimizer: Optimizer, groups: Iterable[dict[str, Any]], ranks: int
    ) -> AbstractContextManager[None]:
        """Scale the learning rates of the ``optimizer``'s groups within the block, as ``inner_lr_scale`` says."""
        scale = self.sync.inner_lr_scale
        fixed = None if self._follows_noise(optimizer) else 1.0 if ranks < 2 or scale == "auto" else scale
        return self.noise.scaled(optimizer, groups, fixed, ranks, self.every, self.sync.after or 0)

    def norm(self, optimizer: Optimizer, differences: Iterable[Tensor]) -> Tensor | None:
        """Return the norm of this rank's differences; None if neither a factor nor a period follows from it."""
        return norm_of(differences) if self.pace is not None or self._follows_noise(optimizer) else None

    def _follows_noise(self, optimizer: Optimizer) -> bool:
        # Outer momentum makes up for small updates by itself; the other's variance is that of averages.
        return self.sync.inner_lr_scale == "auto" and not self.sync.momentum and not isinstance(optimizer, FollowsSyncs)

    def begin_anew(self) -> None:
        """Forget all: the next local step notes its parameters as the anchors, and outer momentum begins at zero."""
        self.count = 0
        self.moved = False
        self.anchors: dict[Tensor, Tensor] = {}
        self.flights: list[Flight] = []
        self.own: dict[Tensor, Tensor] = {}
        self.restored: dict[Tensor, Tensor] = {}
        self._carried: dict[Tensor, Tensor] = {}  # outer momentum of parameters that have no anchor yet
        self.noise.begin_anew()
        if self.pace is not None:
            self.pace.begin_anew()
        sync = self.sync
        self._outer = SGD([{"params": []}], lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)

    def anchor(self, parameters: Iterable[Tensor]) -> None:
        """Note the values of those ``parameters`` that have no anchor yet; call it before they are first trained."""
        for parameter in parameters:
            if parameter not in self.anchors:
                self._add(parameter, local_part(parameter.detach()).clone())

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Set ``parameters``, which are no longer trained, to their anchors for good, and forget those."""
        for parameter in parameters:
            anchor = self.anchors.pop(parameter)
            local_part(parameter.detach()).copy_(anchor)
            self._outer.state.pop(anchor, None)
        self._outer.param_groups[0]["params"] = [*self.anchors.values()]

    def differences(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the anchor minus the parameter, for each."""
        return [*torch._foreach_sub(*self._pairs(parameters))] if parameters else []

    def parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return copies of ``parameters``, by name, if later progress will be carried; else None."""
        if not self.sync.carry:
            return None
        return {name: local_part(parameter.detach()).clone() for name, parameter in parameters.items()}

    def move(self, averages: Mapping[Tensor, Tensor], alpha: float, learned: list[Tensor] | None = None) -> None:
        """Let the outer optimizer move anchors by averaged differences, and parameters to them.

        Args:
            averages: of the differences, by parameter.
            alpha: share of its own value that a parameter keeps.
            learned: is added to each parameter then.
        """
        for parameter, average in averages.items():
            anchor = self.anchors[parameter]
            anchor.grad = average.view(anchor.shape)
        self._outer.step()
        self._outer.zero_grad()
        if averages:
            anchors, parts = self._pairs([*averages])
            if alpha:
                torch._foreach_lerp_(parts, anchors, 1 - alpha)
            else:
                torch._foreach_copy_(parts, anchors)
            if learned is not None:
                torch._foreach_add_(parts, learned)

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return copies of everything that the next steps depend on; tensors by name. Waits for fragments in flight."""
        momenta = {names[p]: kept for p, kept in self._carried.items()}
        momenta |= {names[p]: self._outer.state.get(anchor, {}).get(_MOMENTUM) for p, anchor in self.anchors.items()}
        flights = []
        for flight in self.flights:
            taken = flight.take()
            flight.take = lambda taken=taken: taken  # type: ignore[misc]
            sent = {name: x.clone() for name, x in (flight.left_with or {}).items()}
            averages = {name: x.clone() for name, x in taken.items()}
            measured = {"norm": None if flight.norm is None else float(flight.norm), "reports": flight.reports}
            flights.append({"left": flight.left, "averages": averages, "left_with": sent, **measured})
        return {
            "count": self.count,
            "moved": self.moved,
            "anchors": {names[p]: anchor.clone() for p, anchor in self.anchors.items()},
            "parameters": {names[p]: self._own_part(p).clone() for p in self.anchors} if self.moved else {},
            "momentum": {name: kept.clone() for name, kept in momenta.items() if kept is not None},
            "under_way": flights,
            "pace": None if self.pace is None else self.pace.state_dict(),
            "noise": self.noise.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None, named: Mapping[str, Tensor]) -> None:
        """Continue from the result of ``state_dict``; from None, restart.

        In the middle of a round, parameters get the values that they had. Otherwise they are the caller's to load.
        """
        self.begin_anew()
        if saved is None:
            return
        self.count, self.moved = saved["count"], saved["moved"]
        if self.pace is not None and saved.get("pace") is not None:
            self.pace.load_state_dict(saved["pace"])
        if "noise" in saved:  # not in a state of an earlier version, as below
            self.noise.load_state_dict(saved["noise"])
        self._carried = {named[name]: _like(named[name], x) for name, x in saved["momentum"].items() if name in named}
        for name, values in saved["anchors"].items():
            if name in named:
                self._add(named[name], _like(named[name], values))
        for name, values in saved.get("parameters", {}).items():
            if name in named:
                part = local_part(named[name].detach())
                self.restored[named[name]] = part.copy_(values.view(part.shape)).clone()
        for each in saved["under_way"]:
            parameters = {name: named[name] for name in each["averages"] if name in named}
            averages = {name: _like(p, each["averages"][name]) for name, p in parameters.items()}
            flight = Flight(parameters, each["left"], lambda averages=averages: averages)  # type: ignore[misc]
            flight.norm, flight.reports = each.get("norm"), each.get("reports", [])
            sent = each.get("left_with")
            flight.left_with = {name: _like(p, sent[name]) for name, p in parameters.items()} if sent else None
            self.flights.append(flight)

    def check_restored(self, names: Mapping[Tensor, str]) -> None:
        """Raise ``UsageError`` if a parameter was changed since a state of the middle of a round was loaded."""
        restored, self.restored = self.restored, {}
        for parameter, value in restored.items():
            if not torch.allclose(local_part(parameter.detach()), value, rtol=0, atol=0, equal_nan=True):
                raise UsageError(
                    f"parameter {names[parameter]!r} was changed after the optimizer's state was loaded; the state is "
                    "of the middle of a round of local steps, and holds this rank's parameters: load the model first, "
                    "then the optimizer"
                )

    def _own_part(self, parameter: Tensor) -> Tensor:
        return self.own[parameter] if parameter in self.own else local_part(parameter.detach())

    def _add(self, parameter: Tensor, anchor: Tensor) -> None:
        self.anchors[parameter] = anchor
        if parameter in self._carried:
            self._outer.state[anchor][_MOMENTUM] = self._carried.pop(parameter)
        self._outer.param_groups[0]["params"].append(anchor)

    def _pairs(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.anchors[p] for p in parameters], [local_part(p.detach()) for p in parameters]


def beginning(momentum: Mapping[str, Tensor], noise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of a round that is to begin, with outer momentum, by name, and noise of another one."""
    state = LocalSteps(Local(every=1)).state_dict({})
    return {**state, "momentum": dict(momentum), "noise": {**(noise or state["noise"]), "measured": None}}


def due_states(
    optimizer: Optimizer, names: dict[Tensor, str], keys: Iterable[str], due: Collection[str]
) -> dict[str, Tensor]:
    """Return the states of ``optimizer`` that sync now, by the names in ``due``; zeros for one that is not there yet.

    Args:
        optimizer: the wrapped one.
        names: the names of its parameters.
        keys: the keys of the states that sync at times.
        due: names of the tensors that are sent now.

    Raises:
        UsageError: the optimizer keeps no such state in the shape of its parameters.
    """
    states: dict[str, Tensor] = {}
    for key in keys:
        chosen = {parameter: state_name(key, name) for parameter, name in reversed(names.items())}
        chosen = {parameter: name for parameter, name in chosen.items() if name in due}
        kept = {parameter: optimizer.state.get(parameter, {}).get(key) for parameter in chosen}
        if chosen and not any(isinstance(x, Tensor) and x.shape == p.shape for p, x in kept.items()):
            known = sorted({key for state in optimizer.state.values() for key in state})
            raise UsageError(
                f"sync: states has {key!r}, which the optimizer does not keep in the shape of its parameters; it "
                f"keeps {', '.join(known) or 'nothing'}"
            )
        for parameter, name in chosen.items():
            state = kept[parameter]
            states[name] = local_part((torch.zeros_like(parameter) if state is None else state).detach())
    return states


def compare(count: int | None, numbers: Sequence[float], transport: Transport) -> list[list[float]]:
    """Check that all ranks sync after as many local steps, and return the numbers of each, by rank.

    Args:
        count: local steps of this rank since the last sync; None: it has joined (``hvd.join``) and makes none.
        numbers: numbers for the others, equally many on all ranks.
        transport: the ranks.

    Raises:
        PlanMismatch: they do not. All ranks raise it; it names the ranks that differ from the first.
    """
    mine = torch.tensor([-1 if count is None else count, *numbers], dtype=torch.float64, device="cpu")
    every = torch.empty(transport.size, len(mine), dtype=torch.float64, device="cpu")
    with transport.doing("a sync of local steps"):
        transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
    counts = {rank: count for rank, count in enumerate(map(int, every[:, 0].tolist())) if count >= 0}
    first = min(counts, default=0)
    differ = [rank for rank in counts if counts[rank] != counts[first]]
    if differ:
        shown = ", ".join(f"rank {rank}: {counts[rank]}" for rank in [first, *differ][:8])
        raise PlanMismatch(
            f"ranks sync after other numbers of local steps (this is rank {transport.rank}): {shown}; call "
            "synchronize() in the same place on all ranks, and load checkpoints of one moment",
            ranks=differ,
        )
    rows: list[list[float]] = every[:, 1:].tolist()
    return rows


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    part = local_part(parameter.detach())
    return torch.empty_like(part).copy_(values.view(part.shape))


_MOMENTUM = "momentum_buffer"
