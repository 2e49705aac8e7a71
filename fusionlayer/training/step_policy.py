"""``StepPolicy``: a step of a distributed optimizer, and the implementation of the methods that users call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..base.plan import FusionPlan
from ..observe.timeline import PROFILER_STATE
from .overlap import ForwardOverlap
from .parameters import local_part
from .reducer import Reducer
from .reduction_policy import ReductionPolicy
from .step_state import WITH_RESULTS, StepState


class StepPolicy(ReductionPolicy):
    """The kind of a step. This policy averages gradients in every step; subclasses implement other kinds.

    ``Distributed`` calls the methods that have the names of its own. It knows no subclass: ``DistributedOptimizer``
    chooses the policy by its arguments.

    Attributes:
        reducer: the optimizer's, which has the engine; set by ``attach``.
    """

    reducer: Reducer

    # ---- called by the reducer --------------------------------------------------------------------------------------

    def attach(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def detach(self) -> None:
        del self.reducer

    def is_in_flight(self, parameter: Tensor) -> bool:
        return self.reducer.passes.has_begun(parameter)

    def stand_in(self) -> None:
        # A thread of ``join`` calls it, while the training thread waits there. It sends zeros for missing gradients; if
        # backward had begun a step before, it ends that step.
        reducer = self.reducer
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

    def leave(self) -> None:
        self.reducer.flush()

    def reduce(self) -> object:
        """Wait until every gradient of the present step is reduced."""
        return self.reducer.reduce()

    # ---- called by users, through ``Distributed`` -------------------------------------------------------------------

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """Make a step; ``update`` is the step of the wrapped optimizer, which takes ``options``."""
        reducer = self.reducer
        if closure is not None:
            return update(self._reducing(closure), **options)
        if reducer.state in WITH_RESULTS:
            if reducer.engine is not None:
                reducer.enrolment.refuse_unreduced(reducer.optimizer().__dict__["param_groups"])
        elif reducer.overlap is not None and not reducer.skips_synchronize:
            return self._step_without_wait(reducer.overlap)
        if reducer.skips_synchronize:
            if reducer.pending:
                raise UsageError(
                    "step() within skip_synchronize() takes gradients that are being reduced; call synchronize() first"
                )
        elif reducer.state is StepState.SYNCHRONIZED:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                "it does not reduce again; call it within skip_synchronize() to say so",
                stacklevel=3,
            )
        elif reducer.state is not StepState.REDUCED:
            self.reduce()
        reducer.state = StepState.IDLE
        reducer.results = {}
        if not (reducer.timeline.enabled or getattr(*PROFILER_STATE)):
            return update(**options)
        with reducer.timeline.span("UPDATE", step=-1 if reducer.engine is None else reducer.engine.step - 1):
            return update(**options)

    def _step_without_wait(self, overlap: ForwardOverlap) -> None:
        """End the engine's step; the next forward makes the updates."""
        reducer, engine = self.reducer, self.reducer.engine
        assert engine is not None
        optimizer = reducer.optimizer()
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UsageError(
                "step hooks of the optimizer would run once for each bucket with overlap_forward; remove them, or "
                "leave overlap_forward out"
            )
        reducer.submit_rest()
        reducer.refuse_changed()
        engine.end_step()
        if reducer.check is not None:
            reducer.check.begin()
        overlap.begin(vars(optimizer)["param_groups"])
        reducer.state = StepState.STEPPED

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self.reducer.forget_results()
            with torch.enable_grad():
                loss = closure()
            self.reduce()
            return loss

        return evaluate

    def synchronize(self) -> None:
        """Wait until every gradient is reduced, or with ``overlap_forward`` after ``step``, every parameter updated."""
        reducer = self.reducer
        if reducer.overlap is not None and reducer.state is StepState.STEPPED:
            reducer.overlap.flush()
            return
        self.reduce()
        reducer.results = {}
        reducer.state = StepState.SYNCHRONIZED

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the unchanged gradients within the block."""
        self.reducer.skips_synchronize = True
        try:
            yield
        finally:
            self.reducer.skips_synchronize = False

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Let parameters be those that all ranks had after the last exchange within the block."""
        self.reducer.flush()
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return this policy's state for a checkpoint, without the engine's step and memory."""
        return {}

    def before_load(self, saved: Mapping[str, Any]) -> None:
        """Refuse, or prepare for, the state ``saved``, which is loaded next."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state after the optimizer and the engine have loaded theirs."""

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Fuse gradients by ``plan`` from the next step on, if it is for this job and these parameters."""
        reducer, engine = self.reducer, self.reducer.engine
        if engine is None or engine.plan_controller is not None or plan.world_size != engine.size:
            return
        planned = {name for bucket in plan.buckets for name in bucket.names}
        if planned == {*reducer.names.values()} or not planned <= {*reducer.enrolment.names.values()}:
            engine.switch(plan)

    def reconnect(self) -> None:
        """Reduce gradients over the present job."""
        old = self.reducer.engine
        if old is not None:
            old.give_up()
        self.reducer.connect_anew()
        engine = self.reducer.engine
        if engine is None or old is None:
            return
        engine.step = old.step
        if (engine.rank, engine.size) == (old.rank, old.size):
            engine.memory.load_state_dict(old.memory.state_dict())
        if old.plan is not None:
            self.adopt_plan(old.plan)

    def close(self) -> None:
        """End the background threads."""
        self.reducer.close()
