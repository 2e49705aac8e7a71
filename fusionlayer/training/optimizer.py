"""``DistributedOptimizer``: an optimizer whose gradients are reduced over ranks while backward computes them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .. import context
from ..base.errors import ConfigError, require
from ..codecs import Codec, CodecOptions
from ..functional import Average, Group, ReduceOp, check_op, refuse_unknown
from ..process.clock import clock_of
from ..scheduler.planners import Planner
from . import overlap
from .averaging import refuse_averaged, refuse_wrapper
from .connection import Connection
from .construction import GradientOptions, as_it_is
from .distributed import Distributed
from .enrolment import Enrolment
from .hook import take
from .live import refuse_twice
from .parameters import replicated_by
from .planning_options import PLANNING, Planning, PlanningOptions, separate
from .policies.elastic_local import ElasticLocalStepPolicy
from .policies.elastic_policy import ElasticStepPolicy, check_elastic
from .policies.local import Local, check_sync
from .policies.local_plan import planned_syncs
from .policies.local_policy import LocalStepPolicy
from .policies.local_steps import LocalSteps
from .policies.own_sends import OwnSends
from .reducer import Reducer
from .replicas import Replicas, check_interval
from .sends import FollowsSyncs, SendsItsOwn
from .step_policy import StepPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack


def DistributedOptimizer(  # noqa: N802 - the name that Horovod's users know
    optimizer: Optimizer,
    named_parameters: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    planning: Planning | str | Planner | None = None,
    error_feedback: bool | None = None,
    feedback_bits: int | None = None,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    overlap_forward: nn.Module | None = None,
    group: Group = None,
    broadcast: bool = True,
    check_replicas: bool | int | None = None,
    sync: Local | None = None,
    **options: Unpack[PlanningOptions],
) -> Distributed:
    """Return ``optimizer``, which now averages gradients over ranks during backward, fused and compressed.

    It is the same object and still an instance of its class, with its parameter groups, state and learning-rate
    schedulers. In a job of one rank its behaviour does not change, but all options
    are checked.

    Ranks begin with rank 0's parameters, and compare theirs during training.

    When backward has accumulated a gradient, a background thread takes it. The end of ``backward`` waits for the
    results: then ``.grad`` is the average, to be clipped, logged or unscaled. The first step learns the order of the
    gradients and makes the fusion plan. A parameter that this rank does not use counts as zeros, so ranks may take
    different paths through the model. A parameter that no rank uses gets no gradient and is not updated.

    If ``backward`` runs several times before ``step``, each time for other parameters, the first step reduces once for
    each. Later steps reduce once, in ``step``; to clip gradients, call ``synchronize`` before. If it runs several times
    for the same parameters, give ``backward_passes_per_step``.

    A step reduces parameters that require gradients when it begins: they may be frozen, unfrozen and added
    (``add_param_group``) between two steps, on all ranks alike. That step makes a new plan. A frozen parameter is not
    sent, and the optimizer leaves it alone.

    Args:
        optimizer: any optimizer over parameters of one device.
        named_parameters: the model, or ``model.named_parameters()``; without it, the place in the optimizer names each
            parameter. Buffers, and parameters that are neither trained nor the optimizer's, are known only from a
            model.
        codec: name or codec of the gradients; None takes the configured one (``raw`` by default). "auto" measures the
            first steps, whose gradients are sent uncompressed. Then it chooses one codec for all gradients, or one for
            each, by the predicted time of the step; the log has the reason.
        algorithm: name of a collective; None chooses by codec and nodes.
        planning: ``fusionlayer.Planning(...)``: how gradients are fused and get their codecs; or only a planner.
        error_feedback: add the codec's loss to the next step's gradient. None: do so if the codec is biased and coarse.
            ``state_dict()`` keeps it, separately on each rank.
        feedback_bits: bits of each element of the error feedback between two steps: 32; or 8, which is a byte and 1/32
            of one, rounded at random without bias. None takes the configured number, 32 by default.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: number of backward passes that accumulate gradients before they are reduced.
        gradient_predivide_factor: with ``Average``: divide by it before the sum, and by the rest after it.
        sparse_as_dense: make sparse gradients dense; without it they are refused.
        overlap_forward: the model. Its next forward may begin while results are still in flight: ``step`` returns at
            once, and each module's parameters are updated just before it runs, to the same values. This pays off where
            the network is the bottleneck. After ``step`` the gradients are gone. Between ``step`` and the next forward,
            call ``synchronize`` before you read or write parameters other than by ``state_dict()``. Before you clip,
            call it between ``backward`` and ``step``. Every parameter must be used
            in the forward of the module that owns it. The optimizer must be one of torch's that updates each parameter
            independently of the others.
        group: process group or transport to reduce over; None means all ranks. For a DTensor model whose parameters
            are sharded by tensor parallelism: the ranks that hold the same parts.
        broadcast: give every rank rank 0's parameters now, and with a model its buffers; equal values are not sent. The
            optimizer's state is not broadcast, see ``fusionlayer.broadcast_optimizer_state``. False leaves parameters
            unchanged; if they differ, one warning names them.
        check_replicas: number of steps within which a difference of parameters over ranks is found. The first step
            compares all, later ones a part each. False: never; None takes the configured number.
        sync: ``fusionlayer.Local(...)``: let each rank step by itself, and average their changes every few
            steps; gradients are not sent. None: average gradients in each step.
        options: options of a codec given by name; the attributes of ``Planning`` by their own names, such as
            ``planner="wfbp"``; and Horovod's ``num_groups``, a deprecated name for an integer ``groups``.

    Raises:
        ConfigError: an argument is invalid, or two are incompatible; the message names the expected value.
        UsageError: from ``step``, ``zero_grad`` or ``backward`` in an invalid order; from ``step`` and ``synchronize``
            for a gradient that no rank reduces, because its parameter was unfrozen within the step.
        PlanMismatch: ranks have other parameters or options; also from ``step`` and ``synchronize``.
        ReplicaMismatch: from ``step`` or ``synchronize``, parameters differ over ranks; it names the first.
        TransportError: a peer failed, stopped or timed out; also from ``step`` and ``synchronize``.
    """
    refuse_wrapper(optimizer)
    require(optimizer, Optimizer, "DistributedOptimizer", "an optimizer, such as torch.optim.AdamW(model.parameters())")
    check_op(op)
    planning, codec_options = separate(planning, options)
    if sync is not None:
        named_plan = planning.plan if planning.plan is not None else context.settings().planning.plan
        sync = check_sync(sync, optimizer, op, named_plan, overlap_forward)
        if codec is planning.plan is planning.policy is None:
            codec, codec_options = sync.codec, cast(CodecOptions, {**sync.codec_options, **dict(codec_options)})
        if error_feedback is None:
            error_feedback = sync.error_feedback
    refuse_unknown(DistributedOptimizer, codec, codec_options, PLANNING)
    require(gradient_predivide_factor, Real, "gradient_predivide_factor", "a number above 0")
    require(backward_passes_per_step, Integral, "backward_passes_per_step", "a whole number, at least 1")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigError("gradient_predivide_factor needs op=Average; leave it at 1.0 with op=Sum")
    if not gradient_predivide_factor > 0:
        raise ConfigError(f"gradient_predivide_factor={gradient_predivide_factor}; expected a number above 0")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}; expected at least 1")
    if not isinstance(broadcast, bool):
        raise ConfigError(f"broadcast={broadcast!r}; expected True or False")
    enrolment = Enrolment(optimizer.param_groups, named_parameters, group)
    names = enrolment.reduced(optimizer.param_groups)
    refuse_twice(names)
    if isinstance(optimizer, Distributed):
        raise ConfigError("this optimizer is a DistributedOptimizer already; use it as it is, or make a new one")
    refuse_averaging = partial(refuse_averaged, group=group, gradients=sync is None or bool(sync.after))
    refuse_averaging(names, named_parameters if isinstance(named_parameters, nn.Module) else None)
    if overlap_forward is not None:
        overlap.check(optimizer, names, overlap_forward)
    if sync is None and isinstance(optimizer, LBFGS) and context.transport(group).size > 1:
        raise ConfigError("LBFGS depends on the loss of each rank, so weights would diverge; use another optimizer")
    elastic = context.is_elastic()
    if elastic:
        check_elastic(
            optimizer,
            group=group,
            sync=sync,
            overlap_forward=overlap_forward,
            plan=planning.plan or context.settings().planning.plan,
            policy=planning.policy or context.settings().planning.policy,
            fallback=context.settings().planning.fallback if planning.fallback is None else planning.fallback,
            codec=codec or context.settings().codec,
        )
    gradients = GradientOptions(codec, codec_options, algorithm, planning, error_feedback, feedback_bits)
    frozen, buffers = replicated_by(named_parameters, group) if isinstance(named_parameters, nn.Module) else ({}, {})
    replicated = {**enrolment.by_name(), **frozen}
    replicas = Replicas(replicated, broadcast, check_interval(check_replicas), buffers, (f"sync={sync}",))
    own = optimizer if isinstance(optimizer, SendsItsOwn) else None
    if own is not None:
        _check_own(optimizer, op, sync, planning.plan)
    steps = _policy(own, sync, elastic, enrolment)
    if isinstance(steps, ElasticStepPolicy):
        steps.facts = (gradients, op, gradient_predivide_factor, backward_passes_per_step, sparse_as_dense)
    connection = Connection(
        gradients, steps, enrolment, replicas, op, gradient_predivide_factor, planning.groups, group, overlap_forward
    )
    if own is not None or sync is not None and sync.after:
        # Errors in later arguments are raised now.
        connection.check_later(names, as_it_is if sync is None else partial(planned_syncs, sync))
    passes = backward_passes_per_step
    reducer = Reducer(optimizer, connection, names, passes, sparse_as_dense, refuse_averaging, take)
    # A scheduler that was made earlier has put a wrapped step() into the instance, which would hide the new step().
    vars(optimizer).pop("step", None)
    base, more = type(optimizer), {"_step_supports_amp_scaling": True} if steps.handles_overflow else {}
    content = {"__doc__": base.__doc__, "__module__": __name__, **more}
    optimizer.__class__ = type(base.__name__, (Distributed, base), content)
    assert isinstance(optimizer, Distributed)
    optimizer.reducer, optimizer.step_policy = reducer, steps
    return optimizer


def _policy(own: SendsItsOwn | None, sync: Local | None, elastic: bool, enrolment: Enrolment) -> StepPolicy:
    """Return what makes the steps that these arguments ask for."""
    averaging = StepPolicy() if own is None else OwnSends(own)
    if sync is None:
        return ElasticStepPolicy() if elastic else averaging
    local = LocalSteps(sync, clock_of(enrolment.device))
    return ElasticLocalStepPolicy(local) if elastic else LocalStepPolicy(local, averaging)


def _check_own(optimizer: Optimizer, op: ReduceOp, sync: Local | None, plan: object) -> None:
    """Raise ``ConfigError`` if an optimizer that sends its own cannot have these arguments."""
    refused = sync if not isinstance(optimizer, FollowsSyncs) else None
    plan = plan if plan is not None else context.settings().planning.plan
    if op is not Average or refused is not None or plan is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} with op={op.name.title()}, sync={refused} and plan={plan}; it sends what it "
            "averages in each step, by codecs that it names itself and no plan says: leave all three out"
        )
