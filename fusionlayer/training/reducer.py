"""``Reducer``: hands gradients to the engine as backward makes them, and puts results back at the end of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle

from ..base.errors import ConfigError, again
from ..observe.timeline import Timeline
from ..scheduler import Engine
from . import live
from .backward_end import NO_BACKWARD
from .connection import Connection
from .enrolment import what_changed
from .overlap import ForwardOverlap
from .parameters import local_part
from .passes import BackwardPasses
from .phases import StepPhases
from .replicas import ReplicaCheck
from .snapshots import Snapshot, changed_gradient, snapshot
from .sparse import ByName, SparseGradients
from .step_state import WITH_RESULTS, StepState


class Reducer:
    """The gradient reduction of a distributed optimizer; ``Distributed`` holds one.

    One thread at a time moves its state, so it needs no lock. The thread that runs backward calls the hooks, while the
    training thread waits for backward. The training thread calls everything else. While it waits in ``hvd.join``, a
    thread of ``join`` replaces it.

    Args:
        optimizer: the wrapped one, not kept alive.
        connection: makes engines and plans; it has the policy and the parameters.
        names: names of the parameters that are reduced.
        passes_per_step: backward passes that accumulate a gradient before it is reduced.
        sparse_as_dense: make sparse gradients dense.
        refuse_averaged: raises ``ConfigError`` if something else averages gradients of these parameters.
        hook: called with ``optimizer`` and a parameter when backward has accumulated its gradient (``hook.take``).

    Attributes:
        optimizer: returns the optimizer.
        base: its class, whose methods ``Distributed`` overrides.
        connection, policy, enrolment, replicas, names: the given ones, or the connection's.
        engine: sums gradients; None in a job of one rank, and after ``close``.
        timeline: record of phases and updates.
        state: the progress of the step.
        updating: the wrapped optimizer's own code runs within a step, and reads ``param_groups`` unchanged.
        passes: how often backward has still to compute each gradient.
        given: gradients as they were submitted, by parameter, until their results have arrived.
        results: gradients after a backward that has waited for results, until ``step``.
        unused: of parameters without a gradient, zeros, or the sum of other ranks.
        settled: parameters whose gradients are results of an earlier backward of this step.
        awaited: the backward at whose end the step ends.
        learns: ranks had no plan when the last step began, so hooks learn how often a backward computes each gradient.
        ends_with_backward: the end of ``backward`` waits for results. False: ``step`` does.
        finds_unused: ranks find out which parameters none of them has used; those are not updated.
        skips_synchronize: within ``skip_synchronize``.
        check: compares parameters over ranks; None: nothing does.
        sparse: the sparse gradients; None without an engine.
        phases: records forward and backward; None without a timeline.
        overlap: lets the next forward run before results have arrived; None without ``overlap_forward``.
        restored: the step of this rank's own state that was loaded last.
    """

    engine: Engine | None
    timeline: Timeline
    sparse: SparseGradients | None
    overlap: ForwardOverlap | None
    check: ReplicaCheck | None

    def __init__(
        self,
        optimizer: Optimizer,
        connection: Connection,
        names: dict[Tensor, str],
        passes_per_step: int,
        sparse_as_dense: bool,
        refuse_averaged: Callable[[Mapping[Tensor, str]], None],
        hook: Callable[[Callable[[], Any], Tensor], None],
    ) -> None:
        self.optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.base: Any = type(optimizer)
        self.connection = connection
        self.policy, self.enrolment, self.replicas = connection.policy, connection.enrolment, connection.replicas
        self.names = names
        self.passes, self.refuse_averaged = BackwardPasses(names, passes_per_step), refuse_averaged
        self.finds_unused, self.skips_synchronize, self.updating = True, False, False
        self.restored: int | None = None
        self._sparse_as_dense, self._hook = sparse_as_dense, hook
        self._makes_rows = isinstance(optimizer, SparseAdam)
        self._enlist: Callable[[Optimizer], ByName] | None = None
        self._release: Callable[[], object] = bool  # there is nothing to release without an engine
        self._connect()
        # The policy refers to this object, which should end with the optimizer.
        weakref.finalize(optimizer, _let_go, weakref.ref(self)).atexit = False

    # ---- connecting -------------------------------------------------------------------------------------------------

    def _connect(self, rejoining: bool = False) -> None:
        """Begin with an engine over the present job."""
        optimizer, policy = self.optimizer(), self.policy
        self.engine, self.timeline = engine, timeline = self.connection.connect(self.names, rejoining)
        self.state = StepState.IDLE
        self.passes = BackwardPasses(self.names, self.passes.per_step)
        self.given: dict[Tensor, Snapshot] = {}
        self.results: dict[Tensor, Snapshot] = {}
        self.unused: dict[Tensor, Tensor] = {}
        self.settled: frozenset[Tensor] = frozenset()
        self._new: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self.awaited = NO_BACKWARD
        self._looked = False
        self.learns = engine is not None and engine.plan is None
        overlapped = self.connection.overlapped
        self.ends_with_backward = policy.may_end_with_backward and self.finds_unused and overlapped is None
        self.sparse = self.overlap = self.check = None
        self.phases: StepPhases | None = None
        if engine is not None:
            engine.finds_unused = self.finds_unused
            self.check = self.replicas.check(engine.put, optimizer=optimizer)
            self.sparse = SparseGradients(engine, self._sparse_as_dense)
            if self._enlist is not None:
                self.sparse.by_name = self._enlist(optimizer)
            self._watch([*self.names])
            if timeline.enabled:
                self.phases = StepPhases(engine, timeline)
                self._hooks += self.phases.watch()
            if overlapped is not None:
                # The model's hooks keep the optimizer alive: its last update may come after the user's last reference.
                self.overlap = ForwardOverlap(engine, self.names, partial(self._update, optimizer))
                self._hooks += self.overlap.watch(overlapped)
            release = weakref.finalize(optimizer, live.release, engine, self._hooks)
            release.atexit = False
            self._release = release
            live.enlist(self)
        policy.attach(self)

    def _watch(self, parameters: Sequence[Tensor]) -> None:
        """Register the hooks that receive gradients."""
        if self.policy.takes_gradients:
            # Parameters live longer than the optimizer: their hooks must neither keep it alive nor outlive it.
            hook = partial(self._hook, self.optimizer)
            self._hooks += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def end_in_step(self, enlist: Callable[[Optimizer], ByName] | None = None) -> None:
        """Wait in ``step`` and ``synchronize`` alone, and give unused parameters zeros, as Horovod does.

        ``enlist`` makes the operations by name for sparse gradients, now and after each ``reconnect``.
        """
        self._enlist, self.finds_unused, self.ends_with_backward = enlist, False, False
        if self.engine is not None:
            self.engine.finds_unused = False
        if self.sparse is not None and enlist is not None:
            self.sparse.by_name = enlist(self.optimizer())

    def connect_anew(self) -> None:
        """Close the engine, and connect those parameters that require gradients now."""
        self._detach()
        self.names = self.enrolment.reduced(self.groups)
        self._connect(rejoining=True)

    def close(self) -> None:
        """End the background threads; gradients are no longer reduced."""
        self.flush()
        self._detach()

    def _detach(self) -> None:
        live.forget(self)
        try:
            self._release()
        finally:
            self.engine = self.sparse = self.overlap = self.check = None

    # ---- one step of the engine -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step of the engine, before its first tensor, and notify ranks that have joined."""
        if self.policy.before_step is not None:
            self.policy.before_step()
        if not self._looked:
            self.refuse_later()
        groups = self.optimizer().__dict__["param_groups"]
        if self.enrolment.changed(groups):
            self._enrol(groups)
        self.learns = self.learns and self.engine is not None and self.engine.plan is None
        self.state = StepState.REDUCING
        if self.sparse is not None and self.sparse.by_name is not None:
            self.sparse.by_name.begin()

    def refuse_later(self) -> None:
        """Raise ``ConfigError``, in the first step, if the model came into DDP and the like after it was given here."""
        if not self._looked:
            self.refuse_averaged(self.names)
            self._looked = True

    def plan_anew(self, names: Mapping[Tensor, str], why: str) -> None:
        """Let the step that begins make a plan for the parameters in ``names``; ``why`` is a clause for the log."""
        assert self.engine is not None
        self.connection.plan_anew(self.engine, names, why)
        self.learns = True

    def _enrol(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """From this step on reduce the parameters that now require gradients, by a new plan on which the ranks
        agree."""
        sparse, before = self.sparse, self.names
        assert sparse is not None
        names = self.enrolment.reduced(groups, self.policy.is_in_flight)
        self.replicas.add(self.enrolment.by_name())
        if names.keys() == before.keys():
            return
        try:
            live.refuse_twice(names, but=self)
            self.refuse_averaged(names)
            self.plan_anew(names, what_changed(before, names))
        except ConfigError:
            self.enrolment.look_again = True  # or the next step would leave them out without a word
            raise
        self._new = [parameter for parameter in names if parameter not in self.passes.left]
        self.names = names
        self.passes.add(self._new)
        self._watch(self._new)
        sparse.decide_anew()
        if self.overlap is not None:
            assert self.connection.overlapped is not None
            self.overlap.enrol(names)
            new = [names[each] for each in self._new]
            self._hooks += self.overlap.watch_forward(self.connection.overlapped, new)

    def submit(self, parameter: Tensor) -> None:
        """Start the reduction of a gradient: on the engine, or by name if its rows are gathered."""
        engine, sparse, name = self.engine, self.sparse, self.names[parameter]
        assert engine is not None and sparse is not None
        if not sparse.take(name, parameter):
            gradient = sparse.dense(name, parameter)
            engine.submit(name, local_part(gradient))
            self.given[parameter] = snapshot(gradient)

    def contribute(self, parameter: Tensor) -> None:
        """Let the policy replace a gradient by the values to send."""
        assert self.policy.contribution is not None
        before, self.updating = self.updating, True
        try:
            self.policy.contribution(parameter)
        finally:
            self.updating = before

    def submit_rest(self) -> None:
        """Submit every gradient that backward did not make, as zeros: other ranks may have gradients there."""
        engine, sparse = self.engine, self.sparse
        assert engine is not None and sparse is not None
        if self.phases is not None:
            self.phases.end_backward()
        if self.overlap is not None:
            self.overlap.flush()
        if self.state is not StepState.REDUCING:
            self.begin()
        self.enrolment.refuse_unreduced(self.optimizer().__dict__["param_groups"])
        if engine.failure is not None:
            raise again(engine.failure)
        if sparse.gathered is None or len(self.given) < len(self.names):
            self._submit_missing(engine, sparse)
        self.settled = frozenset()
        self.state = StepState.IDLE
        self.passes.left.update(self.passes.whole)

    def _submit_missing(self, engine: Engine, sparse: SparseGradients) -> None:
        submitted = engine.pending
        new, self._new = self._new, []
        for parameter in new if sparse.gathered is None else ():
            name = self.names[parameter]
            if name not in submitted:
                sparse.take(name, parameter)  # a new hook may have come too late to note a sparse gradient
        sparse.agree()
        for parameter, name in self.names.items():
            if name not in submitted and parameter not in sparse.gathers:
                settled = parameter in self.settled
                if self.policy.contribution is not None and not settled:
                    self.contribute(parameter)
                if self.finds_unused and (settled or parameter.grad is None):
                    # It gets no gradient unless another rank has one.
                    zeros = torch.zeros_like(parameter, requires_grad=False)
                    engine.submit_unused(name, local_part(zeros))
                    self.unused[parameter] = zeros
                else:
                    self.submit(parameter)

    def reduce(self) -> dict[Tensor, Snapshot]:
        """End the engine's step and put its results into the gradients, unless they are there already; return those."""
        engine, sparse = self.engine, self.sparse
        if engine is None or sparse is None or self.state in WITH_RESULTS:
            return {}
        self.submit_rest()
        gathers = sparse.end() if sparse.gathers else {}
        engine.end_step()
        if self.check is not None:
            self.check.begin()  # nothing changes parameters now
        if self.overlap is not None:
            changed = self.refuse_changed()
            self.overlap.deliver()
        else:
            engine.take_all()
            changed = self.refuse_changed()
            unused = engine.unused()
            if self.unused or unused:
                changed.update(self._assign_unused(engine, unused))
        for parameter, wait in gathers.items():
            parameter.grad = wait()
        if self._makes_rows:
            sparse.make_sparse(self.names)
        self.state = StepState.REDUCED
        if self.check is not None and self.check.waiting is not None:
            self.check.settle()
        return changed

    def refuse_changed(self) -> dict[Tensor, Snapshot]:
        """Fail if a gradient differs from the submitted one, except for the result that may have replaced its values.

        Returns the submitted gradients, by parameter.
        """
        given, self.given = self.given, {}
        for parameter, (gradient, version, address) in given.items():
            same = parameter.grad is gradient and gradient._version == version
            if not same or type(gradient) is Tensor and gradient.data_ptr() != address:
                assert self.engine is not None
                self.engine.fail(changed_gradient(self.enrolment.names.get(parameter)))
            if gradient.requires_grad:
                # backward(create_graph=True) may have saved the values that the result has replaced.
                increment_version(gradient)
                given[parameter] = snapshot(gradient)
        return given

    def _assign_unused(self, engine: Engine, unused: frozenset[str]) -> dict[Tensor, Snapshot]:
        """Let results be the gradients of parameters that only other ranks have used; return those.

        Parameters that no rank has used, whose names are in ``unused``, keep what they owe.
        """
        mine, self.unused = self.unused, {}
        engine.memory.restore(unused)
        assigned: dict[Tensor, Snapshot] = {}
        for parameter, result in mine.items():
            if self.names[parameter] not in unused:
                parameter.grad = result
                assigned[parameter] = snapshot(result)
        return assigned

    # ---- between steps ----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step has begun to reduce gradients and has not ended."""
        engine, sparse = self.engine, self.sparse
        if engine is None or sparse is None or self.state is not StepState.REDUCING:
            return False
        return self.policy.retries or engine.failure is None and bool(engine.pending or sparse.pending)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's present parameter groups."""
        return cast(list[dict[str, Any]], vars(self.optimizer())["param_groups"])

    def forget_results(self) -> None:
        """Note that the gradients no longer hold reduced values."""
        self.results = {}
        if self.state in WITH_RESULTS:
            self.state = StepState.IDLE

    def flush(self) -> None:
        """Make the updates that wait for the next forward, unless a newer backward has already made gradients."""
        if self.overlap is not None and self.state is StepState.STEPPED and not self.updating:
            self.overlap.flush()
        if self.check is not None:
            self.check.finish()

    def _update(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Take the wrapped optimizer's step with the parameter groups of one bucket; ``ForwardOverlap`` calls it."""
        own, vars(optimizer)["param_groups"] = vars(optimizer)["param_groups"], groups
        before, self.updating = self.updating, True
        try:
            with self.timeline.span("UPDATE", step=-1 if self.engine is None else self.engine.step - 1):
                self.base.step(optimizer)
        finally:
            vars(optimizer)["param_groups"] = own
            self.updating = before


def _let_go(me: Callable[[], Reducer | None]) -> None:
    """Break the circle of references between a reducer and its policy, so that both end with the optimizer."""
    reducer = me()
    if reducer is not None:
        reducer.policy.detach()
