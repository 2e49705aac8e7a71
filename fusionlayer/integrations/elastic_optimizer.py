"""The methods that users call on a distributed optimizer in an elastic job, whose ranks may be lost and may come."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import context
from ..elastic import Members
from ..errors import ConfigError, TransportError, UsageError, WireError, forget
from ..plan import FusionPlan
from ..planning.codec_rules import AUTO
from ..scheduler import Engine
from ..transport import Transport
from ..wire import digest
from . import handover
from .distributed import Distributed
from .handover import Fingerprint
from .local import Local
from .parameters import local_part
from .reduction import WITH_RESULTS, GradientReduction, StepState
from .sends import FollowsSyncs, sent_by

__all__ = ["ElasticallyStepping", "check_elastic"]


def check_elastic(optimizer: Optimizer, **given: Any) -> None:
    """Raise ``ConfigError`` if an optimizer or one of the arguments ``given`` cannot lose a rank in a step."""
    why = {
        "group": "an elastic job has one group, of all members",
        "overlap_forward": "a step whose update waits for the next forward cannot be taken back",
        "plan": "it is for one number of ranks",
        "policy": "it may have 'auto', which measures steps of one number of ranks",
        "autotune": "it measures steps of one number of ranks",
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

    Gradients stay as backward made them until the results of all buckets are there, and all members have said so in one
    more small message. Only then results replace gradients and the wrapped optimizer makes its update. So if a member
    is lost, the others have gradients, error feedback and state as before: they form the next generation, and exchange
    the same gradients once more. A member that has all results of a step which another one has updated by, makes that
    step too.

    A process that joins takes part from its first ``step`` on: that call waits for the members to end a step, and
    takes over parameters and state instead of an update.
    """

    _fl_members: Members
    _fl_facts: tuple[object, ...] = ()
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
            self._fl_change(None)
            return None
        result = super().step(**kwargs)
        if self._fl_members.change_due:
            self._fl_change(None)
        return result

    # As in ``Distributed``: torch's step hooks run in the wrapped class's step, and this step tells schedulers.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def reconnect(self) -> None:
        """Raise ``UsageError``: members connect by themselves when others are lost or come."""
        raise UsageError("reconnect() in an elastic job, whose members connect by themselves; leave it out")

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced."""
        self._fl_is_attached = False
        super().close()

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
            self._fl_plan: FusionPlan | None = None
            _live.add(self)

    @staticmethod
    def _fl_take(optimizer: weakref.ref[GradientReduction], parameter: Tensor) -> None:
        """Do as ``GradientReduction``. If a rank was lost, let backward go on: ``step`` makes good for it."""
        try:
            GradientReduction._fl_take(optimizer, parameter)
        except TransportError as error:
            self = optimizer()
            if self is None or self._fl_engine is None or self._fl_engine.failure is None:
                raise
            forget(error)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _fl_synchronize(self) -> None:
        """Exchange gradients, again if members were lost meanwhile, until all who are left have the results."""
        if self._fl_state in WITH_RESULTS or not self._fl_members.has_joined:
            return
        results = self._fl_transact(self._fl_exchange)
        taken = [(p.grad, results[name]) for p, name in self._fl_names.items() if name in results]
        if taken:
            gradients, averages = zip(*taken, strict=True)
            torch._foreach_copy_(gradients, averages)
        self._fl_state = StepState.REDUCED

    def _fl_transact(self, exchange: Callable[[Engine], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what ``exchange`` does, once all members have it; none where this is the only one.

        If a rank is lost meanwhile, the rest forms the next generation, and ``exchange`` is called again.

        Args:
            exchange: makes a step of the engine, and returns its results by name. Error feedback apart, it changes
                nothing that a second call would find.
        """
        members = self._fl_members
        counts = False
        results: dict[str, Tensor] = {}
        while not counts:
            engine = self._fl_engine
            if engine is None:
                members.agree_alone()
                self._fl_at += 1
                results = {}
                break
            self._fl_at = before = engine.step
            results = {}
            try:
                results = exchange(engine)
                engine.put(members.agree)()
                engine.memory.forget()
                self._fl_at = engine.step
                counts = True
            except TransportError as error:
                if engine.failure is None:
                    raise
                counts = self._fl_recover(error, engine, before, has_results=bool(results))
        members.step += 1
        return results

    def _fl_exchange(self, engine: Engine) -> dict[str, Tensor]:
        """End a step of the engine; return its results by name."""
        sparse = self._fl_sparse
        assert sparse is not None
        if engine.plan is None and self._fl_plan is not None and not engine.pending:
            # Gradients of a step that was taken back: they make the plan, so they come in backward's order once more.
            parameters = {name: parameter for parameter, name in self._fl_names.items()}
            self._fl_begin(engine)
            for name in chain.from_iterable(bucket.names for bucket in self._fl_plan.buckets):
                if name in parameters:
                    self._fl_hand_over(engine, parameters[name])
        self._fl_submit_rest(engine, sparse)
        sparse.end()
        self._fl_end_step(engine)
        results: dict[str, Tensor] = {}
        for index in sorted(engine.untaken):
            results.update(engine.take(index))
        if self._fl_check is not None:
            self._fl_check.settle()
        return results

    def _fl_recover(self, error: TransportError, engine: Engine, step: int, *, has_results: bool) -> bool:
        """Form the next generation after a failure; return whether the step counts, whose results are here.

        Args:
            error: of the failure.
            engine: which has failed.
            step: its number of the step.
            has_results: whether this member has all results, and only does not know whether the others have.
        """
        members = self._fl_members
        engine.abandon()
        forget(error)
        self._fl_state = StepState.IDLE
        before, after = engine.memory.state_before(), engine.memory.state_dict()
        done = members.step + has_results
        while True:
            try:
                members.change(done, between=False, error=error)
                counts = members.done > members.step
                self._fl_kept, self._fl_at = (after, step + 1) if counts else (before, step)
                self._fl_connect_anew()
                return counts
            except TransportError as again:
                if not members.can_go_on(again):
                    raise
                forget(again)
                error = again

    # ---- between two steps ------------------------------------------------------------------------------------------

    def _fl_change(self, error: TransportError | None) -> None:
        """Form the next generation between two steps, and give newcomers the state, or get it."""
        members = self._fl_members
        fresh = not members.has_joined
        if self._fl_engine is not None:
            self._fl_kept = self._fl_engine.memory.state_dict()
        while True:
            # Before this process asks to join: while the state is sent, all others wait.
            own = handover.fingerprints(handover.parted(_state_of(self))[1]) if fresh else {}
            try:
                members.change(-1 if fresh else members.step, between=True, error=error)
                if self._fl_engine is not None:
                    self._fl_engine.abandon()  # not before: others may still have been in the last step
                self._fl_bring(members.transport, own)
                fresh = False
                self._fl_connect_anew()
                return
            except TransportError as again:
                if not members.can_go_on(again):
                    raise
                forget(again)
                error = again

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

    def _fl_bring(self, transport: Transport, own: Mapping[str, Fingerprint]) -> None:
        """Give newcomers the state of the first member, without loss; all others only wait.

        Args:
            transport: over the members.
            own: of a newcomer, the fingerprints of the tensors that it has.

        Raises:
            TransportError: a member was lost, or a message was damaged.
        """
        members = self._fl_members
        if not members.fresh:
            return
        try:
            if transport.rank in members.fresh:
                _receive_state(self, transport, own)
            elif transport.rank == 0:
                for rank in members.fresh:
                    _send_state(self, transport, rank)
        except WireError as error:
            transport.close()  # so that the others do not wait, and it is sent once more
            raise TransportError(f"rank {transport.rank}: {error}") from error
        transport.barrier()
        members.all_have_state()


def _is_known_to_all(plan: FusionPlan | None, transport: Transport) -> bool:
    """Return whether all ranks have this plan from the last generation; a newcomer has none."""
    mine = torch.frombuffer(bytearray(digest(b"" if plan is None else plan.to_bytes())), dtype=torch.uint8)
    every = torch.empty(transport.size, mine.numel(), dtype=torch.uint8)
    with transport.doing("a comparison of the last generation's plans"):
        transport.all_gather(mine, every)
    return bool((every == mine).all())


def _tensors_of(optimizer: ElasticallyStepping) -> list[Tensor]:
    """Return the tensors that all members hold alike, in the same order on all of them."""
    replicas = optimizer._fl_replicas
    every = (*replicas.named.values(), *replicas.buffers.values())
    return [local_part(x.detach()).as_subclass(Tensor) for x in every]


def _facts_of(optimizer: ElasticallyStepping) -> Tensor:
    """Return (32,) uint8 that differ where a newcomer's first step with the members would be a ``PlanMismatch``."""
    settings = vars(context.settings())
    facts = [optimizer._fl_facts, *(settings[key] for key in _AGREED), optimizer._fl_replicas.lines]
    return torch.frombuffer(bytearray(digest(*facts)), dtype=torch.uint8)


def _state_of(optimizer: ElasticallyStepping) -> dict[str, Any]:
    """Return what members hold alike: parameters, buffers, the optimizer's state and those of shared objects."""
    members = optimizer._fl_members
    return {
        "tensors": _tensors_of(optimizer),
        "optimizer": super(Distributed, optimizer).state_dict(),
        "shared": members.states(),
        "more": optimizer._fl_more(),
        "step": members.step,
        "at": optimizer._fl_at,
    }


def _send_state(optimizer: ElasticallyStepping, transport: Transport, to: int) -> None:
    """Send a newcomer the state, as far as it has another one."""
    transport.send(_facts_of(optimizer), to)
    theirs = json.loads(handover.receive_bytes(transport, to))
    known = {name: handover.Fingerprint(*each) for name, each in theirs.items()}
    handover.send(_state_of(optimizer), known, transport, to)


def _receive_state(optimizer: ElasticallyStepping, transport: Transport, own: Mapping[str, Fingerprint]) -> None:
    """Receive what ``_send_state`` sends.

    Args:
        optimizer: of this process.
        transport: over the members.
        own: fingerprints of the tensors that it has.

    Raises:
        ConfigError: this process has another model, or shares other objects.
    """
    members, tensors, mine = optimizer._fl_members, _tensors_of(optimizer), _facts_of(optimizer)
    theirs = torch.empty_like(mine)
    transport.recv(theirs, 0)
    if not torch.equal(mine, theirs):
        raise ConfigError(
            f"this process has other parameters, options or settings than the members ({len(tensors)} parameters and "
            f"buffers of {sum(x.numel() for x in tensors)} elements); start it with their script and environment"
        )
    handover.send_bytes(json.dumps(own).encode(), transport, 0)
    told = handover.receive(handover.parted(_state_of(optimizer))[1], transport, 0)
    with torch.no_grad():
        for x, came in zip(tensors, told["tensors"], strict=True):
            if came.data_ptr() != x.data_ptr():
                x.copy_(came)
    super(Distributed, optimizer).load_state_dict(told["optimizer"])
    members.load_states(told["shared"])
    members.step, optimizer._fl_at = told["step"], told["at"]
    optimizer._fl_begin_with(told["more"])
    optimizer._fl_state = StepState.IDLE
    super(Distributed, optimizer).zero_grad()


_AGREED = (
    "codec",
    "codec_options",
    "algorithm",
    "ahead",
    "planner",
    "planner_options",
    "error_feedback",
    "feedback_bits",
    "lanes",
    "checksum",
)
"""Settings that are the same on all members."""

_live: weakref.WeakSet[ElasticallyStepping] = weakref.WeakSet()
