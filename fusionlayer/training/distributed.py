"""The methods that users call on a distributed optimizer: ``step``, ``synchronize``, ``state_dict`` and others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from ..base.errors import ConfigError, UsageError, kind_of, require
from ..base.plan import FusionPlan
from ..planning.profile import Profile
from ..transport import Transport
from .backward_end import NO_BACKWARD, running_backward
from .enrolment import listed
from .live import refuse_twice
from .overlap import ForwardOverlap, check_parameters
from .own_state import check_place
from .reduction import GradientReduction
from .replicas import Replicas
from .step_state import WITH_RESULTS, StepState

__all__ = ["Distributed"]


class Distributed(GradientReduction):
    """The type of what ``DistributedOptimizer`` returns: the wrapped optimizer, with these methods besides its own.

    It overrides methods of the wrapped optimizer's class, before which it stands in the method resolution order.
    """

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The plan of the last step; None before the first step and in a job of one rank."""
        return None if self._fl_engine is None else self._fl_engine.plan

    @property
    def cost_profile(self) -> Profile | None:
        """The costs from which the plan was made; None until they are known, and for planners that need none.

        Save it with ``to_yaml``: ``fusionlayer explain`` reads the file, and the next run takes it as ``profile``.
        """
        from ..planning.online import OnlinePlanner  # imported here, because it imports the profiler

        plan_controller = None if self._fl_engine is None else self._fl_engine.plan_controller
        return plan_controller.profile if isinstance(plan_controller, OnlinePlanner) else None

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Let parameters be those that all ranks had after the last sync within the block, the same bits.

        For evaluation and checkpoints between two syncs of local steps, without an exchange. Afterwards the rank's own
        values are back; what the block writes to parameters is lost. Without ``sync`` parameters always are the same.
        """
        self._fl_flush()
        yield

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. With ``sync``: sync now, on all ranks.

        ``backward`` does so by itself, or where it does not, ``step``: with ``overlap_forward``,
        in elastic jobs and if ``backward`` runs several times in a step. There call it before you read or change
        gradients, for instance to clip them; then call ``step`` within ``skip_synchronize``. With ``overlap_forward``,
        between ``step`` and the next backward, it waits until every parameter is updated.

        Raises:
            PlanMismatch: ranks disagree on model, plan or options.
            ReplicaMismatch: parameters differ over ranks.
            TransportError: a peer was lost, stopped or too late.
        """
        if self._fl_overlap is not None and self._fl_state is StepState.STEPPED:
            self._fl_overlap.flush()
            return
        self._fl_synchronize()
        self._fl_reduced = {}
        self._fl_state = StepState.SYNCHRONIZED

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this many backward passes from now on; all ranks call it, between steps."""
        require(passes, Integral, "backward_passes_per_step", "a whole number, at least 1")
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}; expected at least 1")
        if self._fl_pending:
            raise UsageError("set_backward_passes_per_step() while gradients are being reduced; call it after step()")
        self._fl_passes = passes
        self._fl_count_anew()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the gradients as they are within the block, after a call of ``synchronize``."""
        self._fl_step_synchronizes = False
        try:
            yield
        finally:
            self._fl_step_synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the reduced gradients, then take the step of the wrapped optimizer.

        The optimizer may evaluate a ``closure`` several times; the gradients are reduced each time. With
        ``overlap_forward`` and without a closure, ``step`` does not wait.
        """
        self._opt_called = True
        may_wait = closure is None and self._fl_step_synchronizes and self._fl_state not in WITH_RESULTS
        if self._fl_overlap is not None and may_wait:
            return self._fl_step_without_wait(self._fl_overlap)
        if closure is not None:
            return super().step(self._fl_reducing(closure), **kwargs)
        if self._fl_state in WITH_RESULTS:
            self._fl_refuse_unreduced()
        if not self._fl_step_synchronizes:
            if self._fl_pending:
                raise UsageError(
                    "step() within skip_synchronize() takes gradients that are being reduced; call synchronize() first"
                )
        else:
            if self._fl_state is StepState.SYNCHRONIZED:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "it does not reduce again; call it within skip_synchronize() to say so",
                    stacklevel=2,
                )
            self._fl_synchronize()
        self._fl_state = StepState.IDLE
        self._fl_reduced = {}
        with self._fl_timeline.span("UPDATE", step=self._fl_step_number - 1):
            return super().step(**kwargs)

    # Two marks that torch reads. "hooked": the wrapped class's step runs the step hooks, so this one must not run them
    # too. "_wrapped_by_lr_sched": this step sets _opt_called itself, so schedulers need not wrap it.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _fl_step_without_wait(self, overlap: ForwardOverlap) -> None:
        engine, sparse = self._fl_engine, self._fl_sparse
        assert engine is not None and sparse is not None
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            raise UsageError(
                "step hooks of the optimizer would run once for each bucket with overlap_forward; remove them, or "
                "leave overlap_forward out"
            )
        self._fl_submit_rest(engine, sparse)
        self._fl_refuse_changed(engine)
        self._fl_end_step(engine)
        overlap.begin(self.__dict__["param_groups"])
        self._fl_state = StepState.STEPPED

    def _fl_reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._fl_forget_results()
            with torch.enable_grad():
                loss = closure()
            self._fl_synchronize()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            UsageError: they are still being reduced: ``step`` or ``synchronize`` has to wait for the results first.
        """
        if self._fl_pending:
            raise UsageError(
                "zero_grad() was called after backward() but before step() or synchronize(): the gradients are being "
                "reduced; call it after step()"
            )
        self._fl_count_anew()
        self._fl_forget_results()
        super().zero_grad(set_to_none)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names of the parameters whose gradients are reduced; scripts written for Horovod read it."""
        return self._fl_names

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Code that reads gradients through them, as GradScaler does, gets reduced gradients."""
        # In a backward hook, other gradients of the step are still to come: it is too early to end the step.
        no_backward_runs = running_backward() == NO_BACKWARD
        if self._fl_pending and no_backward_runs and self._fl_state is not StepState.UPDATING:
            self._fl_synchronize()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which are reduced from the next step on; all ranks call it between two steps.

        If the optimizer was wrapped with ``broadcast``, the parameters get rank 0's values now. Their names are those
        of ``named_parameters``, which may have listed them. Parameters that it did not list may come as (name,
        parameter) pairs, as torch takes them; else their places name them.

        Raises:
            UsageError: backward has begun to reduce the gradients of a step.
            ConfigError: a parameter has the name of another one, belongs to another ``DistributedOptimizer``, is on
                another device or sharded. The group is not added then.
            PlanMismatch: ranks add other parameters.
            TransportError: a peer was lost, stopped or late, or does not add a group.
        """
        if self._fl_pending:
            raise UsageError("add_param_group() while gradients are being reduced; call it before backward")
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        before = len(groups)
        super().add_param_group(param_group)
        try:
            new = self._fl_roster.newcomers(groups)
            trained = {p: name for p, name in new.items() if p.requires_grad}
            refuse_twice(trained, but=self)
            self._fl_refuse_averaged(trained)
            if self._fl_forward_of is not None:
                check_parameters(new, self._fl_forward_of)
        except ConfigError:
            del groups[before:]
            raise
        engine, replicas = self._fl_engine, self._fl_replicas
        if engine is not None:
            added = Replicas({name: p for p, name in new.items()}, replicas.broadcast, replicas.every)

            def unite(transport: Transport) -> None:
                with transport.doing("add_param_group()", f"which adds {listed(new.values())}"):
                    added.unite(transport)

            engine.put(unite)()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "fusionlayer" this rank's step, error feedback and codec state.

        Raises:
            FusionLayerError: a step has failed; the last state that was saved before it is the one to go on from.
        """
        self._fl_flush()
        engine = self._fl_engine
        if engine is not None:
            engine.drain()
        state = super().state_dict()
        if engine is not None:
            place = {"rank": engine.rank, "size": engine.size, "step": engine.step}
            state["fusionlayer"] = {**place, "factor": engine.scaling.after, **engine.memory.state_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank.

        A state that was broadcast holds only the step; error feedback stays as it is then. So it does where this rank
        has just loaded its own state of the same step, as before a framework loads rank 0's on all ranks.

        Raises:
            ConfigError: the state holds error feedback or local steps of another rank, or of another number of ranks.
        """
        if not isinstance(state_dict, Mapping) or "param_groups" not in state_dict:
            raise ConfigError(f"load_state_dict got {kind_of(state_dict)}; expected what state_dict() has returned")
        state = dict(state_dict)
        saved = state.pop("fusionlayer", None)
        engine = self._fl_engine
        restored = self._fl_has_restored(saved)
        if saved is not None and not restored:
            rank, size = (0, 1) if engine is None else (engine.rank, engine.size)
            check_place(saved, rank, size, "DistributedOptimizer")
        self._fl_flush()
        super().load_state_dict(state)
        self._fl_count_anew()
        if engine is not None and saved is not None and not restored:
            if "rank" in saved:
                engine.memory.load_state_dict(saved)
                self._fl_restored = saved["step"]
            engine.step = saved["step"]

    def _fl_has_restored(self, saved: Mapping[str, Any] | None) -> bool:
        """Return whether this rank has loaded its own state of the step of ``saved``, and made no step since."""
        engine = self._fl_engine
        if engine is None or saved is None or self._fl_restored is None or "local" in saved:
            return False
        place = saved.get("rank"), saved.get("size")
        return self._fl_restored == engine.step == saved["step"] and place != (engine.rank, engine.size)

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced. For programs that go on after training.

        Raises:
            TransportError: over NCCL, the last step could not end on the device, so weights are worthless.
        """
        self._fl_flush()
        self._fl_detach()

    def reconnect(self) -> None:
        """Reduce gradients over the job as it is now, after ``shutdown`` and ``init``; all ranks call it together.

        Reductions under way are given up. The step number stays. Error feedback stays if rank and size are the same.
        The plan stays if the size is the same and no plan controller makes plans while training runs. Parameters stay
        as they are: how they become equal again is the job's business, and the next step compares them.

        Raises:
            TransportError: a peer was lost, stopped or late.
        """
        old, roster = self._fl_engine, self._fl_roster
        if old is not None:
            old.give_up()
        self._fl_detach()
        names = roster.reduced(self.__dict__["param_groups"])
        engine, timeline = self._fl_connect(names, True)
        self._attach(engine, timeline, roster, names, self._fl_passes, self._fl_sparse_as_dense, self._fl_forward_of)
        if engine is None or old is None:
            return
        engine.step = old.step
        if (engine.rank, engine.size) == (old.rank, old.size):
            engine.memory.load_state_dict(old.memory.state_dict())
        if old.plan is not None:
            self.adopt_plan(old.plan)

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Fuse gradients by ``plan`` from the next step on, if it is for this number of ranks.

        All ranks call it together. The call changes nothing in a job of one rank, or if a plan controller makes plans
        while training runs. It also changes nothing if the plan is of other parameters of this optimizer than those
        that are reduced now: some may be frozen or unfrozen since, or gradients may have been sparse. Then the next
        step makes a plan.

        Raises:
            ConfigError: the plan is for other parameters, or names an unknown codec or collective.
        """
        require(plan, FusionPlan, "adopt_plan", "a FusionPlan")
        engine = self._fl_engine
        if engine is None or engine.plan_controller is not None or plan.world_size != engine.size:
            return
        planned = {name for bucket in plan.buckets for name in bucket.names}
        if planned == {*self._fl_names.values()} or not planned <= {*self._fl_roster.names.values()}:
            engine.switch(plan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``UsageError``: a copy would share the background threads."""
        raise UsageError("a DistributedOptimizer cannot be copied or pickled; copy or save its state_dict()")
