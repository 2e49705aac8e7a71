"""Lets FSDP2 send weights and gradients compressed, by custom communication objects."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import collectives, context
from ..base.errors import ConfigError, require
from ..base.plan import plain_name
from ..codecs import ChangeCodec, Codec
from ..functional import AUTO
from ..training.codec_or_auto import CodecOrAuto
from ..training.replicas import Replicas
from ..training.weights import NAMES, Weights, both_ways
from .fsdp_collectives import AllGather, Direction, ReduceScatter, ReplicaGather
from .fsdp_compression import FSDPCompression, Module
from .fsdp_replicas import ReplicaGroup
from .fsdp_shards import Shards

__all__ = ["FSDPCompression", "compress"]


class _LeftOut(Enum):
    """Marks an omitted argument, because None has a meaning of its own."""

    NOT = "not given"


def compress(
    model: nn.Module,
    weights: str | Codec | None = AUTO,
    gradients: str | Codec | None = AUTO,
    *,
    nodes: int | None = None,
    all_gather: str | Codec | None | _LeftOut = _LeftOut.NOT,
    reduce_scatter: str | Codec | None | _LeftOut = _LeftOut.NOT,
    broadcast: bool = True,
    baseline: Literal["exact", "native"] = "exact",
    replicas: str | Codec | None = AUTO,
    algorithm: str | None = None,
    error_feedback: bool | None = None,
) -> FSDPCompression:
    """Compress the weights and gradients that ``model`` sends, after ``fully_shard`` has been applied to it.

    Every module to which ``fully_shard`` was applied sends its weights by an all-gather before it is used, and its
    gradients by a reduce-scatter after backward. Both keep torch's order and prefetching. Call ``compress`` on all
    ranks alike, after the last ``fully_shard``. A second call, on the model or a part of it, replaces the settings of
    the first.

    Weights are quantised once, and every rank gets the same bits, the owner of a shard too. The shard that the
    optimizer updates does not change. Gradients are quantised once, or twice with a two-level codec, and summed in rank
    order in f32, without error feedback. Two kinds of elements are sent uncompressed: types other than f32, bf16 and
    f16, and weights of several types that torch sends together.

    With weights="qwd" (SDP4Bit, section 3.1) every rank keeps a copy of all weights, in the type of the computation.
    After each optimizer step, the owners' weights minus the copies are sent once, in int4. The first gather after a
    step sends this. Later gathers, such as those of backward, of a second forward or of an evaluation, send nothing.

    With weights="delta" every rank keeps such a copy too, and the differences lose no bit: training has the bits of
    torch's own collectives. The lower the learning rate, the fewer weights change in bf16, and the less is sent.

    Args:
        model: contains modules to which ``fully_shard`` was applied, or is one.
        weights: name or codec for all-gathers. "auto" changes no bit: weights are sent uncompressed, or by ``zip`` if
            measured faster (see ``fusionlayer.switcher`` of the group). None keeps torch's all-gather. "delta":
            differences that lose no bit. "qwd": differences in int4. "qw", "qwz": weights in int4 or int8. "sdp4bit" is
            "qwd" with gradients "tlq_hs", "zero++" is "qwz" with "qgz", "qsdp" is that codec with gradients
            "qsdp_gradients", unless ``gradients`` names another.
        gradients: name or codec for reduce-scatters, as for ``weights``. Lossless codecs send values in bf16 that were
            widened to f32 only for the sum, as gradients of a bf16 model are.
        nodes: ranks of each node, in the order of ranks, for two-level codecs and two-level collectives. None: as
            configured, or found by host and network.
        all_gather: another name of ``weights``.
        reduce_scatter: another name of ``gradients``.
        broadcast: with HSDP, give all replicas the weights of the first now; torch does not, and averages gradients of
            replicas that differ. Equal weights are not sent. False leaves weights unchanged.
        baseline: the form that zipped gradients have to beat with "auto". "exact": rows that are sent uncompressed and
            summed in rank order, to the bits of the zipped form. "native": torch's own reduce-scatter, as ZipCCL has
            it. With more than two ranks torch adds in another order, so last bits depend on measurements.
        replicas: with HSDP, name or codec for the all-reduces between replicas, as for ``weights``; codecs that need
            error feedback are allowed. All replicas get the same bits.
        algorithm: collective between replicas; None chooses by codec and nodes.
        error_feedback: add the loss of ``replicas`` to the shard's next gradient. None: as configured, else do so if
            the codec is biased and coarse.

    Raises:
        ConfigError: unknown names, a sparsifier for weights or gradients, both names of one argument, a model without
            FSDP modules, or options of replicas for a model without replicas.
        PlanMismatch: from the first forward or backward, ranks disagree on codecs, or on parameters: their names,
            shapes or types.
        UsageError: from forward, something other than an optimizer's step changed weights that are sent as differences.
        TransportError: from forward and backward, a peer failed, stopped or timed out.
    """
    _check_nodes(nodes)
    context.refuse_elastic("fsdp.compress", "without a rank its shards are missing; use DistributedOptimizer")
    if not isinstance(broadcast, bool):
        raise ConfigError(f"broadcast={broadcast!r}; expected True or False")
    if baseline not in ("exact", "native"):
        raise ConfigError(f"fsdp.compress got baseline={baseline!r}; expected 'exact' or 'native'")
    require(model, nn.Module, "fsdp.compress", "the model, after fully_shard()")
    if error_feedback not in (None, True, False):
        raise ConfigError(f"fsdp.compress got error_feedback={error_feedback!r}; expected True, False or None")
    modules = _sharded_modules(model)
    weights = _one_of("weights", weights, "all_gather", all_gather)
    gradients = _one_of("gradients", gradients, "reduce_scatter", reduce_scatter)
    weights, gradients = both_ways(weights, gradients, default=AUTO)
    named = Weights.of(weights) if isinstance(weights, str) and weights in NAMES else None
    differences = False
    gathering = reducing = None
    if weights is not None:
        choice = _choice("weights", named.codec if named else weights)
        differences = named.differences if named else isinstance(choice.codec, ChangeCodec)
        gathering = Direction("weights", choice, differences, nodes)
    if gradients is not None:
        native = baseline == "native"
        reducing = Direction("gradients", _choice("gradients", gradients), ranks_per_node=nodes, native=native)
    between = _between(replicas, algorithm, error_feedback, nodes)
    names = {
        (m, p): plain_name(f"{n}.{p}".lstrip("."))
        for n, m in model.named_modules()
        for p, _ in m.named_parameters(recurse=False)
    }
    known: dict[int, Shards] = {}
    pairs = [(module, shards) for module in modules if (shards := Shards.of(module, names, known)) is not None]
    if all(shards.replicas is None for _, shards in pairs):
        _refuse_replicas(replicas=replicas, algorithm=algorithm, error_feedback=error_feedback)
    by_shards: dict[Shards, Module] = {}
    for module, shards in pairs:
        if shards not in by_shards:
            number = len(by_shards)
            kind = ReplicaGather if differences else AllGather
            gather = kind(gathering, shards, number) if gathering else None
            scatter = ReduceScatter(reducing, shards, number) if reducing else None
            by_shards[shards] = Module(shards, gather, scatter, _replace_group(shards, between, number))
            for direction in filter(None, (gathering, reducing, between)):
                direction.parameters += map(_describe, shards.names, shards.parameters)
        ours = by_shards[shards]
        if ours.gather:
            module.set_custom_all_gather(ours.gather)  # type: ignore[arg-type]
        if ours.scatter:
            module.set_custom_reduce_scatter(ours.scatter)  # type: ignore[arg-type]
    if broadcast:
        _unite(by_shards)
    found = list(by_shards.values())
    return FSDPCompression(found, gathering, reducing, between if any(each.between for each in found) else None)


def _between(
    replicas: str | Codec | None, algorithm: str | None, error_feedback: bool | None, nodes: int | None
) -> Direction | None:
    """Return the common state of all-reduces between replicas, or None if they stay torch's."""
    if replicas is None:
        return None
    choice = CodecOrAuto.of(replicas, {})
    if choice.auto:
        if algorithm not in (None, "switched"):
            raise ConfigError(
                f"fsdp.compress got algorithm={algorithm!r} with replicas='auto'; leave it out, or name a codec"
            )
        algorithm = "switched"
    collectives.choose(choice.codec, [2], algorithm, ahead=None)
    if error_feedback is None:
        error_feedback = context.settings().error_feedback
    return Direction(
        "gradients between replicas",
        choice,
        ranks_per_node=nodes,
        algorithm=algorithm,
        error_feedback=error_feedback,
    )


def _replace_group(shards: Shards, between: Direction | None, number: int) -> ReplicaGroup | None:
    """Let torch sum these shards' gradients over replicas by ``between``, or again by its own group."""
    native = shards.replicas
    if native is None or native.size() == 1:
        return None
    if isinstance(native, ReplicaGroup):
        native = native.native
    group = None if between is None else ReplicaGroup(between, shards, number, native)
    shards.replicas = native if group is None else group
    return group


def _refuse_replicas(**options: object) -> None:
    for name, value in options.items():
        if value not in (AUTO, None):
            raise ConfigError(
                f"fsdp.compress got {name}={value}, but no module has replicas; give fully_shard a mesh of two "
                "dimensions, replicas and shards, or leave the option out"
            )


def _describe(name: str, parameter: Tensor) -> str:
    return f"{name} {tuple(parameter.shape)} {parameter.dtype}"


def _unite(modules: Iterable[Shards]) -> None:
    """Give all ranks with copies of the same shards the copy of the first of these ranks."""
    replicated: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
    for shards in modules:
        for group, named in shards.replicated.items():
            replicated.setdefault(group, {}).update(named)
    for group, named in replicated.items():
        Replicas(named, broadcast=True, every=0).unite(context.transport(group))


def _check_nodes(nodes: int | None) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1 or size % nodes):
        raise ConfigError(
            f"fsdp.compress got nodes={nodes!r}; expected how many ranks a node has, which divides the {size} of the "
            "job, or None to find nodes"
        )


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "ReplicateModule" in names:
        raise ConfigError(
            "fsdp.compress got a model that replicate() was applied to, whose weights are not sent; wrap its "
            "optimizer in fusionlayer.DistributedOptimizer instead of replicate()"
        )
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        what = "FullyShardedDataParallel, FSDP1," if "FullyShardedDataParallel" in names else "none of its modules"
        raise ConfigError(
            f"fsdp.compress got a {type(model).__name__} with {what} where modules of FSDP2 are expected; apply "
            "torch.distributed.fsdp.fully_shard to it first"
        )
    return modules


def _one_of(
    name: str, value: str | Codec | None, alias: str, other: str | Codec | None | _LeftOut
) -> str | Codec | None:
    """Return the value that a user gave for an argument that has two names."""
    if isinstance(other, _LeftOut):
        return value
    if value not in (AUTO, other):
        raise ConfigError(f"fsdp.compress got {name}={value} and {alias}={other}, which mean the same; give one")
    return other


def _choice(name: str, value: str | Codec) -> CodecOrAuto:
    choice = CodecOrAuto.of(value, {})
    if choice.codec.needs_feedback:
        raise ConfigError(
            f"fsdp.compress got {name}={choice}, which leaves most elements out, or most bits of each, and needs error "
            "feedback; choose a codec that works without it"
        )
    return choice
