"""Local steps in an elastic job: a sync is the transaction, and members come and go between two syncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...scheduler import Engine
from ..step_policy import StepPolicy
from .elastic_policy import ElasticStepPolicy
from .local_policy import LocalStepPolicy, go_on
from .local_steps import Flight, LocalSteps, beginning


class ElasticLocalStepPolicy(ElasticStepPolicy, LocalStepPolicy):
    """Local steps whose syncs are transactions.

    Anchors are the same on all members. If one fails, the others send their differences once more among themselves; the
    failed one's progress since the last sync is lost. A member that is the only one syncs with itself.
    """

    def __init__(self, local: LocalSteps) -> None:
        LocalStepPolicy.__init__(self, local, StepPolicy())
        ElasticStepPolicy.__init__(self)
        del self.before_step  # not that of averaging steps

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """Take the step of the wrapped optimizer with this rank's gradients; every few calls, sync with all ranks.

        The first call of a process that joins takes over the members' state after a sync instead.
        """
        alone = self.members.has_joined and self.reducer.engine is None
        if alone:
            self._anchor()
        result = super().step(update, closure, options)
        if alone:
            self.local.count += 1
            self.local.moved = True
            if self.local.departs:
                self._sync()
                if self.members.change_due:
                    self._change()
        return result

    def synchronize(self) -> None:
        """Sync now, on all members, if a local step was made since the last sync; the next round begins then."""
        if self.members.has_joined and self.local.moved:
            self._sync()

    def _after_step(self, engine: Engine) -> None:
        if self.local.departs:
            self._sync()

    def _sync(self) -> None:
        """Let all members' differences move the anchors, and parameters become these."""
        local = self.local
        parameters = {name: parameter for parameter, name in self.reducer.names.items()}
        flight = Flight(parameters, 0, dict)

        def exchange(engine: Engine) -> dict[str, Tensor]:
            sent = self._send(engine)
            averages = dict(sent.take())
            if self.reducer.check is not None:
                self.reducer.check.settle()
            flight.norm, flight.reports = sent.norm, sent.reports
            return averages

        averages = {name: x.clone() for name, x in self._transact(exchange).items()}  # landing changes them
        if not averages:
            averages = dict(zip(parameters, local.differences([*parameters.values()]), strict=True))
        flight.take = lambda: averages
        self._land(flight, exactly=True)
        local.count, local.moved = 0, False

    def more(self) -> dict[str, Any]:
        """Return the outer momentum and the measured noise, for a newcomer."""
        state = self.local.state_dict(self.reducer.enrolment.names)
        return {key: state[key] for key in ("momentum", "noise")}

    def begin_with(self, more: Mapping[str, Any]) -> None:
        """Begin a round with the members' outer momentum and noise."""
        self.local.load_state_dict(beginning(**more), self.reducer.enrolment.by_name())

    def _connect_anew(self) -> None:
        super()._connect_anew()
        if self.reducer.engine is not None:
            go_on(self.reducer.engine)
