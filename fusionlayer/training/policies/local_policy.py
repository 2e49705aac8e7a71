"""``LocalStepPolicy``: local steps, for ``sync=Local(...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from torch import Tensor

from ...base.errors import FusionLayerError, UsageError, again
from ...base.plan import FusionPlan, TensorInfo
from ...scheduler import Engine
from ..construction import EnginePlanning, GradientOptions
from ..own_state import check_place
from ..parameters import all_finite, local_part
from ..reducer import Reducer
from ..sends import FollowsSyncs
from ..step_policy import StepPolicy
from ..step_state import StepState
from .local import state_tensors
from .local_plan import planned_syncs
from .local_steps import Flight, LocalSteps, compare, due_states


class LocalStepPolicy(StepPolicy):
    """Local steps: the engine sums differences of parameters at each sync, not gradients.

    A step of the engine is a sync. Gradients have no hooks, so code that scales, clips or accumulates them finds the
    rank's own.

    Until as many steps are made as ``sync.after`` says, ``step`` averages gradients. The actions of a step follow from
    the number of the engine's step alone, so all ranks and all checkpoints agree on them.

    Args:
        local: anchors, and the outer optimizer.
        averaging: makes the steps before the first local one.

    Attributes:
        local: as given.
        averages: whether steps still average gradients.
    """

    takes_gradients = False
    # Otherwise a rank whose GradScaler skips would be a local step behind the others from then on.
    handles_overflow = True

    def __init__(self, local: LocalSteps, averaging: StepPolicy) -> None:
        self.local = local
        self.averages = bool(local.sync.after)
        self.holds_results = not self.averages
        self._averaging = averaging
        self._compared: dict[str, Tensor] = {}
        self.before_step, self.contribution = averaging.before_step, averaging.contribution

    def options(self, options: GradientOptions) -> GradientOptions:
        """Return the options of the averaging steps' policy, which knows the values that the optimizer sends."""
        return self._averaging.options(options)

    def more_tensors(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return the states of the wrapped optimizer that sync too."""
        return [] if self.averages else [*chain.from_iterable(state_tensors(self.local.sync, tensors).values())]

    def arrange(self, planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int]) -> EnginePlanning:
        """Return the planning of syncs, unless steps still average."""
        return planning if self.averages else planned_syncs(self.local.sync, planning, tensors, nodes)

    def attach(self, reducer: Reducer) -> None:
        """Compare replicas only once there are anchors."""
        super().attach(reducer)
        self._averaging.attach(reducer)
        self._compared = {}
        if not self.averages:
            reducer.check = None

    def detach(self) -> None:
        """Let the reducer go."""
        super().detach()
        self._averaging.detach()

    def is_in_flight(self, parameter: Tensor) -> bool:
        """Return whether a parameter has an anchor, or while steps average a part of a gradient."""
        return super().is_in_flight(parameter) if self.averages else parameter in self.local.anchors

    # ---- called by users --------------------------------------------------------------------------------------------

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """Take the step of the wrapped optimizer with this rank's gradients; every few calls, sync."""
        reducer, engine, local = self.reducer, self.reducer.engine, self.local
        if self.averages and engine is not None:
            return self._averaging_step(engine, update, closure, options)
        if engine is not None:
            if engine.failure is not None:
                raise again(engine.failure)
            reducer.refuse_later()
            if local.restored:
                local.check_restored(reducer.enrolment.names)
            self._anchor()
            for parameter in chain.from_iterable(group["params"] for group in reducer.groups):
                if not parameter.requires_grad:
                    # torch's optimizers update whatever has a gradient. One from before the parameter was frozen is
                    # this rank's own, and nothing would make the replicas equal again.
                    parameter.grad = None
        result = None
        if not self._overflown():
            with local.scaled(reducer.optimizer(), reducer.groups, 1 if engine is None else engine.size):
                result = update(**options) if closure is None else update(closure, **options)
        if engine is not None:
            local.count += 1
            local.moved = True
            local.noise.local_steps += 1
            self._after_step(engine)
        return result

    def synchronize(self) -> None:
        """Sync now, if a local step was made since the last sync."""
        engine, local = self.reducer.engine, self.local
        if engine is not None and local.moved:
            self._land_all()
            for _ in range(local.sync.fragments):
                self._land(self._send(engine), exactly=True)
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
        """Let parameters be the anchors within the block."""
        local = self.local
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
        """Return anchors, outer momentum and what is in flight, and within a round parameters and buffers."""
        steps = self.local.state_dict(self.reducer.enrolment.names)
        buffers = self.reducer.replicas.buffers if steps["parameters"] else {}
        return {"local": {**steps, "buffers": {name: buffer.clone() for name, buffer in buffers.items()}}}

    def before_load(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of another rank; let fragments in flight end, and average or not by the state's step."""
        engine = self.reducer.engine
        if engine is None:
            return
        check_place(saved, engine.rank, engine.size, "DistributedOptimizer")
        if engine.failure is None:
            for flight in self.local.flights:
                flight.take()  # the engine takes nothing new of a fragment before that
            if "step" in saved:
                self._enter(engine, saved["step"])

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the anchors that were saved; without any, begin a new round."""
        reducer = self.reducer
        if reducer.engine is None:
            return
        go_on(reducer.engine)
        local = saved.get("local")
        self.local.load_state_dict(local, reducer.enrolment.by_name())
        for name, buffer in (local or {}).get("buffers", {}).items():
            if name in reducer.replicas.buffers:
                reducer.replicas.buffers[name].copy_(buffer)

    def reconnect(self) -> None:
        """Begin a new round over the present job."""
        self.local.begin_anew()
        super().reconnect()
        if self.reducer.engine is not None:
            go_on(self.reducer.engine)

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Let fragments in flight arrive, then fuse by ``plan``."""
        self._land_all()
        super().adopt_plan(plan)

    # ---- before the first local step --------------------------------------------------------------------------------

    def _averaging_step(
        self, engine: Engine, update: Callable[..., Any], closure: Callable[[], Any] | None, options: Mapping[str, Any]
    ) -> Any:
        """Take a step by averaged gradients. After the last one of these, steps are local.

        ``GradScaler`` has looked at this rank's gradients alone. If a rank's values are not finite, averages are not
        either, and all ranks skip the update.
        """
        result, reducer = None, self.reducer
        scaled = getattr(reducer.optimizer(), "found_inf", None) is not None
        self._overflown()
        if scaled:
            self.reduce()
        gradients = [parameter.grad for parameter in reducer.names if parameter.grad is not None] if scaled else []
        if all_finite(gradients):
            result = super().step(update, closure, options)
        reducer.state = StepState.IDLE
        self._enter(engine, engine.step)
        return result

    def _enter(self, engine: Engine, step: int) -> None:
        """Average gradients from the engine's ``step`` on, or let steps be local, as ``sync.after`` says.

        Nothing is sent here. The ranks agree on the new plan when the next step of the engine begins.
        """
        reducer, averages = self.reducer, step < (self.local.sync.after or 0)
        if averages == self.averages:
            return
        self.averages, self.holds_results = averages, not averages
        reducer.flush()
        engine.memory.load_state_dict({})  # what a codec has lost of gradients is no part of a difference
        self.local.begin_anew()
        self._averaging.attach(reducer)  # what the optimizer sends may change with this step
        reducer.plan_anew(reducer.names, f"step {step} {'averages gradients' if averages else 'is local'}")
        self._compared = {}
        reducer.check = reducer.replicas.check(engine.put, optimizer=reducer.optimizer()) if averages else None
        go_on(engine)

    # ---- a sync: on the training thread, or on the thread of ``join`` that stands in for it --------------------------

    def _anchor(self) -> None:
        """Note the anchors of parameters that are trained from now on."""
        groups, local = self.reducer.groups, self.local
        if not local.anchors or self.reducer.enrolment.changed(groups):
            new = [parameter for parameter in _trained(groups) if parameter not in local.anchors]
            local.anchor(new)
            follower = self.reducer.optimizer()
            if isinstance(follower, FollowsSyncs):
                follower.begins(new)

    def _overflown(self) -> bool:
        """Return whether ``GradScaler`` has found gradients that are not finite; else unscale them, if it has not.

        An optimizer that does both itself, as fused ones do, is left alone.
        """
        optimizer = self.reducer.optimizer()
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        if found is None or "_step_supports_amp_scaling" in vars(optimizer):
            return False
        optimizer.found_inf = optimizer.grad_scale = None  # the wrapped optimizer would refuse them
        if found.item():
            return True
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for parameter in chain.from_iterable(group["params"] for group in self.reducer.groups):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
        return False

    def _after_step(self, engine: Engine) -> None:
        """Take the fragments that have been in flight for long enough, and send the next one if it is due."""
        local, sync = self.local, self.local.sync
        every = local.every  # a sync may change it
        for flight in [*local.flights]:
            flight.left -= 1
            if flight.left <= 0:
                self._land(flight)
        if local.departs:
            flight = self._send(engine)
            if sync.delay:
                local.flights.append(flight)
            else:
                self._land(flight)
                local.moved = sync.overlaps or sync.alpha > 0
        if local.count >= every:
            local.count = 0

    def _send(self, engine: Engine, joined: bool = False) -> Flight:
        """Send the differences of the fragment that is next. ``joined``: this rank makes no more steps."""
        reducer, local = self.reducer, self.local
        self._anchor()
        if reducer.enrolment.changed(reducer.groups):
            self._land_all()  # another plan has other fragments
        reducer.begin()
        named = reducer.replicas.named.items()
        self._compared.update({name: local.anchors.get(parameter, parameter) for name, parameter in named})
        # The first sync makes the plan in the order in which backward makes gradients.
        due = engine.due
        parameters = {name: p for p, name in reversed(reducer.names.items()) if name in due}
        states = due_states(reducer.optimizer(), reducer.names, local.sync.states, due)
        if local.sync.feedback_decay < 1:
            engine.memory.decay(local.sync.feedback_decay, parameters)
        before = engine.untaken
        differences = local.differences([*parameters.values()])
        norm, numbers = local.norm(reducer.optimizer(), differences), local.noise.report(joined)
        if local.pace is not None:
            numbers.append(local.pace.report(joined))
        for name, tensor in (*zip(parameters, differences, strict=True), *states.items()):
            engine.submit(name, tensor)
        engine.end_step()
        follower = reducer.optimizer()
        if isinstance(follower, FollowsSyncs):
            follower.leaves(parameters.values())
        buckets = sorted(engine.untaken - before)
        reports: list[list[float]] = []
        count = None if joined else local.count
        compared = engine.put(lambda transport: reports.extend(compare(count, numbers, transport)))
        if reducer.check is None:
            reducer.check = reducer.replicas.check(engine.put, self._compared)
        if reducer.check is not None:
            reducer.check.begin(present=not joined)
        reducer.state = StepState.IDLE

        def take() -> dict[str, Tensor]:
            results: dict[str, Tensor] = {}
            for index in buckets:
                results.update(engine.take(index))
            compared()
            return results

        parts = local.parts(parameters)
        return Flight(parameters, local.sync.delay, take, states, parts, norm, reports)

    def _land(self, flight: Flight, exactly: bool = False) -> None:
        """Wait for a fragment's averages; move its anchors by them, and its parameters to those.

        Args:
            flight: the fragment.
            exactly: parameters become the anchors, whatever ``alpha`` and ``carry`` are.
        """
        reducer, local, parameters = self.reducer, self.local, flight.parameters
        averages = flight.take()
        drift = local.noise.arrive(flight.norm, [averages[name] for name in parameters], flight.reports)
        if local.pace is not None:
            waited = [waited for *_, waited in flight.reports]
            local.pace.arrive(drift, waited, says=reducer.engine is not None and reducer.engine.rank == 0)
        alpha, learned = (0.0, None) if exactly else (local.sync.alpha, flight.learned)
        if reducer.check is not None:
            reducer.check.settle()
        with reducer.timeline.span("UPDATE", step=-1 if reducer.engine is None else reducer.engine.step - 1):
            differences = {parameter: averages[name] for name, parameter in parameters.items()}
            follower = reducer.optimizer()
            if isinstance(follower, FollowsSyncs):
                follower.synced({parameter: (local.anchors[parameter], x) for parameter, x in differences.items()})
            local.move(differences, alpha, learned)
            for name, state in flight.states.items():
                state.copy_(averages[name].view(state.shape))
        trained = {*_trained(reducer.groups)}
        local.settle([parameter for parameter in parameters.values() if parameter not in trained])
        local.flights = [other for other in local.flights if other is not flight]

    def _land_all(self) -> None:
        for flight in self.local.flights:
            self._land(flight)

    # ---- without this rank's training thread ------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait for fragments in flight, and drop them: an interpreter that ends under its threads aborts the
        process."""
        super().leave()
        if self.reducer.engine is not None and self.reducer.engine.failure is None:
            for flight in self.local.flights:
                with suppress(FusionLayerError):  # a rank is gone, and no rank takes these results
                    flight.take()

    def stand_in(self) -> None:
        """Take part in a sync of the other ranks after this rank has joined, with its progress since the last one.

        From the second such sync on that is nothing: its differences are zeros. Its parameters follow the anchors.
        """
        engine = self.reducer.engine
        assert engine is not None
        if self.averages:
            super().stand_in()
            self._enter(engine, engine.step)
            return
        self._land_all()
        self._land(self._send(engine, joined=True), exactly=True)
        self.local.noise.report(joined=True)  # forget that sync, in which this rank has made no steps
        self.local.count, self.local.moved = 0, False


def go_on(engine: Engine) -> None:
    """Let the engine send the fragment whose turn it is in the step that it was given."""
    if engine.failure is None:
        engine.load_state_dict({"step": engine.step, "results": {}})


def _trained(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [p for p in chain.from_iterable(group["params"] for group in groups) if p.requires_grad]
