"""Calls a function at the end of the backward that runs, as DDP's reducer does."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["NO_BACKWARD", "at_end_of_backward", "running_backward"]

NO_BACKWARD = -1
"""The number of the running backward where none runs."""


def running_backward() -> int:
    """Return the number of the backward that runs on this thread, which no other has; ``NO_BACKWARD`` if none does."""
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call ``function`` once all gradients of the outermost backward are there, before ``backward()`` returns.

    Call this from a hook of that backward. What ``function`` raises, ``backward()`` raises.
    """

    def ended() -> None:
        outer = torch._C._current_autograd_node()
        if outer is None:
            function()
            return
        # This backward ran within a node of another, as reentrant checkpointing does. Only once that node has ended can
        # the outer backward be given a callback.

        def after(*_: object) -> None:
            handle.remove()
            at_end_of_backward(function)

        handle = outer.register_hook(after)

    torch.autograd.Variable._execution_engine.queue_callback(ended)
