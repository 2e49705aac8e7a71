"""The methods that users call on a distributed optimizer: ``step``, ``synchronize``, ``state_dict`` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch.optim import Optimizer

from ..base.errors import ConfigError, UsageError, kind_of, require
from ..base.plan import FusionPlan
from ..planning.profile import Profile
from ..transport import Transport
from .backward_end import NO_BACKWARD, running_backward
from .enrolment import listed
from .live import refuse_twice
from .overlap import check_parameters
from .own_state import check_place
from .reducer import Reducer
from .replicas import Replicas
from .step_policy import StepPolicy
from .step_state import StepState


class Distributed(Optimizer):
    """The type of the result of ``DistributedOptimizer``: the wrapped optimizer, with these methods in addition.

    It overrides methods of the wrapped optimizer's class, because it precedes that class in the method resolution
    order. It adds two attributes to the instance.

    Attributes:
        reducer: has the engine and the state of the step. Not for users.
        step_policy: makes steps. Not for users.
    """

    reducer: Reducer
    step_policy: StepPolicy

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The plan of the last step; None before the first step and in a job of one rank."""
        engine = self.reducer.engine
        return None if engine is None else engine.plan

    @property
    def cost_profile(self) -> Profile | None:
        """The costs from which the plan was made; None until they are known, and for planners that need none.

        Save it with ``to_yaml``: ``fusionlayer explain`` reads the file, and the next run takes it as ``profile``.
        """
        from ..planning.online import OnlinePlanner  # imported here, because it imports the profiler

        plan_controller = None if self.reducer.engine is None else self.reducer.engine.plan_controller
        return plan_controller.profile if isinstance(plan_controller, OnlinePlanner) else None

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Within the block, set parameters to their values after the last sync, which are equal on all ranks.

        For evaluation and checkpoints between two syncs of local steps, without an exchange. Afterwards the rank's own
        values are back; what the block writes to parameters is lost. Without ``sync`` parameters always are the same.
        """
        with self.step_policy.anchored():
            yield

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. With ``sync``: sync now, on all ranks.

        ``backward`` does so by itself, or where it does not, ``step``: with ``overlap_forward``,
        in elastic jobs and if ``backward`` runs several times in a step. There call it before you read or change
        gradients, for instance to clip them; then call ``step`` within ``skip_synchronize``. With ``overlap_forward``,
        between ``step`` and the next backward, it waits until every parameter is updated.

        With ``sync``, if a local step was made since the last sync: fragments in flight arrive first. Then all
        fragments sync, parameters become the anchors, regardless of ``alpha`` and ``carry``, and the next round begins.
        Call it before all ranks evaluate or save the same model, and after the last step.

        Raises:
            PlanMismatch: ranks disagree on model, plan or options.
            ReplicaMismatch: parameters differ over ranks.
            TransportError: a peer failed or timed out.
        """
        self.step_policy.synchronize()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this many backward passes from now on; all ranks call it, between steps."""
        require(passes, Integral, "backward_passes_per_step", "a whole number, at least 1")
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}; expected at least 1")
        if self.reducer.pending:
            raise UsageError("set_backward_passes_per_step() while gradients are being reduced; call it after step()")
        self.reducer.passes.set_per_step(passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the unchanged gradients within the block, after a call of ``synchronize``.

        Raises:
            UsageError: with ``sync``, where gradients are this rank's own and nothing waits for them.
        """
        with self.step_policy.skip_synchronize():
            yield

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the reduced gradients, then take the step of the wrapped optimizer.

        The optimizer may evaluate a ``closure`` several times; the gradients are reduced each time. With
        ``overlap_forward`` and without a closure, ``step`` does not wait.

        With ``sync`` the step uses this rank's gradients, and every few calls sync with all ranks. A step that
        ``GradScaler`` skips on this rank counts too: all ranks make equally many.

        In an elastic job the first call of a process that joins takes over the members' state instead.

        Raises:
            UsageError: in an elastic job a ``closure`` was given.
            PlanMismatch: ranks disagree on model, plan or options, or have made other numbers of local steps.
            ReplicaMismatch: parameters, or with ``sync`` anchors, differ over ranks.
            TransportError: a peer failed or timed out. With ``sync`` this rank's parameters stay as they were before.
                In an elastic job: too few members are left, or they continue without this one.
        """
        self._opt_called = True
        return self.step_policy.step(super().step, closure, kwargs)

    # Two marks that torch reads. "hooked": the wrapped class's step runs the step hooks, so this one must not run them
    # too. "_wrapped_by_lr_sched": this step sets _opt_called itself, so schedulers need not wrap it.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            UsageError: they are still being reduced: ``step`` or ``synchronize`` has to wait for the results first.
        """
        reducer = self.reducer
        if reducer.pending:
            raise UsageError(
                "zero_grad() was called after backward() but before step() or synchronize(): the gradients are being "
                "reduced; call it after step(), or to drop them, as after an error in backward, after synchronize()"
            )
        reducer.passes.left.update(reducer.passes.whole)
        reducer.forget_results()
        super().zero_grad(set_to_none)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names of the parameters whose gradients are reduced; scripts written for Horovod read it."""
        return self.reducer.names

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Code that reads gradients through them, as GradScaler does, gets reduced gradients."""
        reducer = self.reducer
        # In a backward hook, other gradients of the step are still to come: it is too early to end the step.
        between = not reducer.updating and running_backward() == NO_BACKWARD
        if reducer.state is StepState.REDUCING and between and reducer.pending:
            self.step_policy.reduce()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which are reduced from the next step on; all ranks call it between two steps.

        If the optimizer was wrapped with ``broadcast``, the parameters get rank 0's values now. Their names are those
        of ``named_parameters``, which may have listed them. Parameters that it did not list may come as (name,
        parameter) pairs, as in torch; otherwise their positions name them.

        Raises:
            UsageError: backward has begun to reduce the gradients of a step.
            ConfigError: a parameter has the name of another one, belongs to another ``DistributedOptimizer``, is on
                another device or sharded. The group is not added then.
            PlanMismatch: ranks add other parameters.
            TransportError: a peer failed or timed out, or does not add a group.
        """
        reducer = self.reducer
        if reducer.pending:
            raise UsageError("add_param_group() while gradients are being reduced; call it before backward")
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        before = len(groups)
        super().add_param_group(param_group)
        try:
            new = reducer.enrolment.newcomers(groups)
            trained = {p: name for p, name in new.items() if p.requires_grad}
            refuse_twice(trained, but=reducer)
            reducer.refuse_averaged(trained)
            if reducer.connection.overlapped is not None:
                check_parameters(new, reducer.connection.overlapped)
        except ConfigError:
            del groups[before:]
            raise
        replicas = reducer.replicas
        if reducer.engine is not None:
            added = Replicas({name: p for p, name in new.items()}, replicas.broadcast, replicas.every)

            def unite(transport: Transport) -> None:
                with transport.doing("add_param_group()", f"which adds {listed(new.values())}"):
                    added.unite(transport)

            reducer.engine.put(unite)()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under "fusionlayer" this rank's step, error feedback and codec state.

        With ``sync`` also anchors, outer momentum and fragments in flight. Between two syncs the states, parameters and
        buffers of ranks differ: each rank saves and loads its own. The state holds this rank's parameters and buffers
        too, also within ``anchored``.

        Raises:
            FusionLayerError: a step has failed; the last state that was saved before it is the one to continue from.
        """
        reducer, engine = self.reducer, self.reducer.engine
        more = self.step_policy.state_dict()  # first: what is in flight changes error feedback
        reducer.flush()
        if engine is not None:
            engine.drain()
        state = super().state_dict()
        if engine is not None:
            place = {"rank": engine.rank, "size": engine.size, "step": engine.step}
            state["fusionlayer"] = {**place, "factor": engine.scaling.after, **engine.memory.state_dict(), **more}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict`` on the same rank, in the middle of a round parameters and buffers too.

        A broadcast state holds only the step; error feedback then stays unchanged. It is so after this rank has loaded
        its own state of the same step, as before a framework loads rank 0's on all ranks.

        With ``sync``, load the model before. A state of an optimizer without local steps begins a new round: its
        anchors are the parameters at the next ``step``, which must be equal on all ranks.

        Raises:
            ConfigError: the state holds error feedback or local steps of another rank, or of another number of ranks.
        """
        if not isinstance(state_dict, Mapping) or "param_groups" not in state_dict:
            raise ConfigError(f"load_state_dict got {kind_of(state_dict)}; expected what state_dict() has returned")
        state = dict(state_dict)
        saved = state.pop("fusionlayer", None)
        reducer, engine = self.reducer, self.reducer.engine
        self.step_policy.before_load(saved or {})
        restored = self._has_restored(saved)
        if saved is not None and not restored:
            rank, size = (0, 1) if engine is None else (engine.rank, engine.size)
            check_place(saved, rank, size, "DistributedOptimizer")
        reducer.flush()
        super().load_state_dict(state)
        reducer.passes.left.update(reducer.passes.whole)
        if engine is not None and saved is not None and not restored:
            if "rank" in saved:
                engine.memory.load_state_dict(saved)
                reducer.restored = saved["step"]
            engine.step = saved["step"]
        self.step_policy.load_state_dict(saved or {})

    def _has_restored(self, saved: Mapping[str, Any] | None) -> bool:
        """Return whether this rank has loaded its own state of the step of ``saved``, and made no step since."""
        engine, restored = self.reducer.engine, self.reducer.restored
        if engine is None or saved is None or restored is None or "local" in saved:
            return False
        place = saved.get("rank"), saved.get("size")
        return restored == engine.step == saved["step"] and place != (engine.rank, engine.size)

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced. For programs that continue after training.

        Raises:
            TransportError: over NCCL, the last step did not complete on the device, so weights are invalid.
        """
        self.step_policy.close()

    def reconnect(self) -> None:
        """Reduce gradients over the present job, after ``shutdown`` and ``init``; all ranks call it together.

        Reductions in flight are given up. The step number stays. Error feedback stays if rank and size are the same.
        The plan stays if the size is the same and no plan controller makes plans while training runs. Parameters stay
        unchanged: the job makes them equal again, and the next step compares them.

        With ``sync`` a new round begins: its anchors are the parameters at the next ``step``, which the job has made
        equal, and outer momentum begins at zero.

        Raises:
            UsageError: in an elastic job, whose members connect by themselves.
            TransportError: a peer failed or timed out.
        """
        self.step_policy.reconnect()

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Fuse gradients by ``plan`` from the next step on, if it is for this number of ranks.

        All ranks call it together. The call changes nothing in a job of one rank, or if a plan controller makes plans
        while training runs. It also changes nothing if the plan has other parameters of this optimizer than those now
        reduced: some may be frozen or unfrozen since, or gradients may have been sparse. Then the next step makes a
        plan. With ``sync``, fragments in flight arrive first.

        Raises:
            ConfigError: the plan is for other parameters, or names an unknown codec or collective.
        """
        require(plan, FusionPlan, "adopt_plan", "a FusionPlan")
        self.step_policy.adopt_plan(plan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``UsageError``: a copy would share the background threads."""
        raise UsageError("a DistributedOptimizer cannot be copied or pickled; copy or save its state_dict()")
