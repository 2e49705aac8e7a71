"""What a rank does that has joined (``hvd.join``), and whose training thread waits: it takes part in others' steps."""

from __future__ import annotations

import torch

from .parameters import local_part
from .reducer import Reducer
from .step_state import StepState

__all__ = ["stand_in"]


def stand_in(reducer: Reducer) -> None:
    """Take part in a step of the other ranks, with zeros where this rank has no gradient; update nothing.

    A thread of ``join`` calls it after this rank has joined, while the training thread waits there. If backward had
    begun a step by then, this call ends that step.
    """
    engine, sparse, before = reducer.engine, reducer.sparse, reducer.state
    assert engine is not None and sparse is not None
    if reducer.phases is not None:
        reducer.phases.end_backward()
    reducer.flush()
    if before is not StepState.REDUCING:
        reducer.begin()
    gathered = sparse.agree()
    pending = engine.pending
    # In the first step, the order of arrival makes the plan. Backward makes gradients about from the last parameter
    # to the first, so zeros are submitted in that order too.
    for parameter, name in reversed(reducer.names.items()):
        if name not in pending and name not in gathered:
            engine.submit(name, local_part(torch.zeros_like(parameter)))
    gathers = sparse.end()
    engine.end_step()
    if reducer.check is not None:
        reducer.check.begin(present=False)
    engine.take_all()
    for wait in gathers.values():
        wait()
    if reducer.check is not None:
        reducer.check.settle()
    reducer.given = {}
    reducer.state = StepState.IDLE if before is StepState.REDUCING else before
    reducer.passes.left.update(reducer.passes.whole)
