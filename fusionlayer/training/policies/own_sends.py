"""``OwnSends``: steps of an optimizer that chooses the values to send instead of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from ..construction import GradientOptions
from ..reducer import Reducer
from ..sends import SendsItsOwn, Sent, sent_by
from ..step_policy import StepPolicy


class OwnSends(StepPolicy):
    """Averages the values that a ``SendsItsOwn`` puts into its gradients, by the codec that it names."""

    def __init__(self, optimizer: SendsItsOwn) -> None:
        self._sent = _sent_by(optimizer)

    def options(self, options: GradientOptions) -> GradientOptions:
        """Return options with the codec that the optimizer names."""
        codec = self._sent[1]
        if codec is None:
            return options
        # These belong to the codec that the caller named.
        planning = replace(options.planning, ahead=None, plan=None, profile=None, policy=None, fidelity=None)
        return replace(options, codec=codec, codec_options={}, algorithm=None, planning=planning)

    def attach(self, reducer: Reducer) -> None:
        """Begin with the values that the optimizer sends now."""
        super().attach(reducer)
        self._sent = _sent_by(reducer.optimizer())

    def before_step(self) -> None:
        """Make a new plan if the optimizer now sends something else."""
        reducer = self.reducer
        optimizer = reducer.optimizer()
        if reducer.overlap is not None:
            reducer.overlap.finish()  # the optimizer decides what it sends when its step is whole, on every rank
        sent = _sent_by(optimizer)
        if sent != self._sent:
            self._sent = sent
            reducer.plan_anew(reducer.names, f"{type(optimizer).__name__} now sends {sent[0]}")

    def contribution(self, parameter: Tensor) -> None:
        """Let the optimizer put its values into ``parameter.grad``."""
        optimizer: SendsItsOwn = self.reducer.optimizer()
        optimizer.exchanged(parameter)


def _sent_by(optimizer: object) -> Sent:
    sent = sent_by(cast(Any, optimizer))
    assert sent is not None
    return sent
