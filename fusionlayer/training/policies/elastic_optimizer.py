"""The methods that users call on a distributed optimizer in an elastic job, whose ranks may be lost and may come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import context
from ...base.errors import ConfigError, TransportError, UsageError, WireError, forget
from ...base.plan import FusionPlan
from ...elastic import Members
from ...native.wire import digest
from ...planning.codec_rules import AUTO
from ...process.processes import return_free_memory
from ...scheduler import Engine
from ...transport import Transport
from ..distributed import Distributed
from ..gradient_hooks import GradientHooks
from ..reduction import GradientReduction
from ..sends import FollowsSyncs, sent_by
from ..step_state import WITH_RESULTS, StepState
from .elastic_state import (
    own_fingerprints,
    receive_results,
    receive_state,
    send_results,
    send_state,
    without_unsure,
)
from .handover import Fingerprint
from .local import Local

__all__ = ["ElasticallyStepping", "check_elastic"]


def check_elastic(optimizer: Optimizer, **given: Any) -> None:
    """Raise ``ConfigError`` if an optimizer or one of the arguments ``given`` cannot lose a rank in a step."""
    why = {
        "group": "an elastic job has one group, of all members",
        "overlap_forward": "a step whose update waits for the next forward cannot be taken back",
        "plan": "it is for one number of ranks",
        "policy": "it may have 'auto', which measures steps of one number of ranks",
    }
    named = {name: reason for name, reason in why.items() if given[name]}
    sync: Local | None = given["sync"]
    if sync is not None and (
        sync.overlaps
        or sync.fragments > 1
        or sync.states
        or sync.alpha
        or sync.adapts
        or sync.after
        or sync.feedback_decay < 1
        or isinstance(optimizer, FollowsSyncs)
    ):
        named[f"sync={sync}"] = "syncs have to be whole and waited for, as those of averaging, diloco and muloco are"
    if given["codec"] == AUTO:
        named["codec='auto'"] = "it measures steps of one number of ranks"
    if sent_by(optimizer) is not None:
        named[type(optimizer).__name__] = "it changes its state before the exchange, which could not be taken back"
    for name, reason in named.items():
        raise ConfigError(f"{name} in an elastic job: {reason}; leave it out, or begin the job without elastic=True")
    if any(each._fl_is_attached for each in _live):
        raise ConfigError("an elastic job has one DistributedOptimizer; close() the other one first")


class ElasticallyStepping(Distributed):
    """A ``Distributed`` whose step is a transaction: either all members make it with the same results, or nobody does.

    Gradients stay as backward made them until the results of all buckets are there. Only then results replace gradients
    and the wrapped optimizer makes its update. So if a member is lost, each of the others either has made the step, or
    has gradients, error feedback and state as before. They form the next generation. If none of them has made the step,
    they exchange the same gradients once more. If one has, it gives its results to those who lack them.

    It can give them, because members tell each other at the end of a step that they have all results, and none begins
    to send the next step's gradients, or lets go of results, before all have told. The message travels while the next
    forward runs.

    A process that joins takes part from its first ``step`` on: that call waits for the members to end a step, and
    takes over parameters and state instead of an update.
    """

    _fl_members: Members
    _fl_facts: tuple[object, ...] = ()
    # A step may have to be made once more, with gradients as they were: ``step`` waits for it and not backward.
    _fl_may_end_with_backward = False
    _fl_is_attached = False

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the step of the wrapped optimizer with the gradients that are averaged over those who take part.

        The first call of a process that joins takes over the members' state instead.

        Raises:
            UsageError: a ``closure`` was given.
            TransportError: too few members are left, or they go on without this one.
            PlanMismatch, ReplicaMismatch: as ``Distributed.step``.
        """
        if closure is not None:
            raise UsageError("step(closure) in an elastic job: the loss of a rank would have to be evaluated again")
        if not self._fl_members.has_joined:
            self._opt_called = True
            self._fl_change()
            return None
        result = super().step(**kwargs)
        if self._fl_members.change_due:
            self._fl_change()
        return result

    # As in ``Distributed``: torch's step hooks run in the wrapped class's step, and this step tells schedulers.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def reconnect(self) -> None:
        """Raise ``UsageError``: members connect by themselves when others are lost or come."""
        raise UsageError("reconnect() in an elastic job, whose members connect by themselves; leave it out")

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced."""
        self._fl_is_attached = False
        self._fl_leave()
        super().close()

    def _fl_leave(self) -> None:
        # Those who still lack results of the last step need this rank's part of them.
        with suppress(TransportError):
            self._fl_settle()
        super()._fl_leave()

    @property
    def _fl_pending(self) -> bool:
        # After a failure too: ``step`` has still to make good for it.
        return self._fl_engine is not None and self._fl_state is StepState.REDUCING

    def _attach(self, *arguments: Any) -> None:
        super()._attach(*arguments)
        if not self._fl_is_attached:
            self._fl_is_attached = True
            self._fl_members = context.membership()
            # What a generation of several members goes on with: the engine's step, error feedback, and the plan.
            self._fl_at = 0
            self._fl_kept: Mapping[str, Any] = {}
            # Waits until all members have the results of the last step; and these, until then.
            self._fl_vote: Callable[[], None] | None = None
            self._fl_held: Mapping[str, Tensor] | None = None
            self._fl_plan: FusionPlan | None = None
            _live.add(self)

    @staticmethod
    def _fl_take(optimizer: weakref.ref[GradientHooks], parameter: Tensor) -> None:
        """Do as ``GradientReduction``. If a rank was lost, let backward go on: ``step`` makes good for it."""
        try:
            GradientReduction._fl_take(optimizer, parameter)
        except TransportError as error:
            self = optimizer()
            if self is None or self._fl_engine is None or self._fl_engine.failure is None:
                raise
            forget(error)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _fl_synchronize(self) -> dict[Tensor, Any]:
        """Exchange gradients, again if members were lost meanwhile, until all who are left have the results."""
        if self._fl_state in WITH_RESULTS or not self._fl_members.has_joined:
            return {}
        results = self._fl_transact(self._fl_exchange)
        for parameter, name in self._fl_names.items():
            if parameter.grad is None and name in results:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        taken = [(p.grad, results[name]) for p, name in self._fl_names.items() if name in results]
        if taken:
            gradients, averages = zip(*taken, strict=True)
            torch._foreach_copy_(gradients, averages)
        self._fl_state = StepState.REDUCED
        return {}

    def _fl_transact(self, exchange: Callable[[Engine], dict[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return what ``exchange`` does, or the same results from another member; none where this is the only one.

        If a rank is lost before any member that is left has all results, the rest forms the next generation, and
        ``exchange`` is called again.

        Args:
            exchange: makes a step of the engine, and returns its results by name. Error feedback apart, it changes
                nothing that a second call would find.
        """
        members = self._fl_members
        results: Mapping[str, Tensor] | None = None
        while results is None:
            engine = self._fl_engine
            if engine is None:
                members.agree_alone()
                self._fl_at += 1
                results = {}
                break
            self._fl_at = engine.step
            try:
                self._fl_settle()
                results = exchange(engine)
                self._fl_vote = engine.put(partial(members.agree, members.step + 1))
                self._fl_held, self._fl_at = results, engine.step
            except TransportError as error:
                if engine.failure is None:
                    raise
                results = self._fl_change(error)
        members.step += 1
        return results

    def _fl_settle(self) -> None:
        """Wait until all members have the results of the last step. Until then this one keeps them for the others.

        Raises:
            TransportError: a member was lost. The step counts nevertheless.
        """
        if self._fl_vote is not None:
            assert self._fl_engine is not None
            self._fl_vote()
            self._fl_engine.memory.forget()
            self._fl_vote = self._fl_held = None
            self._fl_members.settle()

    def _fl_begin(self, engine: Engine) -> None:
        try:
            self._fl_settle()
        except TransportError:
            self._fl_state = StepState.REDUCING  # its gradients are still to be reduced, when that is made good for
            raise
        super()._fl_begin(engine)

    def _fl_exchange(self, engine: Engine) -> dict[str, Tensor]:
        """End a step of the engine; return its results by name."""
        sparse = self._fl_sparse
        assert sparse is not None
        if engine.plan is None and self._fl_plan is not None and not engine.pending:
            # Gradients of a step that was taken back: they make the plan, so they come in backward's order once more.
            parameters = {name: parameter for parameter, name in self._fl_names.items()}
            self._fl_begin(engine)
            for name in chain.from_iterable(bucket.names for bucket in self._fl_plan.buckets):
                if name in parameters and parameters[name].grad is not None:
                    self._fl_hand_over(engine, parameters[name])
        self._fl_submit_rest(engine, sparse)
        self._fl_refuse_changed(engine)
        sparse.end()
        self._fl_end_step(engine)
        results: dict[str, Tensor] = {}
        for index in sorted(engine.untaken):
            results.update(engine.take(index))
        unused, self._fl_unused = engine.unused(), {}
        engine.memory.restore(unused)
        if self._fl_check is not None:
            self._fl_check.settle()
        return {name: result for name, result in results.items() if name not in unused}

    # ---- a change ---------------------------------------------------------------------------------------------------

    def _fl_change(self, error: TransportError | None = None) -> Mapping[str, Tensor] | None:
        """Form the next generation; return the results of the present step, if another member has them, or None.

        Args:
            error: because of which the present step has failed; None: it is between two steps, and newcomers wait.
        """
        members, engine, at = self._fl_members, self._fl_engine, self._fl_at
        fresh, between = not members.has_joined, error is None
        lacks = not between and self._fl_held is None
        self._fl_vote = None
        if error is not None and engine is not None:
            engine.abandon()
            forget(error)
            self._fl_state = StepState.IDLE
        after: Mapping[str, Any] = {} if engine is None else engine.memory.state_dict()
        before = engine.memory.state_before() if engine is not None and lacks else after
        if engine is not None and lacks:
            after = without_unsure(after, engine.plan)
        while True:
            # Before this process asks to join: while the state is sent, all others wait.
            own = own_fingerprints(self) if fresh else {}
            gained = lacks and self._fl_held is not None
            try:
                members.change(-1 if fresh else members.step + gained, between=between, error=error)
                if engine is not None:
                    engine.abandon()  # not before, between two steps: others may still have been in the last one
                self._fl_bring(members.transport, own)
                fresh, gained = False, lacks and self._fl_held is not None
                self._fl_kept, self._fl_at = (after, at + 1) if gained else (before, self._fl_at)
                self._fl_connect_anew()
                results, self._fl_held = self._fl_held, None
                return_free_memory()  # the buffers of ended generations lay between what stays
                return results if gained else None
            except TransportError as again:
                if not members.can_go_on(again):
                    raise
                forget(again)
                error = again

    def _fl_bring(self, transport: Transport, own: Mapping[str, Fingerprint]) -> None:
        """Give those who lack it the results of the last step, or the whole state, without loss; all others only wait.

        Args:
            transport: over the members.
            own: of a newcomer, the fingerprints of the tensors that it has.

        Raises:
            TransportError: a member was lost, or a message was damaged.
        """
        members = self._fl_members
        fresh, behind = members.fresh, members.behind
        if not (fresh or behind):
            return
        giver = next(rank for rank in range(transport.size) if rank not in (*fresh, *behind))
        try:
            if transport.rank in behind:
                self._fl_held = receive_results(transport, giver)
            elif transport.rank in fresh:
                receive_state(self, transport, giver, own)
            elif transport.rank == giver:
                assert self._fl_held is not None or not behind
                for rank in behind:
                    send_results(self._fl_held or {}, transport, rank)
                for rank in fresh:
                    send_state(self, transport, rank)
        except WireError as error:
            transport.close()  # so that the others do not wait, and it is sent once more
            raise TransportError(f"rank {transport.rank}: {error}") from error
        transport.barrier()
        members.all_have_state()

    def _fl_more(self) -> dict[str, Any]:
        """Return what else a newcomer needs."""
        return {}

    def _fl_begin_with(self, more: Mapping[str, Any]) -> None:
        """Begin with what a member has returned from ``_fl_more``."""

    def _fl_connect_anew(self) -> None:
        """Reduce gradients over the present members, from the step and the error feedback that are to go on."""
        roster = self._fl_roster
        self._fl_plan = self.fusion_plan or self._fl_plan
        self._fl_detach()
        names = roster.reduced(self.__dict__["param_groups"])
        engine, timeline = self._fl_connect(names, True)
        self._attach(engine, timeline, roster, names, self._fl_passes, self._fl_sparse_as_dense, self._fl_forward_of)
        if engine is not None:
            engine.step = self._fl_at
            engine.memory.load_state_dict(self._fl_kept)
            plan, alike = self._fl_plan, []
            engine.put(lambda transport: alike.append(_is_known_to_all(plan, transport)))()
            if plan is not None and alike[0]:
                self.adopt_plan(plan)


def _is_known_to_all(plan: FusionPlan | None, transport: Transport) -> bool:
    """Return whether all ranks have this plan from the last generation; a newcomer has none."""
    mine = torch.frombuffer(bytearray(digest(b"" if plan is None else plan.to_bytes())), dtype=torch.uint8)
    every = torch.empty(transport.size, mine.numel(), dtype=torch.uint8, device="cpu")
    with transport.doing("a comparison of the last generation's plans"):
        transport.all_gather(mine, every)
    return bool((every == mine).all())


_live: weakref.WeakSet[ElasticallyStepping] = weakref.WeakSet()
