"""The hook of every parameter: submits gradients as backward makes them, and ends the step with that backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.errors import TransportError, again
from .backward_end import NO_BACKWARD, call_at_outermost, current_node, is_nested, queue_callback, running_backward
from .passes import computed_again, computed_too_often
from .reducer import Reducer
from .snapshots import is_still, snapshot
from .step_state import StepState


def take(me: Callable[[], Any], parameter: Tensor) -> None:
    """Count a gradient that backward has just accumulated; in the last pass of a step, submit it.

    The hook of every parameter: nearly all gradients take no other call than that of ``Engine.submit``.
    """
    optimizer = me()
    if optimizer is None:
        return  # it has ended
    reducer: Reducer = optimizer.reducer
    engine, sparse, left = reducer.engine, reducer.sparse, reducer.passes.left
    assert engine is not None and sparse is not None
    try:
        if engine.failure is not None:
            raise again(engine.failure)
        if reducer.learns:
            _learn_parts(reducer, parameter)
        if reducer.results or left[parameter] <= 0:
            _check_pass(reducer, parameter)
        if reducer.overlap is not None:
            reducer.overlap.check_used(reducer.enrolment.names[parameter])
        left[parameter] -= 1
        last = left[parameter] == 0
        if reducer.state is not StepState.REDUCING:
            reducer.state = StepState.IDLE  # backward has added to the gradients, so they are no longer reduced ones
            if last:
                reducer.begin()
        # Not there: it was unfrozen after the step began, which step() refuses, or has left the optimizer.
        if last and parameter in reducer.names:
            gradient = parameter.grad
            if reducer.policy.contribution is not None or sparse.gathered or parameter in reducer.given:
                _submit_unusual(reducer, parameter)
            elif type(gradient) is not Tensor or gradient.is_sparse:
                reducer.submit(parameter)
            else:
                engine.submit(reducer.names[parameter], gradient)
                reducer.given[parameter] = gradient, gradient._version, gradient.data_ptr()
        if last and reducer.ends_with_backward and reducer.awaited != running_backward() != NO_BACKWARD:
            reducer.awaited = running_backward()
            queue_callback(partial(_end_backward, me))
        if reducer.phases is not None:
            reducer.phases.note_gradient()
    except TransportError as error:
        if not reducer.policy.recover(error):
            raise


def _end_backward(me: Callable[[], Any]) -> None:
    """Wait for the results of the step that backward has begun, so that gradients are results when it returns.

    A parameter that has no gradient by now has not been used, unless another backward follows before ``step``.
    """
    if current_node() is not None:
        call_at_outermost(partial(_end_backward, me))
        return
    optimizer = me()
    if optimizer is None or optimizer.reducer.engine is None:
        return
    reducer: Reducer = optimizer.reducer
    if reducer.ends_with_backward and reducer.state is StepState.REDUCING:
        assert reducer.engine is not None
        if reducer.engine.failure is not None:
            raise again(reducer.engine.failure)
        with torch.no_grad():
            reducer.results = reducer.reduce()


def _learn_parts(reducer: Reducer, parameter: Tensor) -> None:
    """Count how often one backward computes a gradient, while ranks have no plan and nothing is sent.

    This step may still add a part to the submitted gradient; from the next step on, the gradient is submitted with its
    last part.
    """
    if reducer.passes.note_part(parameter):
        if reducer.passes.left[parameter] <= 0:
            given = reducer.given.get(parameter)
            if given is None or given[0] is not parameter.grad or reducer.policy.contribution is not None:
                raise computed_again(reducer.enrolment.names[parameter])
        reducer.passes.add_part(parameter)


def _check_pass(reducer: Reducer, parameter: Tensor) -> None:
    """Refuse a gradient that is computed too often; else continue after a backward that has ended a step.

    If results of that are still there, this is another backward of the same step, with other parameters. Then ranks
    agree that there is one, and from now on ``step`` ends all steps, because only ``step`` knows the last backward. If
    not, the results were cleared, and a new step begins.
    """
    name, results = reducer.enrolment.names[parameter], reducer.results
    if reducer.passes.left[parameter] <= 0 and not results and is_nested():
        raise computed_again(name)
    before, gradient = results.get(parameter), parameter.grad
    changed_once = before is not None and before[0] is gradient and gradient._version == before[1] + 1
    if reducer.passes.left[parameter] <= 0 or changed_once:
        if results:
            reducer.forget_results()  # this rank's gradient has been added to one of them
        raise computed_too_often(name, reducer.passes.per_step)
    reducer.results = {}
    reducer.settled = frozenset(p for p, before in results.items() if is_still(before, p.grad))
    if reducer.settled:
        reducer.ends_with_backward = False
        reducer.plan_anew(reducer.names, "backward ran twice before step(), for different parameters")


def _submit_unusual(reducer: Reducer, parameter: Tensor) -> None:
    """Submit a complete gradient of an optimizer that sends its own, or that gathers some; note a further part."""
    if parameter in reducer.given:
        reducer.given[parameter] = snapshot(reducer.given[parameter][0])  # another part was added to what was submitted
        return
    if reducer.policy.contribution is not None:
        reducer.contribute(parameter)
    reducer.submit(parameter)
