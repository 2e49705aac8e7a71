"""Makes a plan of tensors: a planner cuts them into buckets, and each bucket gets its codec and collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .. import codecs, collectives
from ..base.errors import ConfigError
from ..base.plan import Bucket, FusionPlan, TensorInfo
from ..codecs import Codec
from .bucket_sizes import bucket_sizes
from .planners import Planner, StepCosts

_SLOT_ALIGNMENT = 128


def fuse(
    tensors: Sequence[TensorInfo],
    planner: Planner,
    codec: Codec | Mapping[str, Codec],
    nodes: Sequence[int],
    *,
    algorithm: str | None | Mapping[str, str | None] = None,
    ahead: bool | None = None,
    costs: Callable[[Codec, str], StepCosts] | None = None,
    on_device: bool = False,
) -> FusionPlan:
    """Return a planner's plan for a step.

    Args:
        tensors: the tensors of the step, in order of arrival.
        planner: cuts them into buckets, each of one codec and one collective.
        codec: the codec of all gradients, or of each by its name.
        nodes: number of ranks of each node.
        algorithm: collective of all gradients, or of each by its name; None chooses.
        ahead: encode gradients one by one as they arrive. None: as ``algorithm`` needs; without an ``algorithm``, the
            codec's default.
        costs: returns the costs of a step in which all buckets have this codec and this collective; for planners that
            need costs.
        on_device: whether gradients are on a device.

    Raises:
        ConfigError: the planner needs costs and has none, or the collective contradicts ``ahead``.
    """
    pools: dict[tuple[Codec, str | None], list[TensorInfo]] = {}
    for tensor in tensors:
        each = codec if isinstance(codec, Codec) else codec[tensor.name]
        way = algorithm[tensor.name] if isinstance(algorithm, Mapping) else algorithm
        pools.setdefault((each, way), []).append(tensor)
    buckets: list[Bucket] = []
    reasons: list[str] = []
    for (each, way), pool in pools.items():
        collective = collectives.choose(each, nodes, way, ahead=ahead)
        goes_ahead = collectives.is_gather(collective)
        known = None if costs is None else costs(each, collective).within(tensors, pool)
        align = slot_alignment(each, goes_ahead)
        sizes = bucket_sizes(each, collective, sum(nodes), pool, on_device, known)
        sized = planner.sized(sizes.edge, sizes.threshold)
        if sized != planner:
            reasons.append(f"{each.name} by {collective}: buckets of {sizes.reason}")
        runs = sized(pool, known)
        buckets += FusionPlan.build(runs, sum(nodes), each.name, each.options, collective, align, goes_ahead).buckets
    position = {tensor.name: i for i, tensor in enumerate(tensors)}
    return FusionPlan(
        tuple(sorted(buckets, key=lambda bucket: position[bucket.names[-1]])), sum(nodes), "; ".join(reasons)
    )


def check_pairs(plan: FusionPlan) -> None:
    """Raise ``ConfigError`` if a bucket's codec and collective do not exist or do not go together."""
    for index, bucket in enumerate(plan.buckets):
        try:
            codec = codecs.get(bucket.codec, **bucket.options)
            collectives.choose(codec, (plan.world_size,), bucket.algorithm, ahead=bucket.ahead)
            if bucket.shares:
                collectives.by_shares(bucket.algorithm, bucket.shares)
        except ConfigError as error:
            raise ConfigError(f"plan: bucket {index}: {error}") from None


def slot_alignment(codec: Codec, ahead: bool) -> int:
    """Return the number of elements that each slot's offset is a multiple of.

    It keeps two tensors of a bucket from sharing metadata, such as a scale.
    """
    return 1 if ahead else min(max(codec.block, 1), _SLOT_ALIGNMENT)
