"""``DistributedOptimizer``: an optimizer whose gradients are reduced over ranks while backward computes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .. import context
from ..codecs import Codec
from ..errors import ConfigError
from ..functional import Average, Group, ReduceOp, check_op
from ..plan import FusionPlan
from ..planning.autotune import Autotune
from ..planning.codec_rules import CodecRules
from ..planning.profile import Profile
from ..scheduler import Engine, Scaling
from ..scheduler.planners import Planner
from ..timeline import Timeline
from . import overlap
from .construction import GradientOptions, make_engine
from .distributed import Distributed
from .parameters import describe, name_parameters, one_device
from .reduction import refuse_twice

__all__ = ["DistributedOptimizer"]


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
    refuse_twice(names)
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
    optimizer.__class__ = type(base.__name__, (Distributed, base), {"__doc__": base.__doc__, "__module__": __name__})
    assert isinstance(optimizer, Distributed)
    optimizer._fl_connect = connect
    optimizer._attach(engine, timeline, names, backward_passes_per_step, sparse_as_dense, overlap_forward)
    return optimizer
