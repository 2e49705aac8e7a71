"""Calls a function at the end of the backward that runs, as DDP's reducer does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch

NO_BACKWARD = -1
"""Stands for the number of the running backward while none runs."""


running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs on this thread, which no other has; ``NO_BACKWARD`` if none does."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function at the end of the backward that runs on this thread, which may be one within another."""


current_node: Callable[[], torch.autograd.graph.Node | None] = torch._C._current_autograd_node
"""Returns the node of a backward that runs on this thread, with its hooks; at the end of backward none does."""


def is_nested() -> bool:
    """Return whether the backward that runs was called by a node of another, as reentrant checkpointing does.

    It walks the stack, so it is not for every gradient of every step.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _NODE:
        frame = frame.f_back
    return frame is not None


_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
"""The method with which torch runs nodes written in Python."""


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call ``function`` once all gradients of the outermost backward are there, before ``backward()`` returns.

    Call this from a hook of that backward. ``backward()`` raises the errors of ``function``.
    """
    queue_callback(partial(call_at_outermost, function))


def call_at_outermost(function: Callable[[], object]) -> None:
    """Call ``function`` if the backward that ends is the outermost one, else at the end of that one."""
    outer = current_node()
    if outer is None:
        function()
        return
    # This backward ran within a node of another, as reentrant checkpointing does. Only once that node has ended can
    # the outer backward be given a callback.

    def after(*_: object) -> None:
        handle.remove()
        at_end_of_backward(function)

    handle = outer.register_hook(after)
