"""Takes an optimizer's gradients through the engine: hooks hand them over, and the end of a step puts results back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle

from .. import context
from ..errors import ConfigError, UsageError, again
from ..scheduler import Engine
from ..timeline import Timeline
from .averaging import refuse_averaged
from .backward_end import NO_BACKWARD, at_end_of_backward, is_nested, running_backward
from .enrolment import Roster, what_changed
from .overlap import ForwardOverlap
from .parameters import local_part
from .phases import StepPhases
from .replicas import ReplicaCheck, Replicas
from .sends import SendsItsOwn, sent_by
from .sparse import ByName, SparseGradients

__all__ = ["WITH_RESULTS", "GradientReduction", "StepState", "refuse_twice"]


class StepState(Enum):
    """How far an optimizer's step has come.

    A failure is not a state: the engine keeps the error, and every later call raises it again.
    """

    IDLE = auto()
    """The engine has no gradient of the next step: at first, after ``step``, or while backward accumulates locally."""
    REDUCING = auto()
    """A hook has handed over the step's first gradient. Every rank has to end this step; ``zero_grad`` is refused."""
    REDUCED = auto()
    """The gradients are reduced: the end of backward, or code that read ``param_groups``, has ended the step."""
    SYNCHRONIZED = auto()
    """The user's ``synchronize`` has reduced the gradients: ``step`` warns outside ``skip_synchronize``."""
    STEPPED = auto()
    """With ``overlap_forward``: ``step`` has returned, and the next forward updates parameters as results come."""
    UPDATING = auto()
    """The wrapped optimizer's own code runs within a step, and reads ``param_groups`` as they are: it makes what it
    sends, or, with ``overlap_forward``, updates one bucket, whose parameters alone ``param_groups`` then holds. Any
    state may come before, and the same state comes back afterwards."""


WITH_RESULTS = (StepState.REDUCED, StepState.SYNCHRONIZED)


class GradientReduction(Optimizer):
    """Hands gradients to an engine as backward makes them, and ends the engine's steps.

    One thread at a time moves its state, so it needs no lock. The thread that runs backward calls the hooks, while the
    training thread waits for backward. The training thread calls everything else. While it waits in ``join``, a thread
    of ``join`` stands in for it.
    """

    _fl_engine: Engine | None
    _fl_connect: Callable[[Mapping[Tensor, str], bool], tuple[Engine | None, Timeline]]
    _fl_plan_anew: Callable[[Engine, Mapping[Tensor, str], str], None]
    _fl_replicas: Replicas
    _fl_enlist: Callable[[GradientReduction], ByName] | None = None
    # Whether a step may end with its backward at all; and whether ``fusionlayer.torch`` has made this optimizer.
    _fl_may_end_with_backward = True
    _fl_as_horovod = False
    # Raises ConfigError if something else averages gradients of these parameters.
    _fl_refuse_averaged: Callable[[Mapping[Tensor, str]], None] = staticmethod(refuse_averaged)
    _fl_restored: int | None = None
    """The step of this rank's own state that was loaded last."""

    def _attach(
        self,
        engine: Engine | None,
        timeline: Timeline,
        roster: Roster,
        names: dict[Tensor, str],
        passes_per_step: int,
        sparse_as_dense: bool,
        overlap_forward: nn.Module | None,
    ) -> None:
        self._fl_state = StepState.IDLE
        self._fl_engine = engine
        self._fl_roster = roster
        self._fl_names = names
        self._fl_passes = passes_per_step
        self._fl_passes_left = dict.fromkeys(names, passes_per_step)
        # How many parts of a gradient each backward computes, where it is not one, and has computed in this backward.
        self._fl_parts: dict[Tensor, int] = {}
        self._fl_computed: dict[Tensor, int] = {}
        self._fl_hooks: list[RemovableHandle] = []
        self._fl_new: list[Tensor] = []
        self._fl_sparse_as_dense = sparse_as_dense
        self._fl_sparse: SparseGradients | None = None
        self._fl_step_synchronizes = True
        self._fl_release: Callable[[], object] = _nothing
        self._fl_sent = sent_by(self)
        self._fl_overlap: ForwardOverlap | None = None
        self._fl_forward_of = overlap_forward
        self._fl_timeline = timeline
        self._fl_phases: StepPhases | None = None
        self._fl_check: ReplicaCheck | None = None
        # Gradients as they were handed over, until their results are there; then, if backward has waited for those, as
        # they are until ``step``. Of parameters that this rank has not used: zeros, or the sum of others.
        self._fl_given: dict[Tensor, _Given] = {}
        self._fl_reduced: dict[Tensor, _Given] = {}
        self._fl_unused: dict[Tensor, Tensor] = {}
        # Parameters whose results an earlier backward of this step has left in their gradients.
        self._fl_settled: frozenset[Tensor] = frozenset()
        self._fl_backward = NO_BACKWARD  # the one whose end is awaited
        may_end = self._fl_may_end_with_backward and not self._fl_as_horovod
        self._fl_ends_with_backward = may_end and overlap_forward is None
        self._fl_looked = False
        if engine is None:
            return
        self._fl_check = self._fl_replicas.check(engine.put, optimizer=self)
        self._fl_sparse = SparseGradients(engine, sparse_as_dense)
        if self._fl_enlist is not None:
            self._fl_sparse.by_name = self._fl_enlist(self)
        if timeline.enabled:
            self._fl_phases = StepPhases(engine, timeline)
        self._fl_watch(names)
        if self._fl_phases is not None:
            self._fl_hooks += self._fl_phases.watch()
        if overlap_forward is not None:
            self._fl_overlap = ForwardOverlap(engine, names, self._fl_update)
            self._fl_hooks += self._fl_overlap.watch(overlap_forward)
        self._fl_release = weakref.finalize(self, _release, engine, self._fl_hooks)
        self._fl_release.atexit = False
        with _live_lock:
            _live.add(self)

    def _fl_watch(self, parameters: Iterable[Tensor]) -> None:
        """Register the hooks by which the optimizer gets the gradients of parameters."""
        # The parameters live longer than the optimizer: their hooks must neither keep it alive nor outlive it.
        me = weakref.ref(self)
        self._fl_hooks += [p.register_post_accumulate_grad_hook(partial(self._fl_take, me)) for p in parameters]

    def _fl_count_anew(self) -> None:
        """Begin to count backward passes: of all parameters with hooks, also of those that are frozen now."""
        self._fl_passes_left = {p: self._fl_passes * self._fl_parts.get(p, 1) for p in self._fl_passes_left}

    @property
    def _fl_pending(self) -> bool:
        """Whether a step has begun to reduce gradients and has not ended."""
        engine = self._fl_engine
        if engine is None or engine.failure is not None:
            return False
        assert self._fl_sparse is not None
        return bool(engine.pending or self._fl_sparse.pending)

    @property
    def _fl_step_number(self) -> int:
        return 0 if self._fl_engine is None else self._fl_engine.step

    # ---- gradients: called by the hooks of parameters, on the thread that runs backward -----------------------------

    @staticmethod
    def _fl_take(optimizer: weakref.ref[GradientReduction], parameter: Tensor) -> None:
        """Count a gradient that backward has just accumulated; in the last pass of a step, hand it over.

        The hook of every parameter.
        """
        self = optimizer()
        if self is None:
            return  # it has ended
        engine = self._fl_engine
        assert engine is not None
        if engine.failure is not None:
            raise again(engine.failure)
        if engine.plan is None:
            self._fl_learn_parts(parameter)
        reduced = self._fl_reduced.get(parameter)
        if self._fl_passes_left[parameter] <= 0 or reduced is not None and reduced.is_next_of(parameter.grad):
            name = self._fl_roster.names[parameter]
            if not self._fl_reduced and is_nested():
                self._fl_refuse_part(parameter)
            if self._fl_reduced:
                self._fl_forget_results()  # this rank's gradient has been added to one of them
            raise UsageError(
                f"gradient {name!r} was computed more than {self._fl_passes} times before step(); call step() or "
                "synchronize() after each backward, or raise backward_passes_per_step to accumulate gradients locally"
            )
        if self._fl_reduced:
            self._fl_begin_again(engine)
        if self._fl_overlap is not None:
            self._fl_overlap.check_used(self._fl_roster.names[parameter])
        self._fl_passes_left[parameter] -= 1
        if self._fl_state is not StepState.REDUCING:
            self._fl_state = StepState.IDLE  # backward has added to the gradients, so they are no longer reduced ones
        if self._fl_passes_left[parameter] == 0:
            if self._fl_state is not StepState.REDUCING:
                self._fl_begin(engine)
            # Not there: it was unfrozen after the step began, which step() refuses, or has left the optimizer.
            if parameter in self._fl_given:
                # Another part was added to what was handed over.
                self._fl_given[parameter] = _Given.of(self._fl_given[parameter].gradient)
            elif parameter in self._fl_names:
                if self._fl_sent is not None:
                    self._fl_make_own(parameter)
                self._fl_hand_over(engine, parameter)
            if self._fl_ends_with_backward and self._fl_backward != running_backward():
                self._fl_await_end_of_backward()
        if self._fl_phases is not None:
            self._fl_phases.note_gradient()

    def _fl_learn_parts(self, parameter: Tensor) -> None:
        """Count how often one backward computes a gradient, while ranks have no plan and nothing is sent.

        A layer in several reentrant checkpoints gets a part of its gradient from each. In this step a part may still be
        added to what was handed over; from the next step on, the gradient is handed over with its last part.
        """
        if not self._fl_computed:
            at_end_of_backward(self._fl_computed.clear)
        times = self._fl_computed[parameter] = self._fl_computed.get(parameter, 0) + 1
        if times > self._fl_parts.get(parameter, 1):
            if self._fl_passes_left[parameter] <= 0:
                given = self._fl_given.get(parameter)
                if given is None or given.gradient is not parameter.grad or self._fl_sent is not None:
                    self._fl_refuse_part(parameter)
            self._fl_parts[parameter] = times
            self._fl_passes_left[parameter] += self._fl_passes

    def _fl_refuse_part(self, parameter: Tensor) -> NoReturn:
        raise UsageError(
            f"gradient {self._fl_roster.names[parameter]!r} was computed again after it had been sent: its layer is "
            "used in several reentrant checkpoints of one backward; give torch.utils.checkpoint.checkpoint "
            "use_reentrant=False"
        )

    def _fl_await_end_of_backward(self) -> None:
        """Have the step end with the backward that runs: then gradients are results when ``backward()`` returns.

        A parameter that has no gradient by then has not been used, unless another backward follows before ``step``.
        """
        if running_backward() != NO_BACKWARD:
            self._fl_backward = running_backward()
            at_end_of_backward(partial(_backward_ended, weakref.ref(self)))

    def _fl_end_with_backward(self) -> None:
        """Wait for the results of the step that backward has begun; the end of that backward calls it."""
        engine = self._fl_engine
        if engine is not None and self._fl_state is StepState.REDUCING and self._fl_ends_with_backward:
            if engine.failure is not None:
                raise again(engine.failure)
            with torch.no_grad():
                self._fl_reduced = self._fl_synchronize()

    def _fl_begin_again(self, engine: Engine) -> None:
        """Go on after a backward that has ended a step, without ``step`` in between.

        If results are still there, this is another backward of the same step, with other parameters. Then ranks agree
        that there is one, and from now on ``step`` ends all steps: which backward is the last one, it alone knows. If
        not, the results were cleared, and a new step begins.
        """
        reduced, self._fl_reduced = self._fl_reduced, {}
        self._fl_settled = frozenset(
            parameter for parameter, given in reduced.items() if given.is_still(parameter.grad)
        )
        if self._fl_settled:
            self._fl_ends_with_backward = False
            self._fl_plan_anew(engine, self._fl_names, "backward ran twice before step(), for different parameters")

    def _fl_follow_horovod(self) -> None:
        """Keep Horovod's contract: only ``step`` and ``synchronize`` wait, and unused parameters get zeros."""
        self._fl_as_horovod, self._fl_ends_with_backward = True, False

    def _fl_enlist_by(self, enlist: Callable[[GradientReduction], ByName]) -> None:
        """Use the operations by name that ``enlist`` makes, now and after each ``reconnect``."""
        self._fl_enlist = enlist
        if self._fl_sparse is not None:
            self._fl_sparse.by_name = enlist(self)

    def _fl_begin(self, engine: Engine) -> None:
        """Begin a step of the engine, before its first gradient, and tell ranks that have joined."""
        self._fl_refuse_later()
        groups = self.__dict__["param_groups"]
        if self._fl_roster.changed(groups):
            self._fl_enrol(engine, groups)
        if self._fl_sent is not None and self._fl_overlap is not None:
            self._fl_overlap.finish()  # the optimizer decides what it sends when its step is whole, on every rank
        if self._fl_sent is not None and (sent := sent_by(self)) != self._fl_sent:
            assert sent is not None
            self._fl_plan_anew(engine, self._fl_names, f"{type(self).__name__} now sends {sent[0]}")
            self._fl_sent = sent
        self._fl_state = StepState.REDUCING
        if self._fl_sparse is not None and self._fl_sparse.by_name is not None:
            self._fl_sparse.by_name.begin()

    def _fl_refuse_later(self) -> None:
        """Raise ``ConfigError``, in the first step, if the model came into DDP and the like after it was given here."""
        if not self._fl_looked:
            self._fl_refuse_averaged(self._fl_names)
            self._fl_looked = True

    def _fl_enrol(self, engine: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
        """Reduce from this step on what requires gradients now, by a new plan on which the ranks agree."""
        before, left = self._fl_names, self._fl_passes_left
        names = self._fl_roster.reduced(groups, self._fl_under_way)
        self._fl_replicas.add(self._fl_roster.by_name())
        if names.keys() == before.keys():
            return
        try:
            refuse_twice(names, but=self)
            self._fl_refuse_averaged(names)
            self._fl_plan_anew(engine, names, what_changed(before, names))
        except ConfigError:
            self._fl_roster.look_again = True  # or the next step would leave them out without a word
            raise
        new = [parameter for parameter in names if parameter not in left]
        self._fl_names = names
        left.update(dict.fromkeys(new, self._fl_passes))
        self._fl_new = new
        self._fl_watch(new)
        assert self._fl_sparse is not None
        self._fl_sparse.decide_anew()
        if self._fl_overlap is not None:
            assert self._fl_forward_of is not None
            self._fl_overlap.enrol(names)
            self._fl_hooks += self._fl_overlap.watch_forward(self._fl_forward_of, [names[each] for each in new])

    def _fl_under_way(self, parameter: Tensor) -> bool:
        """Return whether a parameter has something that is not reduced yet, though it may be frozen by now."""
        passes = self._fl_passes * self._fl_parts.get(parameter, 1)
        return self._fl_passes_left.get(parameter, passes) < passes

    def _fl_hand_over(self, engine: Engine, parameter: Tensor) -> None:
        """Start the reduction of a gradient: on the engine, or by name if its rows are gathered."""
        name, gradient, sparse = self._fl_names[parameter], parameter.grad, self._fl_sparse
        assert sparse is not None
        if not sparse.gathered and type(gradient) is Tensor and not gradient.is_sparse:
            engine.submit(name, gradient)  # the fast path, which nearly all gradients take
            self._fl_given[parameter] = _Given(gradient, gradient._version, gradient.data_ptr())
        elif not sparse.take(name, parameter):
            gradient = sparse.dense(name, parameter)
            engine.submit(name, local_part(gradient))
            self._fl_given[parameter] = _Given.of(gradient)

    def _fl_leave_unused(self, engine: Engine, parameter: Tensor) -> None:
        """Submit zeros for a parameter that this rank has not used; it gets no gradient unless another rank has."""
        zeros = torch.zeros_like(parameter, requires_grad=False)
        engine.submit_unused(self._fl_names[parameter], local_part(zeros))
        self._fl_unused[parameter] = zeros

    def _fl_refuse_changed(self, engine: Engine) -> dict[Tensor, _Given]:
        """Fail if a gradient is not what was handed over, but for the result that may have replaced its values.

        Returns what was handed over, by parameter.
        """
        given, self._fl_given = self._fl_given, {}
        for parameter, each in given.items():
            gradient = each.gradient
            # Written out, as it is looked at for each gradient of each step.
            same = parameter.grad is gradient and gradient._version == each.version
            if not same or type(gradient) is Tensor and gradient.data_ptr() != each.place:
                name = self._fl_roster.names.get(parameter)
                engine.fail(
                    UsageError(
                        f"gradient {name!r} was changed or replaced while it was being reduced: call synchronize() "
                        "before you clip, scale, clear or replace gradients, then step() within skip_synchronize(); a "
                        "hook that changes a parameter's gradient has to be registered before the optimizer is wrapped"
                    )
                )
            if gradient.requires_grad:
                # backward(create_graph=True) may have saved the values that the result has replaced.
                increment_version(gradient)
                given[parameter] = _Given.of(gradient)
        return given

    def _fl_assign_unused(self, engine: Engine) -> dict[Tensor, _Given]:
        """Let results be the gradients of parameters that only other ranks have used; return those.

        Called when results are taken. A parameter that no rank has used keeps what it owes.
        """
        mine, self._fl_unused = self._fl_unused, {}
        unused = engine.unused()
        engine.memory.restore(unused)
        assigned: dict[Tensor, _Given] = {}
        for parameter, result in mine.items():
            if self._fl_names[parameter] not in unused:
                parameter.grad = result
                assigned[parameter] = _Given.of(result)
        return assigned

    def _fl_make_own(self, parameter: Tensor) -> None:
        """Let the wrapped optimizer put what it sends in the place of a gradient."""
        state, self._fl_state = self._fl_state, StepState.UPDATING
        try:
            cast(SendsItsOwn, self).exchanged(parameter)
        finally:
            self._fl_state = state

    # ---- the end of a step: on the training thread, or on the thread of ``join`` that stands in for it --------------

    def _fl_stand_in(self) -> None:
        """Take part in a step of the other ranks, with zeros where this rank has no gradient; update nothing.

        A thread of ``join`` calls it after this rank has joined, while the training thread waits there. If backward had
        begun a step by then, this call ends that step.
        """
        engine, sparse, before = self._fl_engine, self._fl_sparse, self._fl_state
        assert engine is not None and sparse is not None
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        self._fl_flush()
        if before is not StepState.REDUCING:
            self._fl_begin(engine)
        gathered = sparse.agree()
        pending = engine.pending
        # In the first step, the order of arrival makes the plan. Backward makes gradients about from the last parameter
        # to the first, so zeros are submitted in that order too.
        for parameter, name in reversed(self._fl_names.items()):
            if name not in pending and name not in gathered:
                engine.submit(name, local_part(torch.zeros_like(parameter)))
        gathers = sparse.end()
        engine.end_step()
        if self._fl_check is not None:
            self._fl_check.begin(present=False)
        engine.take_all()
        for wait in gathers.values():
            wait()
        if self._fl_check is not None:
            self._fl_check.settle()
        self._fl_state = StepState.IDLE if before is StepState.REDUCING else before
        self._fl_count_anew()

    def _fl_synchronize(self) -> dict[Tensor, _Given]:
        """End the engine's step and put its results into the gradients, unless they are there already; return those."""
        engine, sparse = self._fl_engine, self._fl_sparse
        if engine is None or sparse is None or self._fl_state in WITH_RESULTS:
            return {}
        self._fl_submit_rest(engine, sparse)
        gathers = sparse.end()
        self._fl_end_step(engine)
        if self._fl_overlap is not None:
            changed = self._fl_refuse_changed(engine)
            self._fl_overlap.deliver()
        else:
            engine.take_all()
            changed = {**self._fl_refuse_changed(engine), **self._fl_assign_unused(engine)}
        for parameter, wait in gathers.items():
            parameter.grad = wait()
        if isinstance(self, SparseAdam):
            sparse.make_sparse(self._fl_names)
        self._fl_state = StepState.REDUCED
        if self._fl_check is not None:
            self._fl_check.settle()
        return changed

    def _fl_submit_rest(self, engine: Engine, sparse: SparseGradients) -> None:
        """Submit every gradient that backward did not make, as zeros: other ranks may have gradients there."""
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        if self._fl_overlap is not None:
            self._fl_overlap.flush()
        if self._fl_state is not StepState.REDUCING:
            self._fl_begin(engine)
        self._fl_roster.refuse_unreduced(self.__dict__["param_groups"])
        submitted = engine.pending
        new, self._fl_new = self._fl_new, []
        for parameter in new if sparse.gathered is None else ():
            name = self._fl_names[parameter]
            if name not in submitted:
                sparse.take(name, parameter)  # a new hook may have come too late to note a sparse gradient
        sparse.agree()
        finds_unused = self._fl_finds_unused
        for parameter, name in self._fl_names.items():
            if name not in submitted and parameter not in sparse.under_way:
                settled = parameter in self._fl_settled
                if self._fl_sent is not None and not settled:
                    self._fl_make_own(parameter)
                if finds_unused and (settled or parameter.grad is None):
                    self._fl_leave_unused(engine, parameter)
                else:
                    self._fl_hand_over(engine, parameter)
        self._fl_settled = frozenset()
        self._fl_state = StepState.IDLE
        self._fl_count_anew()

    @property
    def _fl_finds_unused(self) -> bool:
        """Whether ranks find out which parameters none of them has used; those are not updated."""
        return not self._fl_as_horovod

    def _fl_refuse_unreduced(self) -> None:
        """Raise ``UsageError`` if a parameter of the optimizer has a gradient that this step does not reduce."""
        if self._fl_engine is not None:
            self._fl_roster.refuse_unreduced(self.__dict__["param_groups"])

    def _fl_end_step(self, engine: Engine) -> None:
        """End the engine's step, and begin to compare parameters, which nothing changes now."""
        engine.end_step(self._fl_finds_unused)
        if self._fl_check is not None:
            self._fl_check.begin()

    def _fl_update(self, groups: list[dict[str, Any]]) -> None:
        """Take the wrapped optimizer's step with the parameter groups of one bucket; ``ForwardOverlap`` calls it.

        Backward of the next step may have begun, so the state of before comes back afterwards.
        """
        own, state = self.__dict__["param_groups"], self._fl_state
        self.__dict__["param_groups"] = groups
        self._fl_state = StepState.UPDATING
        try:
            with self._fl_timeline.span("UPDATE", step=self._fl_step_number - 1):
                super().step()
        finally:
            self.__dict__["param_groups"] = own
            self._fl_state = state

    def _fl_detach(self) -> None:
        with _live_lock:
            _live.discard(self)
        try:
            self._fl_release()
        finally:
            self._fl_engine = self._fl_sparse = self._fl_overlap = self._fl_check = None

    def _fl_flush(self) -> None:
        """Make the updates that wait for the next forward, unless a newer backward has already made gradients."""
        if self._fl_overlap is not None and self._fl_state is StepState.STEPPED:
            self._fl_overlap.flush()
        if self._fl_check is not None:
            self._fl_check.finish()

    def _fl_leave(self) -> None:
        """Let what is under way end, before this rank leaves the job."""
        self._fl_flush()

    def _fl_forget_results(self) -> None:
        """Note that the gradients no longer hold reduced values."""
        self._fl_reduced = {}
        if self._fl_state in WITH_RESULTS:
            self._fl_state = StepState.IDLE


class _Given(NamedTuple):
    """A gradient with its version, which each change of its values raises, and the place of its memory."""

    gradient: Tensor
    version: int
    place: int

    @classmethod
    def of(cls, gradient: Tensor) -> _Given:
        return cls(gradient, gradient._version, gradient.data_ptr() if type(gradient) is Tensor else 0)

    def is_still(self, gradient: Tensor | None) -> bool:
        """Return whether ``gradient`` is this one, unchanged."""
        return gradient is self.gradient and _Given.of(gradient)[1:] == self[1:]

    def is_next_of(self, gradient: Tensor | None) -> bool:
        """Return whether ``gradient`` is this one, changed once since."""
        return gradient is self.gradient and gradient._version == self.version + 1


def _backward_ended(optimizer: weakref.ref[GradientReduction]) -> None:
    self = optimizer()
    if self is not None:
        self._fl_end_with_backward()


_live: weakref.WeakSet[GradientReduction] = weakref.WeakSet()
# Guards _live: optimizers are made and closed on any thread, and shutdown looks at all of them.
_live_lock = threading.Lock()


def _nothing() -> None:
    """Release nothing: an optimizer in a job of one rank has no engine and no hooks."""


def _release(engine: Engine, hooks: Sequence[RemovableHandle]) -> None:
    """Remove an optimizer's hooks and close its engine."""
    for hook in hooks:
        hook.remove()
    engine.close()


def _leave_all() -> None:
    """Let what optimizers have under way end: to get results, other ranks need this rank's part."""
    with _live_lock:
        optimizers = list(_live)
    for optimizer in optimizers:
        optimizer._fl_leave()


context.before_shutdown(_leave_all)


def refuse_twice(names: Mapping[Tensor, str], but: GradientReduction | None = None) -> None:
    """Raise ``ConfigError`` if a distributed optimizer that is not closed, ``but`` one, has one of the parameters."""
    with _live_lock:
        others = [other for other in _live if other is not but]
    for other in others:
        for parameter, name in names.items():
            if parameter in other._fl_names:
                raise ConfigError(
                    f"parameter {name!r} belongs to a DistributedOptimizer already and would be reduced twice; close() "
                    "that one first"
                )
