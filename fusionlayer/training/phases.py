"""Records FORWARD and BACKWARD of the training thread in the timeline, next to the engine's WAIT and UPDATE."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..observe.timeline import Timeline
from ..process.clock import Stamp
from ..scheduler import Engine


class StepPhases:
    """Finds out from hooks when forward and backward run, and puts both into a timeline.

    FORWARD lasts as long as the outermost module's call. BACKWARD lasts from there to the last gradient, so it includes
    the loss. Calls without gradients, as in validation, are left out.
    """

    def __init__(self, engine: Engine, timeline: Timeline) -> None:
        self._engine = engine
        self._timeline = timeline
        # The hooks are global, so modules on other threads call them too. Only the thread that made this object counts.
        self._thread = threading.get_ident()
        self._depth = 0
        self._began: Stamp = None
        self._forward_end: Stamp = None
        self._last_gradient: Stamp = None

    def watch(self) -> list[RemovableHandle]:
        """Register hooks on every module's forward; the handles remove them."""
        before = torch.compiler.disable(self._enter)
        after = torch.compiler.disable(self._leave)
        return [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def note_gradient(self) -> None:
        """Note that backward has made a gradient; called on the thread that runs backward."""
        self._last_gradient = self._timeline.now()

    def end_backward(self) -> None:
        """Record the backward that has just run, if any ran since the last forward."""
        if self._forward_end is not None and self._last_gradient is not None:
            self._timeline.record("BACKWARD", self._forward_end, self._last_gradient, step=self._engine.step)
        self._forward_end = None

    def _enter(self, *_: Any) -> None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        if self._depth == 0:
            self.end_backward()
            self._began = self._timeline.now()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled() or not self._depth:
            return
        self._depth -= 1
        if self._depth == 0:
            self._forward_end, self._last_gradient = self._timeline.now(), None
            self._timeline.record("FORWARD", self._began, self._forward_end, step=self._engine.step)
