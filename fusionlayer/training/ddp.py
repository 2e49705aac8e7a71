"""A communication hook with which DistributedDataParallel uses our codecs, collectives and background threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import collectives, context
from ..base.config import PlanningSettings, blame
from ..base.errors import ConfigError, UsageError, kind_of
from ..base.plan import Bucket, plain_name
from ..codecs import Codec, CodecOptions
from ..collectives import Scaling
from ..functional import make_codec, refuse_unknown
from ..observe.timeline import Timeline
from .averaging import refuse_averaged
from .comm_hook import CommHook, registered
from .construction import GradientOptions, make_engine
from .live import refuse_twice
from .parameters import describe, one_device
from .planning_options import Planning
from .replicas import Replicas, check_interval

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CommHook", "register"]


def register(
    model: DistributedDataParallel,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    error_feedback: bool | None = None,
    feedback_bits: int | None = None,
    ahead: bool | None = None,
    check_replicas: bool | int | None = None,
    **codec_options: Unpack[CodecOptions],
) -> CommHook:
    """Send the gradients of ``model`` compressed over the ranks of its process group; call it before training.

    DDP takes one hook for its life. A second call with the same arguments returns the hook that the model has, so a
    callback may register at the beginning of every training.

    DDP chooses the buckets. Background threads average each bucket while backward continues. If
    that fails, ``backward()`` raises the error.

    DDP reduces the parameters that required gradients when it wrapped the model. If another one is unfrozen later, its
    gradient would stay this rank's own, so ``backward()`` raises ``UsageError``: wrap the model again.

    Args:
        model: wrapped by DistributedDataParallel, without another communication hook.
        codec: name or codec of the gradients; None takes the configured one.
        algorithm: name of a collective; None chooses by codec and nodes.
        error_feedback: add the codec's loss to the next step's gradient. None: do so if the codec is biased and coarse.
        feedback_bits: bits that an element of the error feedback takes between two steps, 32 or 8; None takes the
            configured number.
        ahead: encode the gradients of a bucket one by one; False encodes the bucket as a whole. None does what
            ``algorithm`` needs, or without one what suits the codec: one by one for sparsifiers.
        check_replicas: number of backward passes within which a difference of parameters over ranks is found. The first
            one compares all, later ones a part each. False: never; None takes the configured number. DDP itself has
            made them equal when it was made.
        codec_options: options of a codec given by name.

    Returns:
        The hook. Save its ``state_dict`` in the rank's checkpoint; ``close`` ends its threads.

    Raises:
        ConfigError: ``model`` is not wrapped by DDP, uses a feature of DDP that gives a hook no gradients, or names and
            options are unknown or incompatible.
        PlanMismatch: ranks disagree on options.
        UsageError: the model has a hook with other arguments, or one that was closed.
    """
    asked = (codec, algorithm, error_feedback, feedback_bits, ahead, check_replicas, dict(codec_options))
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"ddp.register got {kind_of(model)}; wrap the model in DistributedDataParallel first")
    if model in registered:
        before, hook = registered[model]
        if asked != before or hook.closed:
            state = "was closed" if hook.closed else "has other arguments"
            raise UsageError(
                f"ddp.register on a model that has a hook, which {state}; DDP takes one hook for its life: wrap the "
                "model in DistributedDataParallel again"
            )
        return hook
    given: Mapping[str, object] = codec_options
    refused = sorted({"planner", "plan", "profile", "policy", "fidelity", "fallback"} & given.keys())
    if refused:
        raise ConfigError(
            f"ddp.register got {refused[0]}={given[refused[0]]!r}; DDP makes its own buckets, which are all sent "
            f"by one codec: wrap the optimizer in DistributedOptimizer for {refused[0]}"
        )
    refuse_unknown(register, codec, codec_options)
    context.refuse_elastic("ddp.register", "DDP's own state is of one number of ranks; use DistributedOptimizer")
    # DDP looks for a parameter of the outermost module by a name with a dot in front.
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    parameters = {p: plain_name(name) for name, p in named if (name if "." in name else f".{name}") not in ignored}
    _refuse_features(model, parameters)
    names = {parameter: name for parameter, name in parameters.items() if parameter.requires_grad}
    frozen = {parameter: name for parameter, name in parameters.items() if not parameter.requires_grad}
    refuse_twice(names)
    refuse_averaged(names, modules=False)
    every = check_interval(check_replicas)
    settings = context.settings()
    if codec is None and settings.planning.policy is not None:
        raise ConfigError(
            f"the configured policy {settings.planning.policy} gives each gradient a codec, which DDP's buckets "
            "cannot have; give ddp.register a codec, or wrap the optimizer in DistributedOptimizer"
        )
    if settings.planning.plan is not None:
        with blame(settings, "plan"):
            raise ConfigError(
                f"the configured plan {settings.planning.plan} is for DistributedOptimizer; with ddp.register DDP "
                "makes the buckets: leave the plan out, or wrap the optimizer"
            )
    transport = context.transport(model.process_group)
    chosen = make_codec(codec, codec_options)
    ahead = settings.planning.ahead if ahead is None else ahead
    with blame(settings, *([] if algorithm is not None else ["algorithm"])):
        algorithm = collectives.choose(chosen, transport.node_sizes, algorithm or settings.algorithm, ahead=ahead)
    ahead = collectives.is_gather(algorithm)
    if ahead:
        for dtype in sorted({parameter.dtype for parameter in names}, key=str):
            chosen.wire(0, dtype)  # refuses types that it cannot encode
    template = Bucket((), 0, "", chosen.name, chosen.options, algorithm, ahead)
    options = GradientOptions(
        codec=chosen,
        algorithm=algorithm,
        # DDP's buckets are the plan, so the engine never asks this planner. It must only be one that needs no costs.
        planning=Planning(planner=PlanningSettings.planner, ahead=ahead, fallback=""),
        error_feedback=error_feedback,
        feedback_bits=feedback_bits,
    )
    engine = make_engine(
        options,
        describe(names, None),
        transport,
        one_device(names),
        scaling=Scaling(before=1 / transport.size),
        timeline=Timeline(settings.timeline, transport.rank),
        overlap_forward=False,
    )
    kept = {name: p for p, name in parameters.items()}
    replicas = Replicas(kept, broadcast=True, every=every)
    if transport.size > 1:
        engine.put(partial(replicas.unite, rejoining=True))()
    hook = CommHook(model, engine, names, template, replicas.check(engine.put) if transport.size > 1 else None, frozen)
    try:
        # DDP checks a hook's annotations and rejects postponed ones, so the hook is a function without annotations.
        model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    except RuntimeError as error:
        hook.close()
        raise ConfigError(_ANOTHER_HOOK) from error
    # The reducer has the hook. A copy of the model gets a reducer of its own, and would copy the content of this list:
    # the engine with its threads.
    model._comm_hooks.pop()
    registered[model] = asked, hook
    return hook


_ANOTHER_HOOK = (
    "ddp.register on a model that has another communication hook; DDP takes one hook for its life: wrap the model in "
    "DistributedDataParallel again, and leave the other hook out"
)


def _refuse_features(model: DistributedDataParallel, parameters: Mapping[Tensor, str]) -> None:
    """Raise ``ConfigError`` if ``model`` uses a feature of DDP that gives a hook no gradients, or not in buckets."""
    if model._delay_all_reduce_all_params:
        raise ConfigError(
            "ddp.register on DistributedDataParallel(delay_all_reduce_named_params=...) with all parameters; such "
            "gradients do not reach a hook: name fewer parameters"
        )
    if model.mixed_precision is not None:
        raise ConfigError(
            "ddp.register on DistributedDataParallel(mixed_precision=...), which has a communication hook of its own; "
            "leave mixed_precision out and use torch.autocast"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "ddp.register on DistributedDataParallel(skip_all_reduce_unused_params=True), with which buckets do not "
            "reach a hook in every step; leave it out, or freeze what is unused before you wrap the model"
        )
    if model._use_python_reducer:
        raise ConfigError(
            "ddp.register with torch._dynamo.config.optimize_ddp='python_reducer', which gives a hook no buckets; "
            "set it to True"
        )
    if model._comm_hooks:
        raise ConfigError(_ANOTHER_HOOK)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for path, module in model.module.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.sparse and module.weight.requires_grad and module.weight in parameters:
            raise ConfigError(
                f"ddp.register on a model whose layer {path!r} makes sparse gradients; give the layer sparse=False, or "
                "leave DDP out and wrap the optimizer in DistributedOptimizer, which gathers the rows"
            )
    for parameter in trained:
        if not parameter.is_floating_point():
            raise ConfigError(
                f"ddp.register on a model whose parameter {parameters[parameter]!r} is of {parameter.dtype}; expected "
                "floats: hold complex numbers as torch.view_as_real of them"
            )
    expected = model._get_ddp_logging_data()["num_parameter_tensors"]
    if len(trained) != expected:
        raise ConfigError(
            f"ddp.register on a model of which {len(trained)} parameters require gradients, {expected} when it was "
            "wrapped in DistributedDataParallel; freeze and unfreeze first, then wrap the model"
        )
