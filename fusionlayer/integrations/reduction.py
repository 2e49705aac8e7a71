"""Gradients of an optimizer on their way through the engine: the hooks that hand them over, and the end of a step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import context
from ..errors import ConfigError, UsageError
from ..scheduler import Engine
from ..timeline import Timeline
from .overlap import ForwardOverlap
from .parameters import local_part
from .phases import StepPhases
from .sparse import ByName, SparseGradients

__all__ = ["WITH_RESULTS", "GradientReduction", "StepState", "refuse_twice"]


class StepState(Enum):
    """Where an optimizer's step is, as the training thread has brought it there.

    A failure is no state: the engine keeps it and raises it again, whatever is called.
    """

    IDLE = auto()
    """The engine has no gradient of the next step: at first, after ``step``, or while backward accumulates locally."""
    REDUCING = auto()
    """A hook has handed over the step's first gradient: every rank has to end this step; ``zero_grad`` is refused."""
    REDUCED = auto()
    """The gradients are the reduced ones: a closure, or who read ``param_groups``, has ended the engine's step."""
    SYNCHRONIZED = auto()
    """The same, by the user's ``synchronize``: ``step`` warns outside ``skip_synchronize``."""
    STEPPED = auto()
    """With ``overlap_forward``: ``step`` has returned, and the next forward updates parameters as results come."""
    UPDATING = auto()
    """With ``overlap_forward``: ``param_groups`` are those of the one bucket that is being updated. The state that was
    before, which may be any, comes back after it."""


WITH_RESULTS = (StepState.REDUCED, StepState.SYNCHRONIZED)


class GradientReduction(Optimizer):
    """Hands gradients to an engine as backward makes them, and ends the engine's steps.

    One thread at a time moves its state, so it needs no lock. The thread that runs backward calls the hooks, while the
    training thread waits for backward. The training thread calls everything else. While it waits in ``join``, a thread
    of ``join`` stands in for it.
    """

    _fl_engine: Engine | None
    _fl_connect: Callable[[], tuple[Engine | None, Timeline]]
    _fl_enlist: Callable[[GradientReduction], ByName] | None = None

    def _attach(
        self,
        engine: Engine | None,
        timeline: Timeline,
        names: dict[Tensor, str],
        passes_per_step: int,
        sparse_as_dense: bool,
        overlap_forward: nn.Module | None,
    ) -> None:
        self._fl_state = StepState.IDLE
        self._fl_engine = engine
        self._fl_names = names
        self._fl_passes = passes_per_step
        self._fl_passes_left = dict.fromkeys(names, passes_per_step)
        self._fl_sparse_as_dense = sparse_as_dense
        self._fl_sparse: SparseGradients | None = None
        self._fl_step_synchronizes = True
        self._fl_release: Callable[[], object] = _nothing
        self._fl_overlap: ForwardOverlap | None = None
        self._fl_forward_of = overlap_forward
        self._fl_timeline = timeline
        self._fl_phases: StepPhases | None = None
        if engine is None:
            return
        self._fl_sparse = SparseGradients(engine, sparse_as_dense)
        if self._fl_enlist is not None:
            self._fl_sparse.by_name = self._fl_enlist(self)
        if timeline.enabled:
            self._fl_phases = StepPhases(engine, timeline)
        # The parameters live longer than the optimizer: their hooks must neither keep it alive nor outlive it.
        me = weakref.ref(self)
        hooks = [p.register_post_accumulate_grad_hook(partial(_take, me)) for p in names]
        if self._fl_phases is not None:
            hooks += self._fl_phases.watch()
        if overlap_forward is not None:
            self._fl_overlap = ForwardOverlap(engine, names, self._fl_update)
            hooks += self._fl_overlap.watch(overlap_forward)
        self._fl_release = weakref.finalize(self, _release, engine, hooks)
        self._fl_release.atexit = False
        with _live_lock:
            _live.add(self)

    @property
    def _fl_pending(self) -> bool:
        """Whether gradients are being reduced, in a step that has not ended."""
        engine = self._fl_engine
        if engine is None or engine.failure is not None:
            return False
        assert self._fl_sparse is not None
        return bool(engine.pending or self._fl_sparse.pending)

    @property
    def _fl_step_number(self) -> int:
        return 0 if self._fl_engine is None else self._fl_engine.step

    # ---- gradients: called by the hooks of parameters, on the thread that runs backward -----------------------------

    def _fl_take(self, parameter: Tensor) -> None:
        """Hand over a gradient that backward has just accumulated, in the last pass of a step."""
        engine = self._fl_engine
        assert engine is not None
        if engine.failure is not None:
            raise engine.failure
        if self._fl_passes_left[parameter] <= 0:
            raise UsageError(
                f"gradient {self._fl_names[parameter]!r} was computed more than {self._fl_passes} times before step(); "
                "call step() or synchronize() after each backward, or raise backward_passes_per_step to accumulate "
                "gradients locally"
            )
        if self._fl_overlap is not None:
            self._fl_overlap.check_used(self._fl_names[parameter])
        self._fl_passes_left[parameter] -= 1
        if self._fl_state is not StepState.REDUCING:
            self._fl_state = StepState.IDLE  # what was reduced before is not what the gradients hold now
        if self._fl_passes_left[parameter] == 0:
            if self._fl_state is not StepState.REDUCING:
                self._fl_begin()
            self._fl_hand_over(engine, parameter)
        if self._fl_phases is not None:
            self._fl_phases.note_gradient()

    def _fl_enlist_by(self, enlist: Callable[[GradientReduction], ByName]) -> None:
        """Use operations by name, which ``enlist`` makes, now and after each ``reconnect``."""
        self._fl_enlist = enlist
        if self._fl_sparse is not None:
            self._fl_sparse.by_name = enlist(self)

    def _fl_begin(self) -> None:
        """Begin a step of the engine with its first gradient; ranks that have joined are told."""
        self._fl_state = StepState.REDUCING
        if self._fl_sparse is not None and self._fl_sparse.by_name is not None:
            self._fl_sparse.by_name.begin()

    def _fl_hand_over(self, engine: Engine, parameter: Tensor) -> None:
        """Have a gradient reduced: by the engine, or if it is one of the sparse ones by name."""
        name, gradient, sparse = self._fl_names[parameter], parameter.grad, self._fl_sparse
        assert sparse is not None
        if not sparse.gathered and type(gradient) is Tensor and not gradient.is_sparse:
            engine.submit(name, gradient)  # what nearly all are, and quickly
        elif not sparse.take(name, parameter):
            engine.submit(name, local_part(sparse.dense(name, parameter)))

    # ---- the end of a step: on the training thread, or on the one that stands in for it -----------------------------

    def _fl_stand_in(self) -> None:
        """Take part in a step of the other ranks with zeros where this rank has no gradient; it updates nothing.

        Called after this rank has joined, on a thread of ``join``, while the training thread waits there. If backward
        had begun a step by then, this is that step.
        """
        engine, sparse, before = self._fl_engine, self._fl_sparse, self._fl_state
        assert engine is not None and sparse is not None
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        self._fl_flush()
        if before is not StepState.REDUCING:
            self._fl_begin()
        gathered = sparse.agree()
        pending = engine.pending
        # The first step's order of arrival makes the plan: from the back is what backward would come close to.
        for parameter, name in reversed(self._fl_names.items()):
            if name not in pending and name not in gathered:
                engine.submit(name, local_part(torch.zeros_like(parameter)))
        gathers = sparse.end()
        engine.end_step()
        for index in sorted(engine.untaken):
            engine.take(index)
        for wait in gathers.values():
            wait()
        self._fl_state = StepState.IDLE if before is StepState.REDUCING else before
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)

    def _fl_synchronize(self) -> None:
        """End the step of the engine and bring its results into the gradients, unless they are there already."""
        engine, sparse = self._fl_engine, self._fl_sparse
        if engine is None or sparse is None or self._fl_state in WITH_RESULTS:
            return
        self._fl_submit_rest(engine, sparse)
        gathers = sparse.end()
        if self._fl_overlap is not None:
            engine.end_step()
            self._fl_overlap.deliver()
        else:
            engine.synchronize()
        for parameter, wait in gathers.items():
            parameter.grad = wait()
        self._fl_state = StepState.REDUCED

    def _fl_submit_rest(self, engine: Engine, sparse: SparseGradients) -> None:
        """Submit what backward has not, as zeros: other ranks may have gradients there."""
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        if self._fl_overlap is not None:
            self._fl_overlap.flush()
        if self._fl_state is not StepState.REDUCING:
            self._fl_begin()
        sparse.agree()
        submitted = engine.pending
        for parameter, name in self._fl_names.items():
            if name not in submitted and parameter not in sparse.under_way:
                self._fl_hand_over(engine, parameter)
        self._fl_state = StepState.IDLE
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)

    def _fl_update(self, groups: list[dict[str, Any]]) -> None:
        """Take the step of the wrapped optimizer with other parameter groups; ``ForwardOverlap`` calls it.

        Backward of the next step may have begun: the state is put back afterwards.
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
        self._fl_release()
        self._fl_engine = self._fl_sparse = self._fl_overlap = None

    def _fl_flush(self) -> None:
        """Make the updates that wait for the next forward, if that has not begun to make new gradients."""
        if self._fl_overlap is not None and self._fl_state is StepState.STEPPED:
            self._fl_overlap.flush()

    def _fl_forget_results(self) -> None:
        """The gradients no longer hold what was reduced."""
        if self._fl_state in WITH_RESULTS:
            self._fl_state = StepState.IDLE


_live: weakref.WeakSet[GradientReduction] = weakref.WeakSet()
# Guards _live: optimizers are made and closed on any thread, and shutdown looks at all of them.
_live_lock = threading.Lock()


def _nothing() -> None:
    """Release what a job of one rank holds."""


def _take(optimizer: weakref.ref[GradientReduction], parameter: Tensor) -> None:
    """Be the hook of a parameter."""
    alive = optimizer()
    if alive is not None:
        alive._fl_take(parameter)


def _release(engine: Engine, hooks: Sequence[RemovableHandle]) -> None:
    """End what an optimizer has started."""
    for hook in hooks:
        hook.remove()
    engine.close()


def _flush_all() -> None:
    """Make the updates that are still to be made: other ranks need this one's part of them."""
    with _live_lock:
        optimizers = list(_live)
    for optimizer in optimizers:
        optimizer._fl_flush()


context.before_shutdown(_flush_all)


def refuse_twice(names: Mapping[Tensor, str]) -> None:
    """Raise ``ConfigError`` if a parameter belongs to another distributed optimizer that is not closed."""
    with _live_lock:
        others = list(_live)
    for other in others:
        for parameter, name in names.items():
            if parameter in other._fl_names:
                raise ConfigError(
                    f"parameter {name!r} belongs to a DistributedOptimizer already and would be reduced twice; close() "
                    "that one first"
                )
