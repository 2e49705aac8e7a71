"""What hooks of parameters do: they hand gradients over as backward makes them, and refuse those that change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..base.errors import ConfigError, UsageError, again
from ..scheduler import Engine
from . import live
from .averaging import refuse_averaged
from .backward_end import NO_BACKWARD, at_end_of_backward, is_nested, running_backward
from .enrolment import Roster, what_changed
from .given import Given
from .overlap import ForwardOverlap
from .parameters import local_part
from .phases import StepPhases
from .replicas import Replicas
from .sends import SendsItsOwn, Sent, sent_by
from .sparse import SparseGradients
from .step_state import StepState

__all__ = ["GradientHooks"]


class GradientHooks(Optimizer):
    """The part of ``GradientReduction`` that runs within backward, on its thread."""

    _fl_engine: Engine | None
    _fl_plan_anew: Callable[[Engine, Mapping[Tensor, str], str], None]
    _fl_replicas: Replicas
    _fl_roster: Roster
    _fl_names: dict[Tensor, str]
    _fl_state: StepState
    _fl_hooks: list[RemovableHandle]
    _fl_new: list[Tensor]
    _fl_sparse: SparseGradients | None
    _fl_overlap: ForwardOverlap | None
    _fl_forward_of: nn.Module | None
    _fl_phases: StepPhases | None
    _fl_sent: Sent | None
    _fl_looked: bool
    _fl_ends_with_backward: bool
    _fl_backward: int
    """The backward whose end is awaited."""
    _fl_passes: int
    _fl_passes_left: dict[Tensor, int]
    _fl_parts: dict[Tensor, int]
    """How many parts of a gradient each backward computes, where it is not one."""
    _fl_computed: dict[Tensor, int]
    """How many parts the running backward has computed."""
    _fl_given: dict[Tensor, Given]
    """Gradients as they were handed over, until their results are there."""
    _fl_reduced: dict[Tensor, Given]
    """Gradients as they are until ``step``, where backward has waited for the results."""
    _fl_unused: dict[Tensor, Tensor]
    """Of parameters that this rank has not used: zeros, or the sum of others."""
    _fl_settled: frozenset[Tensor]
    """Parameters whose results an earlier backward of this step has left in their gradients."""
    # Raises ConfigError if something else averages gradients of these parameters.
    _fl_refuse_averaged: Callable[[Mapping[Tensor, str]], None] = staticmethod(refuse_averaged)

    def _fl_synchronize(self) -> dict[Tensor, Given]:
        """End the engine's step; ``GradientReduction`` says how."""
        raise NotImplementedError

    def _fl_forget_results(self) -> None:
        """Note that the gradients no longer hold reduced values."""
        raise NotImplementedError

    def _fl_watch(self, parameters: Iterable[Tensor]) -> None:
        """Register the hooks by which the optimizer gets the gradients of parameters."""
        # The parameters live longer than the optimizer: their hooks must neither keep it alive nor outlive it.
        me = weakref.ref(self)
        self._fl_hooks += [p.register_post_accumulate_grad_hook(partial(self._fl_take, me)) for p in parameters]

    def _fl_count_anew(self) -> None:
        """Begin to count backward passes: of all parameters with hooks, also of those that are frozen now."""
        self._fl_passes_left = {p: self._fl_passes * self._fl_parts.get(p, 1) for p in self._fl_passes_left}

    @staticmethod
    def _fl_take(optimizer: weakref.ref[GradientHooks], parameter: Tensor) -> None:
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
        if self._fl_passes_left[parameter] <= 0:
            self._fl_refuse_pass(parameter)
        if self._fl_reduced:
            reduced = self._fl_reduced.get(parameter)
            if reduced is not None and reduced.is_next_of(parameter.grad):
                self._fl_refuse_pass(parameter)
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
                self._fl_given[parameter] = Given.of(self._fl_given[parameter].gradient)
            elif parameter in self._fl_names:
                if self._fl_sent is not None:
                    self._fl_make_own(parameter)
                self._fl_hand_over(engine, parameter)
            if self._fl_ends_with_backward and self._fl_backward != running_backward():
                self._fl_await_end_of_backward()
        if self._fl_phases is not None:
            self._fl_phases.note_gradient()

    def _fl_refuse_pass(self, parameter: Tensor) -> NoReturn:
        if not self._fl_reduced and is_nested():
            self._fl_refuse_part(parameter)
        if self._fl_reduced:
            self._fl_forget_results()  # this rank's gradient has been added to one of them
        raise UsageError(
            f"gradient {self._fl_roster.names[parameter]!r} was computed more than {self._fl_passes} times before "
            "step(); call step() or synchronize() after each backward, or raise backward_passes_per_step to accumulate "
            "gradients locally"
        )

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
            at_end_of_backward(partial(self._fl_end_with_backward, weakref.ref(self)))

    @staticmethod
    def _fl_end_with_backward(optimizer: weakref.ref[GradientHooks]) -> None:
        """Wait for the results of the step that backward has begun; the end of that backward calls it."""
        self = optimizer()
        if self is None or self._fl_engine is None or not self._fl_ends_with_backward:
            return
        if self._fl_state is StepState.REDUCING:
            if self._fl_engine.failure is not None:
                raise again(self._fl_engine.failure)
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

    def _fl_begin(self, engine: Engine) -> None:
        """Begin a step of the engine, before its first gradient, and tell ranks that have joined."""
        if not self._fl_looked:
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
            live.refuse_twice(names, but=self)
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
            self._fl_given[parameter] = Given(gradient, gradient._version, gradient.data_ptr())
        elif not sparse.take(name, parameter):
            gradient = sparse.dense(name, parameter)
            engine.submit(name, local_part(gradient))
            self._fl_given[parameter] = Given.of(gradient)

    def _fl_leave_unused(self, engine: Engine, parameter: Tensor) -> None:
        """Submit zeros for a parameter that this rank has not used; it gets no gradient unless another rank has."""
        zeros = torch.zeros_like(parameter, requires_grad=False)
        engine.submit_unused(self._fl_names[parameter], local_part(zeros))
        self._fl_unused[parameter] = zeros

    def _fl_refuse_changed(self, engine: Engine) -> dict[Tensor, Given]:
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
                given[parameter] = Given.of(gradient)
        return given

    def _fl_assign_unused(self, engine: Engine) -> dict[Tensor, Given]:
        """Let results be the gradients of parameters that only other ranks have used; return those.

        Called when results are taken. A parameter that no rank has used keeps what it owes.
        """
        mine, self._fl_unused = self._fl_unused, {}
        unused = engine.unused()
        if unused:
            engine.memory.restore(unused)
        assigned: dict[Tensor, Given] = {}
        for parameter, result in mine.items():
            if self._fl_names[parameter] not in unused:
                parameter.grad = result
                assigned[parameter] = Given.of(result)
        return assigned

    def _fl_make_own(self, parameter: Tensor) -> None:
        """Let the wrapped optimizer put what it sends in the place of a gradient."""
        state, self._fl_state = self._fl_state, StepState.UPDATING
        try:
            cast(SendsItsOwn, self).exchanged(parameter)
        finally:
            self._fl_state = state
