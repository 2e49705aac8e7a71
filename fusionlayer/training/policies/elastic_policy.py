"""``ElasticStepPolicy``: steps in an elastic job, whose ranks may fail and may join."""

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
from ..reducer import Reducer
from ..sends import FollowsSyncs, sent_by
from ..step_policy import StepPolicy
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


def check_elastic(optimizer: Optimizer, **given: Any) -> None:
    """Raise ``ConfigError`` if an optimizer or one of the arguments ``given`` cannot lose a rank in a step."""
    why = {
        "group": "an elastic job has one group, of all members",
        "overlap_forward": "a step whose update waits for the next forward cannot be taken back",
        "plan": "it is for one number of ranks",
        "policy": "it may have 'auto', which measures steps of one number of ranks",
        "fallback": "it changes a plan, which is of one number of ranks",
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
    if any(each.is_attached for each in _live):
        raise ConfigError("an elastic job has one DistributedOptimizer; close() the other one first")


class ElasticStepPolicy(StepPolicy):
    """A step is a transaction: either all members make it with the same results, or none does.

    Gradients stay as backward made them until the results of all buckets have arrived. Only then results replace
    gradients and the wrapped optimizer makes its update. So after a failure each of the others either has made the
    step, or has gradients, error feedback and state from before. They form the next generation. If none of them has
    made the step, they exchange the same gradients once more. A rank that has them gives its results to those that lack
    them.

    It can give them, because at the end of a step members report that they have all results. None begins the next step
    or frees results before all have them. The message is in flight while the next forward runs.

    A joining process takes part from its first ``step`` on: that call waits for the members to end a step, and takes
    over parameters and state instead of an update.

    Attributes:
        members: the members of the job.
        facts: state that a newcomer needs besides parameters and settings.
        is_attached: whether the optimizer is not closed.
        at: the engine's step from which a generation of several members continues.
    """

    # A step may have to be made once more, with gradients as they were: ``step`` waits for it and not backward.
    may_end_with_backward = False
    retries = undoable = holds_results = True

    def __init__(self) -> None:
        self.members: Members = context.membership()
        self.facts: tuple[object, ...] = ()
        self.is_attached = False
        self.at = 0
        # A generation also continues with: error feedback, and the plan.
        self._kept: Mapping[str, Any] = {}
        self._plan: FusionPlan | None = None
        # Waits until all members have the results of the last step; and these, until then.
        self._vote: Callable[[], None] | None = None
        self._held: Mapping[str, Tensor] | None = None
        _live.add(self)

    def attach(self, reducer: Reducer) -> None:
        """Begin with the engine of a generation, or with none where this is the only member."""
        super().attach(reducer)
        self.is_attached = True

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """Take the step of the wrapped optimizer with gradients averaged over the participants.

        The first call of a process that joins takes over the members' state instead.
        """
        if closure is not None:
            raise UsageError("step(closure) in an elastic job: the loss of a rank would have to be evaluated again")
        if not self.members.has_joined:
            self._change()
            return None
        result = super().step(update, None, options)
        if self.members.change_due:
            self._change()
        return result

    def reconnect(self) -> None:
        """Raise ``UsageError``: members connect by themselves when others fail or join."""
        raise UsageError("reconnect() in an elastic job, whose members connect by themselves; leave it out")

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced."""
        self.is_attached = False
        self.leave()
        super().close()

    def leave(self) -> None:
        """Give others their missing results of the last step, which need this rank's part."""
        with suppress(TransportError):
            self._settle()
        super().leave()

    def recover(self, error: BaseException) -> bool:
        """Let backward continue if a rank has failed: ``step`` makes the exchange again."""
        engine = self.reducer.engine
        if engine is None or engine.failure is None:
            return False
        forget(error)
        return True

    # ---- a step -----------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Exchange gradients, again if members failed meanwhile, until all remaining members have the results."""
        reducer = self.reducer
        if reducer.state in WITH_RESULTS or not self.members.has_joined:
            return
        results = self._transact(self._exchange)
        for parameter, name in reducer.names.items():
            if parameter.grad is None and name in results:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        taken = [(p.grad, results[name]) for p, name in reducer.names.items() if name in results]
        if taken:
            gradients, averages = zip(*taken, strict=True)
            torch._foreach_copy_(gradients, averages)
        reducer.state = StepState.REDUCED

    def _transact(self, exchange: Callable[[Engine], dict[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return the results of ``exchange``, its own or another member's; none for a single member.

        If a rank fails before any remaining member has all results, the rest forms the next generation, and
        ``exchange`` is called again.

        Args:
            exchange: makes a step of the engine, and returns its results by name. Error feedback apart, it changes
                nothing that a second call would find.
        """
        members = self.members
        results: Mapping[str, Tensor] | None = None
        while results is None:
            engine = self.reducer.engine
            if engine is None:
                members.agree_alone()
                self.at += 1
                results = {}
                break
            self.at = engine.step
            try:
                self._settle()
                results = exchange(engine)
                self._vote = engine.put(partial(members.agree, members.step + 1))
                self._held, self.at = results, engine.step
            except TransportError as error:
                if engine.failure is None:
                    raise
                results = self._change(error)
        members.step += 1
        return results

    def _settle(self) -> None:
        """Wait until all members have the results of the last step. Until then this one keeps them for the others."""
        if self._vote is not None:
            assert self.reducer.engine is not None
            self._vote()
            self.reducer.engine.memory.forget()
            self._vote = self._held = None
            self.members.settle()

    def before_step(self) -> None:
        """Wait until all members have the results of the last step."""
        try:
            self._settle()
        except TransportError:
            self.reducer.state = StepState.REDUCING  # its gradients are reduced in the next generation
            raise

    def _exchange(self, engine: Engine) -> dict[str, Tensor]:
        """End a step of the engine; return its results by name."""
        reducer, sparse = self.reducer, self.reducer.sparse
        assert sparse is not None
        if engine.plan is None and self._plan is not None and not engine.pending:
            # Gradients of an undone step: they make the plan, so they come in backward's order once more.
            parameters = {name: parameter for parameter, name in reducer.names.items()}
            reducer.begin()
            for name in chain.from_iterable(bucket.names for bucket in self._plan.buckets):
                if name in parameters and parameters[name].grad is not None:
                    reducer.submit(parameters[name])
        reducer.submit_rest()
        reducer.refuse_changed()
        sparse.end()
        engine.end_step()
        if reducer.check is not None:
            reducer.check.begin()
        results: dict[str, Tensor] = {}
        for index in sorted(engine.untaken):
            results.update(engine.take(index))
        unused, reducer.unused = engine.unused(), {}
        engine.memory.restore(unused)
        if reducer.check is not None:
            reducer.check.settle()
        return {name: result for name, result in results.items() if name not in unused}

    # ---- a change ---------------------------------------------------------------------------------------------------

    def _change(self, error: TransportError | None = None) -> Mapping[str, Tensor] | None:
        """Form the next generation; return the results of the present step, if another member has them, or None."""
        members, engine, at = self.members, self.reducer.engine, self.at
        fresh, between = not members.has_joined, error is None
        lacks = not between and self._held is None
        self._vote = None
        if error is not None and engine is not None:
            engine.abandon()
            forget(error)
            self.reducer.state = StepState.IDLE
        after: Mapping[str, Any] = {} if engine is None else engine.memory.state_dict()
        before = engine.memory.state_before() if engine is not None and lacks else after
        if engine is not None and lacks:
            after = without_unsure(after, engine.plan)
        while True:
            # Before this process asks to join: while the state is sent, all others wait.
            own = own_fingerprints(self) if fresh else {}
            gained = lacks and self._held is not None
            try:
                members.change(-1 if fresh else members.step + gained, between=between, error=error)
                if engine is not None:
                    engine.abandon()  # not before, between two steps: others may still have been in the last one
                self._bring(members.transport, own)
                fresh, gained = False, lacks and self._held is not None
                self._kept, self.at = (after, at + 1) if gained else (before, self.at)
                self._connect_anew()
                results, self._held = self._held, None
                return_free_memory()  # the buffers of ended generations lay between what stays
                return results if gained else None
            except TransportError as again:
                if not members.can_go_on(again):
                    raise
                forget(again)
                error = again

    def _bring(self, transport: Transport, own: Mapping[str, Fingerprint]) -> None:
        """Give members that lack it the results of the last step, or the whole state, without loss; all others only
        wait.
        """
        members = self.members
        fresh, behind = members.fresh, members.behind
        if not (fresh or behind):
            return
        giver = next(rank for rank in range(transport.size) if rank not in (*fresh, *behind))
        try:
            if transport.rank in behind:
                self._held = receive_results(transport, giver)
            elif transport.rank in fresh:
                receive_state(self, transport, giver, own)
            elif transport.rank == giver:
                assert self._held is not None or not behind
                for rank in behind:
                    send_results(self._held or {}, transport, rank)
                for rank in fresh:
                    send_state(self, transport, rank)
        except WireError as error:
            transport.close()  # so that the others do not wait, and it is sent once more
            raise TransportError(f"rank {transport.rank}: {error}") from error
        transport.barrier()
        members.all_have_state()

    def more(self) -> dict[str, Any]:
        """Return the rest of a joining process's state."""
        return {}

    def begin_with(self, more: Mapping[str, Any]) -> None:
        """Begin with the result of a member's ``more``."""

    def _connect_anew(self) -> None:
        """Reduce gradients over the present members, from the step and the error feedback that are to continue."""
        reducer = self.reducer
        self._plan = (None if reducer.engine is None else reducer.engine.plan) or self._plan
        reducer.connect_anew()
        engine = reducer.engine
        if engine is not None:
            engine.step = self.at
            engine.memory.load_state_dict(self._kept)
            plan, alike = self._plan, []
            engine.put(lambda transport: alike.append(_is_known_to_all(plan, transport)))()
            if plan is not None and alike[0]:
                self.adopt_plan(plan)


def _is_known_to_all(plan: FusionPlan | None, transport: Transport) -> bool:
    """Return whether all ranks have this plan from the last generation; a newcomer has none."""
    with transport.doing("a comparison of the last generation's plans"):
        return transport.all_equal(digest(b"" if plan is None else plan.to_bytes()))


_live: weakref.WeakSet[ElasticStepPolicy] = weakref.WeakSet()
