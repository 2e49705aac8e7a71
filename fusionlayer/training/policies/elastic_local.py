"""Local steps in an elastic job: a sync is the transaction, and members come and go between two syncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...scheduler import Engine
from .elastic_optimizer import ElasticallyStepping
from .local_optimizer import LocallyStepping
from .local_steps import Flight, beginning

__all__ = ["ElasticallyLocal"]


class ElasticallyLocal(ElasticallyStepping, LocallyStepping):
    """A ``LocallyStepping`` whose syncs are transactions.

    Anchors are the same on all members. If one is lost, the others send their differences once more among themselves;
    what the lost one has learned since the last sync is lost. A member that is the only one syncs with itself.
    """

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the step of the wrapped optimizer with this rank's gradients; every so many calls, sync with all ranks.

        The first call of a process that joins takes over the members' state after a sync instead.

        Raises:
            UsageError, PlanMismatch, ReplicaMismatch, TransportError: as ``ElasticallyStepping.step``.
        """
        alone = self._fl_members.has_joined and self._fl_engine is None
        if alone:
            self._fl_anchor()
        result = super().step(closure, **kwargs)
        if alone:
            self._fl_local.count += 1
            self._fl_local.moved = True
            if self._fl_local.departs:
                self._fl_sync()
                if self._fl_members.change_due:
                    self._fl_change()
        return result

    # As in ``Distributed``: torch's step hooks run in the wrapped class's step, and this step tells schedulers.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Sync now, on all members, if a local step was made since the last sync; the next round begins then.

        Raises:
            PlanMismatch, ReplicaMismatch, TransportError: as ``step``.
        """
        if self._fl_members.has_joined and self._fl_local.moved:
            self._fl_sync()

    def _fl_after_step(self, engine: Engine) -> None:
        if self._fl_local.departs:
            self._fl_sync()

    def _fl_sync(self) -> None:
        """Let all members' differences move the anchors, and parameters become these."""
        averages = {name: x.clone() for name, x in self._fl_transact(self._fl_exchange).items()}  # landing changes them
        local = self._fl_local
        parameters = {name: parameter for parameter, name in self._fl_names.items()}
        if not averages:
            averages = dict(zip(parameters, local.differences([*parameters.values()]), strict=True))
        self._fl_land(Flight(parameters, 0, lambda: averages), exactly=True)
        local.count, local.moved = 0, False

    def _fl_exchange(self, engine: Engine) -> dict[str, Tensor]:
        averages = dict(self._fl_send(engine).take())
        if self._fl_check is not None:
            self._fl_check.settle()
        return averages

    def _fl_more(self) -> dict[str, Any]:
        return {"momentum": self._fl_local.state_dict(self._fl_roster.names)["momentum"]}

    def _fl_begin_with(self, more: Mapping[str, Any]) -> None:
        self._fl_local.load_state_dict(beginning(more["momentum"]), self._fl_roster.by_name())

    def _fl_connect_anew(self) -> None:
        super()._fl_connect_anew()
        if self._fl_engine is not None:
            self._fl_go_on(self._fl_engine)
