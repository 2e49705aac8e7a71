"""Takes an optimizer's gradients through the engine: hooks hand them over, and the end of a step puts results back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SparseAdam
from torch.utils.hooks import RemovableHandle

from ..observe.timeline import Timeline
from ..scheduler import Engine
from . import live
from .backward_end import NO_BACKWARD
from .enrolment import Roster
from .given import Given
from .gradient_hooks import GradientHooks
from .overlap import ForwardOverlap
from .parameters import local_part
from .phases import StepPhases
from .replicas import ReplicaCheck
from .sends import sent_by
from .sparse import ByName, SparseGradients
from .step_state import WITH_RESULTS, StepState

__all__ = ["GradientReduction"]


class GradientReduction(GradientHooks):
    """Hands gradients to an engine as backward makes them, and ends the engine's steps.

    One thread at a time moves its state, so it needs no lock. The thread that runs backward calls the hooks, while the
    training thread waits for backward. The training thread calls everything else. While it waits in ``join``, a thread
    of ``join`` stands in for it.
    """

    _fl_connect: Callable[[Mapping[Tensor, str], bool], tuple[Engine | None, Timeline]]
    _fl_enlist: Callable[[GradientReduction], ByName] | None = None
    # Whether a step may end with its backward at all; and whether ``fusionlayer.torch`` has made this optimizer.
    _fl_may_end_with_backward = True
    _fl_as_horovod = False
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
        self._fl_parts, self._fl_computed = {}, {}
        self._fl_hooks, self._fl_new = [], []
        self._fl_sparse_as_dense = sparse_as_dense
        self._fl_sparse = None
        self._fl_step_synchronizes = True
        self._fl_release: Callable[[], object] = _nothing
        self._fl_sent = sent_by(self)
        self._fl_overlap = None
        self._fl_forward_of = overlap_forward
        self._fl_timeline = timeline
        self._fl_phases = None
        self._fl_check: ReplicaCheck | None = None
        self._fl_given, self._fl_reduced, self._fl_unused = {}, {}, {}
        self._fl_settled = frozenset()
        self._fl_backward = NO_BACKWARD
        # Whether ranks find out which parameters none of them has used; those are not updated.
        self._fl_finds_unused = not self._fl_as_horovod
        may_end = self._fl_may_end_with_backward and self._fl_finds_unused
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
        live.enlist(self)

    def _fl_follow_horovod(self) -> None:
        """Keep Horovod's contract: only ``step`` and ``synchronize`` wait, and unused parameters get zeros."""
        self._fl_as_horovod, self._fl_finds_unused, self._fl_ends_with_backward = True, False, False

    def _fl_enlist_by(self, enlist: Callable[[GradientReduction], ByName]) -> None:
        """Use the operations by name that ``enlist`` makes, now and after each ``reconnect``."""
        self._fl_enlist = enlist
        if self._fl_sparse is not None:
            self._fl_sparse.by_name = enlist(self)

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

    def _fl_synchronize(self) -> dict[Tensor, Given]:
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
        for parameter, name in self._fl_names.items():
            if name not in submitted and parameter not in sparse.under_way:
                settled = parameter in self._fl_settled
                if self._fl_sent is not None and not settled:
                    self._fl_make_own(parameter)
                if self._fl_finds_unused and (settled or parameter.grad is None):
                    self._fl_leave_unused(engine, parameter)
                else:
                    self._fl_hand_over(engine, parameter)
        self._fl_settled = frozenset()
        self._fl_state = StepState.IDLE
        self._fl_count_anew()

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
        live.forget(self)
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


def _nothing() -> None:
    """Release nothing: an optimizer in a job of one rank has no engine and no hooks."""


def _release(engine: Engine, hooks: Sequence[RemovableHandle]) -> None:
    """Remove an optimizer's hooks and close its engine."""
    for hook in hooks:
        hook.remove()
    engine.close()
