"""The methods that users call on a distributed optimizer with ``sync=Local(...)``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...base.errors import FusionLayerError, UsageError, again
from ...base.plan import FusionPlan
from ...scheduler import Engine
from ..distributed import Distributed
from ..own_state import check_place
from ..parameters import all_finite, local_part
from ..sends import FollowsSyncs, sent_by
from ..step_state import StepState
from .local import state_name
from .local_steps import Flight, LocalSteps, compare

__all__ = ["LocallyStepping"]


class LocallyStepping(Distributed):
    """A ``Distributed`` whose steps are local: the engine sums differences of parameters at each sync, not gradients.

    A step of the engine is a sync. Gradients have no hooks, so whoever scales, clips or accumulates them finds the
    rank's own.

    Until as many steps are made as ``sync.after`` says, ``step`` averages gradients. What a step does follows from the
    number of the engine's step alone, so all ranks and all checkpoints agree on it.
    """

    _fl_local: LocalSteps
    _fl_compared: dict[str, Tensor]
    _fl_averages: bool

    # torch's GradScaler then calls ``step`` also where gradients are not finite, and leaves it to ``step`` to skip the
    # update. Otherwise a rank that skips would be a local step behind the others from then on.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the step of the wrapped optimizer with this rank's gradients; every so many calls, sync with all ranks.

        A step that ``GradScaler`` skips on this rank counts too: all ranks make equally many.

        Raises:
            PlanMismatch: ranks disagree on model, plan or options, or have made other numbers of local steps.
            ReplicaMismatch: anchors differ over ranks.
            TransportError: a peer was lost, stopped or too late. This rank's parameters stay as they were before.
        """
        self._opt_called = True
        engine, local = self._fl_engine, self._fl_local
        if self._fl_averages and engine is not None:
            return self._fl_averaging_step(engine, closure, **kwargs)
        if engine is not None:
            if engine.failure is not None:
                raise again(engine.failure)
            if not self._fl_looked:
                self._fl_refuse_later()
            if local.restored:
                local.check_restored(self._fl_roster.names)
            self._fl_anchor()
            for parameter in chain.from_iterable(group["params"] for group in self.__dict__["param_groups"]):
                if not parameter.requires_grad:
                    # torch's optimizers update whatever has a gradient. One that is left from before the parameter was
                    # frozen is this rank's own, and nothing would make the replicas equal again.
                    parameter.grad = None
        result = None
        if not self._fl_overflown():
            step = super(Distributed, self).step
            result = step(**kwargs) if closure is None else step(closure, **kwargs)
        if engine is not None:
            local.count += 1
            local.moved = True
            self._fl_after_step(engine)
        return result

    # As in ``Distributed``: torch's step hooks run in the wrapped class's step, and this step tells schedulers.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Sync now, on all ranks, if a local step was made since the last sync; the next round begins then.

        What is under way arrives first. Then all fragments sync, and parameters become the anchors, whatever ``alpha``
        and ``carry`` are. Call it before all ranks evaluate or save the same model, and after the last step.

        Raises:
            PlanMismatch, ReplicaMismatch, TransportError: as ``step``.
        """
        engine, local = self._fl_engine, self._fl_local
        if engine is not None and local.moved:
            self._fl_land_all()
            for _ in range(local.sync.fragments):
                self._fl_land(self._fl_send(engine), exactly=True)
            local.count, local.moved = 0, False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise ``UsageError``: gradients are this rank's own, so nothing waits for them."""
        raise UsageError(
            "skip_synchronize() with sync=fl.Local(...): gradients are this rank's own; clip them right after "
            "backward, without synchronize(), and call step()"
        )
        yield

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Let parameters be the anchors within the block, as ``Distributed.anchored`` says."""
        local = self._fl_local
        parts = {parameter: local_part(parameter.detach()) for parameter in local.anchors}
        local.own = {parameter: part.clone() for parameter, part in parts.items()}
        for parameter, part in parts.items():
            part.copy_(local.anchors[parameter])
        try:
            yield
        finally:
            own, local.own = local.own, {}
            for parameter, part in parts.items():
                part.copy_(own[parameter])

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "fusionlayer" also anchors, outer momentum and what is under way.

        Between two syncs the states, parameters and buffers of ranks differ: each rank saves and loads its own. The
        state holds this rank's parameters and buffers too, also within ``anchored``.

        Raises:
            FusionLayerError: a sync has failed; the last state that was saved before it is the one to go on from.
        """
        steps = self._fl_local.state_dict(self._fl_roster.names)  # first: what is under way changes error feedback
        state = super().state_dict()
        if self._fl_engine is not None:
            buffers = self._fl_replicas.buffers if steps["parameters"] else {}
            steps["buffers"] = {name: buffer.clone() for name, buffer in buffers.items()}
            state["fusionlayer"]["local"] = steps
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank, in the middle of a round parameters and buffers too.

        Load the model before. A state of an optimizer without local steps begins a new round: its anchors are the
        parameters at the next ``step``, which have to be equal on all ranks.

        Raises:
            ConfigError: the state holds error feedback or local steps of another rank, or of another number of ranks.
        """
        engine = self._fl_engine
        own = state_dict.get("fusionlayer", {})
        if engine is not None:
            check_place(own, engine.rank, engine.size, "DistributedOptimizer")
        if engine is not None and engine.failure is None:
            for flight in self._fl_local.flights:
                flight.take()  # the engine takes nothing new of a fragment before that
            if "step" in own:
                self._fl_enter(engine, own["step"])
        super().load_state_dict(state_dict)
        if engine is None:
            return
        self._fl_go_on(engine)
        self._fl_local.load_state_dict(own.get("local"), self._fl_roster.by_name())
        for name, buffer in own.get("local", {}).get("buffers", {}).items():
            if name in self._fl_replicas.buffers:
                self._fl_replicas.buffers[name].copy_(buffer)

    def reconnect(self) -> None:
        """Sync over the job as it is now, after ``shutdown`` and ``init``; all ranks call it together.

        A new round begins: its anchors are the parameters at the next ``step``, which the job has made equal by then,
        and outer momentum begins at zero. The rest is as ``Distributed.reconnect`` says.

        Raises:
            TransportError: a peer was lost, stopped or late.
        """
        self._fl_local.begin_anew()
        super().reconnect()
        if self._fl_engine is not None:
            self._fl_go_on(self._fl_engine)

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Let what is under way arrive, then fuse by ``plan``, as ``Distributed.adopt_plan`` says."""
        self._fl_land_all()
        super().adopt_plan(plan)

    def _attach(self, *arguments: Any) -> None:
        super()._attach(*arguments)
        self._fl_compared = {}
        if not self._fl_averages:
            self._fl_check = None  # there are no anchors yet

    # ---- before the first local step --------------------------------------------------------------------------------

    def _fl_averaging_step(self, engine: Engine, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Take a step by averaged gradients. After the last one of these, steps are local.

        ``GradScaler`` has looked at this rank's gradients alone. If those of any rank are not finite, averages are not
        either, and all ranks skip the update.
        """
        result = None
        scaled = getattr(self, "found_inf", None) is not None
        self._fl_overflown()
        if scaled:
            self._fl_synchronize()
        gradients = [parameter.grad for parameter in self._fl_names if parameter.grad is not None] if scaled else []
        if all_finite(gradients):
            result = super().step(closure, **kwargs)
        self._fl_state = StepState.IDLE
        self._fl_enter(engine, engine.step)
        return result

    def _fl_enter(self, engine: Engine, step: int) -> None:
        """Average gradients from the engine's ``step`` on, or let steps be local, as ``sync.after`` says.

        Nothing travels here. The ranks agree on the new plan when the next step of the engine begins.
        """
        averages = step < (self._fl_local.sync.after or 0)
        if averages == self._fl_averages:
            return
        self._fl_averages = averages
        self._fl_flush()
        engine.memory.load_state_dict({})  # what a codec has lost of gradients is no part of a difference
        self._fl_local.begin_anew()
        self._fl_plan_anew(engine, self._fl_names, f"step {step} {'averages gradients' if averages else 'is local'}")
        self._fl_sent = sent_by(self)
        self._fl_compared = {}
        self._fl_check = self._fl_replicas.check(engine.put, optimizer=self) if averages else None
        self._fl_go_on(engine)

    # ---- a sync: on the training thread, or on the thread of ``join`` that stands in for it --------------------------

    def _fl_watch(self, parameters: object) -> None:
        """Register no hooks: gradients stay the rank's own until ``step``, which averages them at first."""

    def _fl_under_way(self, parameter: Tensor) -> bool:
        return super()._fl_under_way(parameter) if self._fl_averages else parameter in self._fl_local.anchors

    @staticmethod
    def _fl_go_on(engine: Engine) -> None:
        """Let the engine send the fragment whose turn it is in the step that it was given."""
        if engine.failure is None:
            engine.load_state_dict({"step": engine.step, "results": {}})

    def _fl_anchor(self) -> None:
        """Note the anchors of parameters that are trained from now on."""
        groups, local = self.__dict__["param_groups"], self._fl_local
        if not local.anchors or self._fl_roster.changed(groups):
            new = [parameter for parameter in _trained(groups) if parameter not in local.anchors]
            local.anchor(new)
            if isinstance(self, FollowsSyncs):
                self.begins(new)

    def _fl_overflown(self) -> bool:
        """Return whether ``GradScaler`` has found gradients that are not finite; else unscale them, if it has not.

        An optimizer that does both itself, as fused ones do, is left alone.
        """
        found: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if found is None or "_step_supports_amp_scaling" in vars(self):
            return False
        self.found_inf = self.grad_scale = None  # the wrapped optimizer would refuse them
        if found.item():
            return True
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for parameter in chain.from_iterable(group["params"] for group in self.__dict__["param_groups"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
        return False

    def _fl_after_step(self, engine: Engine) -> None:
        """Take the fragments that have been under way for long enough, and send the next one if it is due."""
        local, sync = self._fl_local, self._fl_local.sync
        every = local.every  # a sync may change it
        for flight in [*local.flights]:
            flight.left -= 1
            if flight.left <= 0:
                self._fl_land(flight)
        if local.departs:
            flight = self._fl_send(engine)
            if sync.delay:
                local.flights.append(flight)
            else:
                self._fl_land(flight)
                local.moved = sync.overlaps or sync.alpha > 0
        if local.count >= every:
            local.count = 0

    def _fl_send(self, engine: Engine, joined: bool = False) -> Flight:
        """Send the differences of the fragment that is next. ``joined``: this rank makes no more steps."""
        local = self._fl_local
        self._fl_anchor()
        if self._fl_roster.changed(self.__dict__["param_groups"]):
            self._fl_land_all()  # another plan has other fragments
        self._fl_begin(engine)
        named = self._fl_replicas.named.items()
        self._fl_compared.update({name: local.anchors.get(parameter, parameter) for name, parameter in named})
        # The first sync makes the plan by the order in which tensors come: that in which backward makes gradients.
        due = engine.due
        states = self._fl_states(due)
        parameters = {name: p for p, name in reversed(self._fl_names.items()) if name in due}
        if local.sync.feedback_decay < 1:
            engine.memory.decay(local.sync.feedback_decay, parameters)
        before = engine.untaken
        differences = local.differences([*parameters.values()])
        told = local.pace.leave(differences, joined) if local.pace is not None else []
        for name, difference in zip(parameters, differences, strict=True):
            engine.submit(name, difference)
        for name, state in states.items():
            engine.submit(name, state)
        engine.end_step()
        if isinstance(self, FollowsSyncs):
            self.leaves(parameters.values())
        buckets = sorted(engine.untaken - before)
        heard: list[list[float]] = []
        count = None if joined else local.count
        compared = engine.put(lambda transport: heard.extend(compare(count, told, transport)))
        if self._fl_check is None:
            self._fl_check = self._fl_replicas.check(engine.put, self._fl_compared)
        if self._fl_check is not None:
            self._fl_check.begin(present=not joined)
        self._fl_state = StepState.IDLE

        def take() -> dict[str, Tensor]:
            results: dict[str, Tensor] = {}
            for index in buckets:
                results.update(engine.take(index))
            compared()
            if local.pace is not None:
                local.pace.arrive([results[name] for name in parameters], heard, says=engine.rank == 0)
            return results

        return Flight(parameters, local.sync.delay, take, states, local.parts(parameters))

    def _fl_land(self, flight: Flight, exactly: bool = False) -> None:
        """Wait for a fragment's averages; move its anchors by them, and its parameters to those.

        Args:
            flight: the fragment.
            exactly: parameters become the anchors, whatever ``alpha`` and ``carry`` are.
        """
        local, parameters = self._fl_local, flight.parameters
        averages = flight.take()
        alpha, learned = (0.0, None) if exactly else (local.sync.alpha, flight.learned)
        if self._fl_check is not None:
            self._fl_check.settle()
        with self._fl_timeline.span("UPDATE", step=self._fl_step_number - 1):
            differences = {parameter: averages[name] for name, parameter in parameters.items()}
            if isinstance(self, FollowsSyncs):
                self.synced({parameter: (local.anchors[parameter], x) for parameter, x in differences.items()})
            local.move(differences, alpha, learned)
            for name, state in flight.states.items():
                state.copy_(averages[name].view(state.shape))
        trained = {*_trained(self.__dict__["param_groups"])}
        local.settle([parameter for parameter in parameters.values() if parameter not in trained])
        local.flights = [other for other in local.flights if other is not flight]

    def _fl_states(self, due: Collection[str]) -> dict[str, Tensor]:
        """Return the states of the wrapped optimizer that sync now, by name; zeros for one that is not there yet."""
        states: dict[str, Tensor] = {}
        for key in self._fl_local.sync.states:
            names = {parameter: state_name(key, name) for parameter, name in reversed(self._fl_names.items())}
            names = {parameter: name for parameter, name in names.items() if name in due}
            kept = {parameter: self.state.get(parameter, {}).get(key) for parameter in names}
            if names and not any(isinstance(x, Tensor) and x.shape == p.shape for p, x in kept.items()):
                known = sorted({key for state in self.state.values() for key in state})
                raise UsageError(
                    f"sync: states has {key!r}, which the optimizer does not keep in the shape of its parameters; it "
                    f"keeps {', '.join(known) or 'nothing'}"
                )
            for parameter, name in names.items():
                state = kept[parameter]
                states[name] = local_part((torch.zeros_like(parameter) if state is None else state).detach())
        return states

    def _fl_land_all(self) -> None:
        for flight in self._fl_local.flights:
            self._fl_land(flight)

    def _fl_leave(self) -> None:
        """Wait for what is under way, and drop it: an interpreter that ends under its threads aborts the process."""
        super()._fl_leave()
        if self._fl_engine is not None and self._fl_engine.failure is None:
            for flight in self._fl_local.flights:
                with suppress(FusionLayerError):  # a rank is gone, and nobody takes these results
                    flight.take()

    def _fl_stand_in(self) -> None:
        """Take part in a sync of the other ranks after this rank has joined, with what it has trained since the last.

        From the second such sync on that is nothing: its differences are zeros. Its parameters follow the anchors.
        """
        assert self._fl_engine is not None
        if self._fl_averages:
            super()._fl_stand_in()
            self._fl_enter(self._fl_engine, self._fl_engine.step)
            return
        self._fl_land_all()
        self._fl_land(self._fl_send(self._fl_engine, joined=True), exactly=True)
        self._fl_local.count, self._fl_local.moved = 0, False


def _trained(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [p for p in chain.from_iterable(group["params"] for group in groups) if p.requires_grad]
