"""``DistributedOptimizer``: an optimizer whose gradients are reduced over ranks while backward computes them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from .. import context
from ..codecs import Codec
from ..errors import ConfigError, UsageError
from ..functional import Average, Group, ReduceOp, check_op
from ..plan import FusionPlan
from ..planning.autotune import Autotune, Autotuner
from ..planning.codec_rules import CodecRules
from ..planning.profile import Profile
from ..scheduler import Engine, Scaling
from ..scheduler.planners import Planner
from ..timeline import Timeline
from . import overlap
from .construction import GradientOptions, make_engine
from .overlap import ForwardOverlap
from .parameters import describe, local_part, name_parameters, one_device
from .phases import StepPhases

__all__ = ["ByName", "DistributedOptimizer"]


@dataclass(frozen=True)
class ByName:
    """What operations by name do for an optimizer, in a job that has them.

    Attributes:
        begin: told when a step begins.
        gather: begins the reduction of a sparse gradient, given its name; returns what waits for the result.
    """

    begin: Callable[[], object]
    gather: Callable[[str, Tensor], Callable[[], Tensor]]


def DistributedOptimizer(  # noqa: N802 - the name that Horovod's users know
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    planner: str | Planner | None = None,
    plan: FusionPlan | str | Path | None = None,
    error_feedback: bool | None = None,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    overlap_forward: nn.Module | None = None,
    ahead: bool | None = None,
    group: Group = None,
    profile: Profile | str | Path | None = None,
    policy: CodecRules | str | Path | None = None,
    fidelity: str | None = None,
    replan: bool | None = None,
    autotune: bool | Autotune | None = None,
    **codec_options: Any,
) -> Optimizer:
    """Return ``optimizer`` with gradients averaged over ranks, fused and compressed, during backward.

    It is the same object, still an instance of its own class, with its parameter groups, state and learning-rate
    schedulers. In a job of one rank it does nothing more.

    Each gradient is handed to a background thread when backward has accumulated it; ``step`` waits for the results. The
    first step learns the order of the gradients and makes the fusion plan. Parameters without a gradient count as
    zeros, so ranks may take different paths through the model.

    Args:
        optimizer: any optimizer over parameters of one device.
        named_parameters: ``model.named_parameters()``; without it tensors are known by their place.
        codec: name or codec of what travels; None takes the configured one (``raw`` by default). "auto" measures the
            first steps, in which gradients travel as they are, and chooses for each gradient, or one codec for all,
            by what the step is predicted to take; the log says why.
        algorithm: name of a collective; None chooses by codec and number of ranks.
        planner: name or planner that fuses gradients into buckets; None takes the configured one. One that needs costs
            begins with the plan of ``tapered``, measures the first steps and takes over when it knows them (CPU only).
        plan: a fusion plan, or a file with one, instead of a planner; it names its own codecs.
        error_feedback: send what the codec lost with the next gradient; None: where the codec is biased and coarse.
            Kept in ``state_dict()``, for each rank its own.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: gradients are accumulated over so many backward passes before they are reduced.
        gradient_predivide_factor: with ``Average``: divide by it before the sum, and by the rest after it.
        num_groups: deprecated name for an integer ``groups``.
        groups: number of buckets of about equally many tensors, or lists of the tensors that belong together; each
            group is one bucket.
        sparse_as_dense: make sparse gradients dense; without it they are refused.
        overlap_forward: the model, whose next forward may begin while results are still under way: ``step`` returns at
            once, and the parameters of each module are updated just before it runs, to the same values. It pays where
            the network is the bottleneck. Between ``step`` and the next forward, call ``synchronize`` before you look
            at parameters other than by ``state_dict()``; after ``step`` gradients are gone. Parameters are used in
            the forward of the module that has them, and the optimizer is one of torch's that treats each parameter by
            itself.
        ahead: encode each gradient by itself as it arrives, ahead of fusion; False encodes whole buckets. None: as
            ``algorithm`` needs it, or without one as is best for the codec: ahead for those that sparsify.
        group: process group or transport to reduce over; None means all ranks. For a DTensor model whose parameters
            are sharded by tensor parallelism: the ranks that hold the same parts.
        profile: measured costs of this model, or a file with them, for what needs costs: then nothing is measured
            first.
        policy: rules that give each gradient a codec, or a file with them, in place of ``codec``.
        fidelity: of ``codec="auto"``: "lossless", "near_lossless" or "aggressive"; None takes the configured one.
        replan: what plans by costs measures and plans again when steps have drifted; None takes the configured value.
        autotune: while training runs, search for the number and sizes of buckets with the shortest measured steps,
            beginning with the plan that there is without; an ``Autotune`` says how. None takes the configured value.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError: what the arguments cannot be, with what they can.
        UsageError: from ``step``, ``zero_grad`` or ``backward`` when they come in an order that has no meaning.
        PlanMismatch, TransportError: from ``step`` or ``synchronize``; see ``fusionlayer.errors``.
    """
    check_op(op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigError("gradient_predivide_factor needs op=Average; leave it at 1.0 with op=Sum")
    if not gradient_predivide_factor > 0:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor}; expected a number above 0")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}; expected at least 1")
    if num_groups:
        warnings.warn("num_groups is deprecated; give groups=<number>", DeprecationWarning, stacklevel=2)
        groups = groups if groups is not None else num_groups
    names = name_parameters(optimizer, named_parameters, group)
    _refuse_twice(names)
    if overlap_forward is not None:
        overlap.check(optimizer, names, overlap_forward)
    if isinstance(optimizer, LBFGS) and context.transport(group).size > 1:
        raise ConfigError("LBFGS decides by its rank's own loss, so ranks would part; use another optimizer")
    options = GradientOptions(
        codec=codec,
        codec_options=codec_options,
        algorithm=algorithm,
        ahead=ahead,
        planner=planner,
        plan=plan,
        profile=profile,
        policy=policy,
        fidelity=fidelity,
        replan=replan,
        error_feedback=error_feedback,
        autotune=autotune,
    )

    def connect() -> tuple[Engine | None, Timeline]:
        transport = context.transport(group)
        if transport.size == 1:
            return None, Timeline(None, 0)
        scaling = Scaling(1 / transport.size if op is Average else 1.0)
        if op is Average and gradient_predivide_factor != 1.0:
            scaling = Scaling(1 / gradient_predivide_factor, gradient_predivide_factor / transport.size)
        device = one_device(names)
        timeline = Timeline(context.settings().timeline, transport.rank)
        engine = make_engine(
            options,
            describe(names, groups),
            transport,
            device,
            scaling=scaling,
            timeline=timeline,
            overlap_forward=overlap_forward is not None,
        )
        return engine, timeline

    engine, timeline = connect()
    base = type(optimizer)
    # A scheduler that was made before has put a wrapper here, which would go past the class's new step().
    vars(optimizer).pop("step", None)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__, "__module__": __name__})
    assert isinstance(optimizer, _Distributed)
    optimizer._fl_connect = connect
    optimizer._attach(engine, timeline, names, backward_passes_per_step, sparse_as_dense, overlap_forward)
    return optimizer


class _Distributed(Optimizer):
    """What the wrapped optimizer's class gains; it stands before that class in the order of resolution."""

    _fl_engine: Engine | None
    _fl_connect: Callable[[], tuple[Engine | None, Timeline]]
    _fl_enlist: Callable[[_Distributed], ByName] | None = None

    def _attach(
        self,
        engine: Engine | None,
        timeline: Timeline,
        names: dict[Tensor, str],
        passes_per_step: int,
        sparse_as_dense: bool,
        overlap_forward: nn.Module | None,
    ) -> None:
        self._fl_engine = engine
        self._fl_names = names
        self._fl_passes = passes_per_step
        self._fl_sparse_as_dense = sparse_as_dense
        self._fl_passes_left = dict.fromkeys(names, passes_per_step)
        self._fl_reduced = False
        self._fl_stepped = False
        self._fl_updating = False
        self._fl_asked_to_synchronize = False
        self._fl_step_synchronizes = True
        self._fl_release: Callable[[], object] = _nothing
        self._fl_overlap: ForwardOverlap | None = None
        self._fl_forward_of = overlap_forward
        self._fl_timeline = timeline
        self._fl_phases: StepPhases | None = None
        self._fl_begun = False
        self._fl_by_name: ByName | None = None
        self._fl_sparse_here: set[str] = set()
        self._fl_gathered: frozenset[str] | None = None
        self._fl_later_as_dense = False
        self._fl_gathers: dict[Tensor, Callable[[], Tensor]] = {}
        if engine is not None:
            if self._fl_enlist is not None:
                self._fl_by_name = self._fl_enlist(self)
            if timeline.enabled:
                self._fl_phases = StepPhases(engine, timeline)
            # The parameters live longer than the optimizer: their hooks must neither keep it nor outlive it.
            me = weakref.ref(self)
            hooks = [p.register_post_accumulate_grad_hook(partial(_take, me)) for p in names]
            if self._fl_phases is not None:
                hooks += self._fl_phases.watch()
            if overlap_forward is not None:
                self._fl_overlap = ForwardOverlap(engine, names, self._fl_update)
                hooks += self._fl_overlap.watch(overlap_forward)
            self._fl_release = weakref.finalize(self, _release, engine, hooks)
            self._fl_release.atexit = False
            with _live_lock:
                _live.add(self)

    @property
    def _fl_pending(self) -> bool:
        """Whether gradients are being reduced, in a step that has not ended."""
        engine = self._fl_engine
        if engine is None or engine.failure is not None:
            return False
        return bool(engine.pending or self._fl_gathers or self._fl_sparse_here)

    @property
    def _fl_step_number(self) -> int:
        return 0 if self._fl_engine is None else self._fl_engine.step

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The plan of the last step, for its ``to_yaml``; None before the first step and in a job of one rank."""
        return None if self._fl_engine is None else self._fl_engine.plan

    @property
    def cost_profile(self) -> Profile | None:
        """The costs that the plan was made by; None while there are none, and for planners that need none.

        Saved by its ``to_yaml`` it serves ``fusionlayer explain`` beside the plan, and as ``profile`` the next run.
        """
        from ..planning.online import OnlinePlanner  # not above: it brings the profiler along

        plan_controller = None if self._fl_engine is None else self._fl_engine.plan_controller
        plan_controller = plan_controller.first if isinstance(plan_controller, Autotuner) else plan_controller
        return plan_controller.profile if isinstance(plan_controller, OnlinePlanner) else None

    def _fl_take(self, parameter: Tensor) -> None:
        """Hand a gradient over; called by backward when it has been accumulated."""
        engine = self._fl_engine
        assert engine is not None
        if engine.failure is not None:
            raise engine.failure
        if self._fl_passes_left[parameter] <= 0:
            raise UsageError(
                f"gradient {self._fl_names[parameter]!r} was computed more than {self._fl_passes} times before step(); "
                "call step() or synchronize() after each backward, or raise backward_passes_per_step to accumulate "
                "gradients locally"
            )
        if self._fl_overlap is not None:
            self._fl_overlap.check_used(self._fl_names[parameter])
        self._fl_passes_left[parameter] -= 1
        self._fl_reduced = self._fl_stepped = False
        if self._fl_passes_left[parameter] == 0:
            if not self._fl_begun:
                self._fl_begin()
            self._fl_hand_over(engine, parameter)
        if self._fl_phases is not None:
            self._fl_phases.note_gradient()

    def _fl_enlist_by(self, enlist: Callable[[_Distributed], ByName]) -> None:
        """Use operations by name, which ``enlist`` makes, now and after each ``reconnect``."""
        self._fl_enlist = enlist
        if self._fl_engine is not None:
            self._fl_by_name = enlist(self)

    def _fl_begin(self) -> None:
        if not self._fl_begun:
            self._fl_begun = True
            if self._fl_by_name is not None:
                self._fl_by_name.begin()

    def _fl_hand_over(self, engine: Engine, parameter: Tensor) -> None:
        """Have a gradient reduced: by the engine, or if it is one of the sparse ones by name."""
        name, gradient = self._fl_names[parameter], parameter.grad
        if self._fl_gathered is None:
            if gradient is not None and gradient.is_sparse and self._fl_may_gather(engine):
                self._fl_sparse_here.add(name)  # the first step's end tells which ones are sparse on any rank
                return
        elif name in self._fl_gathered:
            assert self._fl_by_name is not None
            self._fl_gathers[parameter] = self._fl_by_name.gather(name, _sparse(parameter))
            return
        if gradient is None or type(gradient) is not Tensor or gradient.is_sparse:
            gradient = self._fl_gradient(parameter)
        engine.submit(name, gradient)

    def _fl_may_gather(self, engine: Engine) -> bool:
        return self._fl_by_name is not None and not self._fl_sparse_as_dense and engine.may_leave_out

    def _fl_agree_on_sparse(self, engine: Engine) -> frozenset[str]:
        """Settle, in the first step, which gradients are gathered: those that are sparse on any rank."""
        if self._fl_gathered is None:
            asks = self._fl_by_name is not None and engine.may_leave_out
            self._fl_gathered = engine.leave_out(self._fl_sparse_here) if asks else frozenset()
            self._fl_later_as_dense = asks
            self._fl_sparse_here.clear()
        return self._fl_gathered

    def _fl_stand_in(self) -> None:
        """Take part in a step with zeros for gradients that backward has not handed over; nothing is updated by it."""
        engine = self._fl_engine
        assert engine is not None
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        self._fl_flush()
        self._fl_begin()
        gathered = self._fl_agree_on_sparse(engine)
        pending = engine.pending
        # The first step's order of arrival makes the plan: from the back is what backward would come close to.
        for parameter, name in reversed(self._fl_names.items()):
            if name not in pending and name not in gathered:
                engine.submit(name, local_part(torch.zeros_like(parameter)))
        gathers, self._fl_gathers = self._fl_gathers, {}
        engine.end_step()
        for index in sorted(engine.untaken):
            engine.take(index)
        for wait in gathers.values():
            wait()
        self._fl_begun = False
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)

    def _fl_gradient(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            # One that was not sparse in the first step has its place in the plan.
            if not self._fl_sparse_as_dense and not self._fl_later_as_dense:
                fixed = "plan, autotune, overlap_forward and planning by costs"
                instead = f", or leave out {fixed}" if self._fl_by_name is not None else ""
                raise ConfigError(
                    f"gradient {self._fl_names[parameter]!r} is sparse; give sparse_as_dense=True to "
                    f"DistributedOptimizer, or sparse=False to the embedding{instead}"
                )
            parameter.grad = gradient = gradient.to_dense()
        return local_part(gradient)

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one; ``step`` does it by itself.

        Call it before the gradients are looked at, to clip them for instance, and ``step`` in ``skip_synchronize``.
        With ``overlap_forward``, between ``step`` and the next backward: wait until every parameter is the updated one.

        Raises:
            PlanMismatch: ranks disagree on model, plan or options.
            TransportError: a peer was lost, stopped or too late.
        """
        if self._fl_overlap is not None and self._fl_stepped:
            self._fl_overlap.flush()
            return
        self._fl_synchronize()
        self._fl_asked_to_synchronize = True

    def _fl_synchronize(self) -> None:
        engine = self._fl_engine
        if engine is None or self._fl_reduced:
            return
        self._fl_submit_rest(engine)
        gathers, self._fl_gathers = self._fl_gathers, {}
        if self._fl_overlap is not None:
            engine.end_step()
            self._fl_overlap.deliver()
        else:
            engine.synchronize()
        for parameter, wait in gathers.items():
            parameter.grad = wait()
        self._fl_reduced = True

    def _fl_submit_rest(self, engine: Engine) -> None:
        """Submit what backward has not, as zeros."""
        if self._fl_phases is not None:
            self._fl_phases.end_backward()
        if self._fl_overlap is not None:
            self._fl_overlap.flush()
        if not self._fl_begun:
            self._fl_begin()
        self._fl_agree_on_sparse(engine)
        submitted = engine.pending
        for parameter, name in self._fl_names.items():
            if name not in submitted and parameter not in self._fl_gathers:
                self._fl_hand_over(engine, parameter)
        self._fl_begun = False
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after so many backward passes from now on; between steps, on all ranks."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}; expected at least 1")
        if self._fl_pending:
            raise UsageError("set_backward_passes_per_step() while gradients are being reduced; call it after step()")
        self._fl_passes = passes
        self._fl_passes_left = dict.fromkeys(self._fl_names, passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` takes the gradients as they are: ``synchronize`` has been called."""
        self._fl_step_synchronizes = False
        try:
            yield
        finally:
            self._fl_step_synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the reduced gradients, then take the step of the wrapped optimizer.

        A ``closure`` is evaluated as often as the optimizer asks; each time the gradients it leaves are reduced. With
        ``overlap_forward``, and without a closure, nothing is waited for here.
        """
        self._opt_called = True
        if self._fl_overlap is not None and closure is None and self._fl_step_synchronizes and not self._fl_reduced:
            return self._fl_step_ahead(self._fl_overlap)
        if closure is not None:
            return super().step(self._fl_reducing(closure), **kwargs)
        if not self._fl_step_synchronizes:
            if self._fl_pending:
                raise UsageError(
                    "step() within skip_synchronize() takes gradients that are being reduced; call synchronize() first"
                )
        else:
            if self._fl_asked_to_synchronize:
                warnings.warn(
                    "step() after synchronize() does not reduce again; call it within skip_synchronize() to say so",
                    stacklevel=2,
                )
            self._fl_synchronize()
        self._fl_reduced = self._fl_asked_to_synchronize = False
        with self._fl_timeline.span("UPDATE", step=self._fl_step_number - 1):
            return super().step(**kwargs)

    # Marks of torch's: step hooks are run by the class below; schedulers need not wrap a step that sets _opt_called.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _fl_step_ahead(self, overlap: ForwardOverlap) -> None:
        engine = self._fl_engine
        assert engine is not None
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            raise UsageError(
                "step hooks of the optimizer would run once for each bucket with overlap_forward; remove them, or "
                "leave overlap_forward out"
            )
        self._fl_submit_rest(engine)
        engine.end_step()
        overlap.begin(self.__dict__["param_groups"])
        self._fl_stepped = True

    def _fl_update(self, groups: list[dict[str, Any]]) -> None:
        """Take the step of the wrapped optimizer with other parameter groups."""
        own = self.__dict__["param_groups"]
        self.__dict__["param_groups"] = groups
        self._fl_updating = True
        try:
            with self._fl_timeline.span("UPDATE", step=self._fl_step_number - 1):
                super().step()
        finally:
            self.__dict__["param_groups"] = own
            self._fl_updating = False

    def _fl_reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._fl_reduced = False
            self._fl_synchronize()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; between ``backward`` and ``step`` or ``synchronize`` it is refused: they are in use."""
        if self._fl_pending:
            raise UsageError(
                "zero_grad() was called after backward() but before step() or synchronize(): the gradients are being "
                "reduced; call it after step()"
            )
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)
        self._fl_reduced = self._fl_asked_to_synchronize = False
        super().zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Who reads gradients through them, as GradScaler does, finds the reduced ones."""
        no_backward_runs = torch._C._current_graph_task_id() < 0
        if self._fl_pending and no_backward_runs and not self._fl_updating:
            self._fl_synchronize()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the plan is made for the parameters that the optimizer was wrapped with."""
        raise UsageError("add_param_group() after DistributedOptimizer(); add the group before wrapping the optimizer")

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and, under "fusionlayer", this rank's step, error feedback and codecs' state."""
        self._fl_flush()
        state = super().state_dict()
        engine = self._fl_engine
        if engine is not None:
            place = {"rank": engine.rank, "size": engine.size, "step": engine.step}
            state["fusionlayer"] = {**place, **engine.memory.state_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; error feedback only if it is this rank's, of as many ranks.

        From a state that was broadcast, only the step.
        """
        state = dict(state_dict)
        saved = state.pop("fusionlayer", None)
        self._fl_flush()
        super().load_state_dict(state)
        engine = self._fl_engine
        self._fl_passes_left = dict.fromkeys(self._fl_names, self._fl_passes)
        if engine is not None and saved is not None:
            if "rank" in saved:
                mine = (saved["rank"], saved["size"]) == (engine.rank, engine.size)
                engine.memory.load_state_dict(saved if mine else {})
            engine.step = saved["step"]

    def close(self) -> None:
        """End the background thread; gradients are no longer reduced. For programs that go on after training."""
        self._fl_flush()
        self._fl_detach()

    def _fl_detach(self) -> None:
        with _live_lock:
            _live.discard(self)
        self._fl_release()
        self._fl_engine = self._fl_overlap = None

    def reconnect(self) -> None:
        """Reduce gradients over the job as it is now, after ``shutdown`` and ``init``; all ranks call it together.

        What was under way is given up. The step is kept; error feedback, where rank and size are the same; and the
        plan, where the size is and nothing makes another one while training runs.

        Raises:
            TransportError: a peer was lost, stopped or late.
        """
        old = self._fl_engine
        self._fl_detach()
        engine, timeline = self._fl_connect()
        self._attach(engine, timeline, self._fl_names, self._fl_passes, self._fl_sparse_as_dense, self._fl_forward_of)
        if engine is None or old is None:
            return
        engine.step = old.step
        if (engine.rank, engine.size) == (old.rank, old.size):
            engine.memory.load_state_dict(old.memory.state_dict())
        if old.plan is not None:
            self.adopt_plan(old.plan)

    def adopt_plan(self, plan: FusionPlan) -> None:
        """Fuse gradients by ``plan`` from the next step on, if it is for as many ranks; all ranks call it together.

        Nothing changes in a job of one rank, where a planner or an autotuner brings plans while training runs, or if
        gradients were sparse and left out of it: the first step makes a plan then.

        Raises:
            ConfigError: the plan is not for these parameters, or names what there is not.
        """
        engine = self._fl_engine
        if engine is None or engine.plan_controller is not None or plan.world_size != engine.size:
            return
        planned = {name for bucket in plan.buckets for name in bucket.names}
        if self._fl_by_name is None or not planned < set(self._fl_names.values()):
            engine.switch(plan)

    def _fl_flush(self) -> None:
        if self._fl_overlap is not None and self._fl_stepped:
            self._fl_overlap.flush()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would share the background thread."""
        raise UsageError("a DistributedOptimizer cannot be copied or pickled; copy or save its state_dict()")


_live: weakref.WeakSet[_Distributed] = weakref.WeakSet()
_live_lock = threading.Lock()


def _nothing() -> None:
    """Release what a job of one rank holds."""


def _sparse(parameter: Tensor) -> Tensor:
    """Return a gradient as rows with their numbers, each row once."""
    gradient = parameter.grad
    if gradient is None:
        rows = parameter.detach()[:0]
        numbers = rows.new_empty((1, 0), dtype=torch.int64)
        return torch.sparse_coo_tensor(numbers, rows, parameter.shape, check_invariants=False)
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _take(optimizer: weakref.ref[_Distributed], parameter: Tensor) -> None:
    """Be the hook of a parameter."""
    alive = optimizer()
    if alive is not None:
        alive._fl_take(parameter)


def _release(engine: Engine, hooks: Sequence[RemovableHandle]) -> None:
    """End what an optimizer has started."""
    for hook in hooks:
        hook.remove()
    engine.close()


def _flush_all() -> None:
    """Make the updates that are still to be made: other ranks need this one's part of them."""
    with _live_lock:
        optimizers = list(_live)
    for optimizer in optimizers:
        optimizer._fl_flush()


context.before_shutdown(_flush_all)


def _refuse_twice(names: Mapping[Tensor, str]) -> None:
    with _live_lock:
        others = list(_live)
    for other in others:
        for parameter, name in names.items():
            if parameter in other._fl_names:
                raise ConfigError(
                    f"parameter {name!r} belongs to a DistributedOptimizer already and would be reduced twice; close() "
                    "that one first"
                )
