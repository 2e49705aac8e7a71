"""Projection: simulated steps of methods at sizes that were not measured, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from .. import codecs, collectives
from ..base.config import Config
from ..base.errors import ConfigError
from ..base.plan import TensorInfo
from ..base.registry import nearest
from ..scheduler import planners
from ..scheduler.bucket_sizes import bucket_sizes
from ..scheduler.lanes import LANES
from ..scheduler.planners import StepCosts
from .bucket_costs import BucketCosts, codec_cost
from .cluster import Scenario
from .collective_phases import ALGORITHMS, OWN
from .cost_model import CodecCost
from .prediction import PlannedBucket, backward_seconds, predict
from .profile import Profile
from .simulation import Resources, SimulatedStep

BASELINE = "ddp"
_OVERLAP = "+overlap"
_DDP_FIRST_BYTES, _DDP_BYTES, _DDP_TUNED_BYTES = 1 << 20, 25 << 20, 4 << 20


class Fuse(Protocol):
    """A function that cuts gradients, in order of arrival, into buckets; every planner is one."""

    def __call__(self, tensors: Sequence[TensorInfo], costs: StepCosts | None = None) -> list[list[TensorInfo]]:
        """Return the buckets in sending order."""


@dataclass(frozen=True)
class Method:
    """A way to sum gradients.

    Attributes:
        name: as users see it, with the algorithm and the planner if these were given.
        codec: name of its costs in a profile.
        algorithm: a key of ``ALGORITHMS``; None chooses as the engine would.
        fuse: cuts gradients into buckets.
        overlap_forward: the step waits for results only when the next forward needs them.
        lanes: buckets that are in flight at once.
        one_group: all of them are sent by one group of gloo, so by the same connections. An engine has one for each
            lane.
        own: the form of the transport's own all-reduce; None: the fastest.
    """

    name: str
    codec: str
    algorithm: str | None
    fuse: Fuse
    overlap_forward: bool = False
    lanes: int = LANES  # gloo, which DDP uses, has as many threads
    one_group: bool = False
    own: str | None = None

    @classmethod
    def named(cls, name: str, profile: Profile, algorithm: str | None = None, planner: str | None = None) -> Method:
        """Return the method that benchmarks know by ``name``.

        ``ddp`` is DistributedDataParallel with its defaults, ``ddp-tuned`` has buckets of 4 MiB, ``ddp-ring`` and
        ``ddp-tree`` use this sum instead of the fastest one, ``ddp-fp16`` and ``ddp-bf16`` have its compression hooks.
        Any other name is a codec of the profile; with ``+overlap`` at its end the next forward overlaps. ``algorithm``
        and ``planner`` are for these codecs; None: the configured defaults.
        """
        if name == BASELINE or name.startswith(f"{BASELINE}-"):
            kind = name.removeprefix(BASELINE)
            if kind not in _DDP:
                raise ConfigError(f"unknown method {name!r}; {nearest(name, [BASELINE + kind for kind in _DDP])}")
            codec, first, size = _DDP[kind]
            profile.codec(codec)
            own = kind[1:] if kind[1:] in OWN else None
            return cls(name, codec, "dense", partial(_ddp_buckets, first=first, size=size), one_group=True, own=own)
        codec = name.removesuffix(_OVERLAP)
        profile.codec(codec)
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ConfigError(f"unknown algorithm {algorithm!r}; {nearest(algorithm, list(ALGORITHMS))}")
        if algorithm is not None and codecs.knows(codec):
            collectives.choose(codecs.get(codec), (2,), algorithm, ahead=None)
        settings = Config()
        options = settings.planning.planner_options if planner in (None, settings.planning.planner) else {}
        fuse = planners.get(planner or settings.planning.planner, **options)
        overlap = _OVERLAP if name.endswith(_OVERLAP) else ""
        chosen = [choice for choice in (algorithm, planner) if choice is not None]
        return cls("/".join([codec, *chosen]) + overlap, codec, algorithm, fuse, bool(overlap))

    def algorithm_for(self, codec: CodecCost, nodes: Sequence[int]) -> str:
        """Return the collective for nodes of this many ranks."""
        return self.algorithm or collectives.choose(codec, nodes, ahead=None)


_DDP = {
    "": ("raw", _DDP_FIRST_BYTES, _DDP_BYTES),
    "-tuned": ("raw", _DDP_TUNED_BYTES, _DDP_TUNED_BYTES),
    **{f"-{form}": ("raw", _DDP_FIRST_BYTES, _DDP_BYTES) for form in OWN},
    "-fp16": ("fp16", _DDP_FIRST_BYTES, _DDP_BYTES),
    "-bf16": ("bf16", _DDP_FIRST_BYTES, _DDP_BYTES),
}


def _ddp_buckets(
    tensors: Sequence[TensorInfo], costs: StepCosts | None = None, *, first: int, size: int
) -> list[list[TensorInfo]]:
    """Return runs that end with the tensor that reaches the limit, as DistributedDataParallel makes them."""
    runs: list[list[TensorInfo]] = []
    limit, filled = first, first
    for tensor in tensors:
        if filled >= limit:
            limit = size if runs else first
            runs.append([])
            filled = 0
        runs[-1].append(tensor)
        filled += tensor.nbytes
    return runs


def project(profile: Profile, method: Method, scenario: Scenario, workers: int) -> SimulatedStep:
    """Return the simulated step of ``method`` with this many ranks."""
    codec = known = profile.codec(method.codec)
    cluster = scenario.cluster(profile, workers)
    if codecs.knows(method.codec):
        known = codec_cost(profile, codecs.get(method.codec))
    if method.own is not None:
        cluster = replace(cluster, own=(method.own,))
    if method.one_group and cluster.connections is not None:
        cluster = replace(cluster, connections=replace(cluster.connections, shared=True))
    algorithm = method.algorithm_for(codec, scenario.node_sizes(workers))
    costs = BucketCosts.of(profile, known, algorithm, cluster)
    model, fuse = profile.model_alone, method.fuse
    infos, seconds = [tensor.info for tensor in model.tensors], costs.for_planner(backward_seconds(model.tensors))
    if isinstance(fuse, planners.Planner) and codecs.knows(method.codec):
        on_device = profile.machine.on_device
        sizes = bucket_sizes(codecs.get(method.codec), algorithm, workers, infos, on_device, seconds)
        fuse = fuse.sized(sizes.edge, sizes.threshold)
    runs = fuse(infos, seconds)
    buckets = [PlannedBucket([tensor.name for tensor in run], costs) for run in runs]
    lanes = 1 if profile.uses_nccl else method.lanes
    return predict(model, buckets, Resources(cluster.cores, cluster.threads, lanes, method.overlap_forward))


@dataclass(frozen=True)
class Band:
    """The expected range of a measured step, in seconds; and the limits of the validation that the step exceeds."""

    low: float | None
    high: float | None
    extrapolated: tuple[str, ...]


def projected_band(profile: Profile, method: Method, scenario: Scenario, workers: int, seconds: float) -> Band:
    """Return the band of a projected step, from the errors of the profile's validation."""
    known = profile.validation
    if known is None:
        return Band(None, None, ("the profile is not validated",))
    reasons = []
    if not known.covers_workers(workers):
        reasons.append(f"{workers} workers")
    if not known.covers_rate(scenario.rate):
        reasons.append(scenario.rate)
    if scenario.is_distant:
        reasons.append("round trip, loss or connections")
    if scenario.rates:
        reasons.append("unequal rates")
    if method.name not in known.methods:
        reasons.append(method.name)
    return Band(seconds * min(1.0, known.low), seconds * max(1.0, known.high), tuple(reasons))


def break_even(ahead: Callable[[int], bool], workers: Sequence[int], per_host: int = 1) -> list[int]:
    """Return the numbers of ranks at which ``ahead`` has changed: for each change the first number after it.

    ``workers`` must grow. At most one change is found between two neighbours, at a multiple of ``per_host``.
    """
    changes = []
    for low, high in zip(workers, workers[1:], strict=False):
        before = ahead(low)
        if ahead(high) == before:
            continue
        while high - low > per_host:
            middle = low + (high - low) // per_host // 2 * per_host
            low, high = (middle, high) if ahead(middle) == before else (low, middle)
        changes.append(high)
    return changes
