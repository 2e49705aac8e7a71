"""Cost profiles: measured costs of a machine, its links, its codecs and one model's step, in YAML files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..base import records
from ..base.errors import ConfigError
from ..base.plan import TensorInfo
from ..base.registry import nearest
from ..native.wire import DTYPE_CODES
from .cost_model import CodecCost, Cost, LinkCost, parse_rate

PROFILE_VERSION = 1
_NO_LINKS = "profile has no links; measure one with two ranks or more: `torchrun --no-python ... fusionlayer profile`"


@dataclass(frozen=True)
class Machine:
    """The place of the measurement.

    Attributes:
        cores: the cores of the machine.
        workers: ranks that shared these cores, those of emulated hosts included.
        threads: threads that each rank computed with.
        device: what computed: "cpu", or "cuda", a device for each rank.
        per_host: ranks of each node between which links were measured.
    """

    cores: int
    workers: int
    threads: int = 1
    device: str = "cpu"
    per_host: int = 1

    def __post_init__(self) -> None:
        for name in ("cores", "workers", "threads", "per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}; expected cpu or cuda")

    @classmethod
    def here(cls, workers: int, device: torch.device, per_host: int = 1) -> Machine:
        """Return this machine, shared by ``workers`` ranks, with the processor of ``device``."""
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        return cls(len(os.sched_getaffinity(0)), workers, threads, device.type, per_host)

    @property
    def on_device(self) -> bool:
        """Whether times are a device's, not the cores'."""
        return self.device != "cpu"

    @property
    def assumed(self) -> str:
        """A sentence on the assumptions about a device; empty for the CPU."""
        if not self.on_device:
            return ""
        return f" Times are those of a device ({self.device}): one stream of it computes, and one communicates."

    @property
    def cores_per_worker(self) -> float:
        """Cores that a rank had for itself. A device counts as one, which computing and codecs share."""
        return 1.0 if self.on_device else self.cores / self.workers


@dataclass(frozen=True)
class Gradient:
    """A gradient of the model.

    Attributes:
        name: the parameter's.
        numel: elements.
        ready: seconds of backward after which it arrives.
        used: seconds of forward after which its parameter is first needed.
        dtype: element type.
        itemsize: bytes of an element.
    """

    name: str
    numel: int
    ready: float
    used: float = 0.0
    dtype: str = "float32"
    itemsize: int = 4

    @property
    def info(self) -> TensorInfo:
        """The gradient as planners see it."""
        return TensorInfo(self.name, self.numel, self.dtype, self.itemsize)


@dataclass(frozen=True)
class Model:
    """One step of a model without communication, in seconds.

    Attributes:
        name: the name of the model.
        forward: the seconds of the forward pass, loss included.
        backward: the seconds of the backward pass.
        optimizer: of the update, clearing of gradients included.
        tensors: gradients in the order of their arrival.
    """

    name: str
    forward: float
    backward: float
    optimizer: float
    tensors: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConfigError(f"model {self.name!r} has no tensors; expected at least one")
        for name in ("forward", "backward", "optimizer"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected seconds from 0 on")

    @property
    def dtype(self) -> torch.dtype:
        """The type of most elements; f32 if codecs encode none of that type."""
        numels: Counter[str] = Counter()
        for tensor in self.tensors:
            numels[tensor.dtype] += tensor.numel
        found = getattr(torch, numels.most_common(1)[0][0], None)
        return found if found in DTYPE_CODES else torch.float32


@dataclass(frozen=True)
class Validation:
    """How projected steps compared with measured ones.

    Attributes:
        source: file with the measured steps.
        cells: number of steps compared.
        workers: smallest and largest number of ranks among them.
        rates: lowest and highest rate among them.
        methods: names of the methods compared.
        error: mean, median and largest of |projected / measured - 1|.
        low: smallest measured / projected.
        median: median of it.
        high: largest of it.
    """

    source: str
    cells: int
    workers: tuple[int, int]
    rates: tuple[str, str]
    methods: tuple[str, ...]
    error: tuple[float, float, float]
    low: float
    median: float
    high: float

    def covers_workers(self, workers: int) -> bool:
        """Return whether this many ranks are within the validated range."""
        return self.workers[0] <= workers <= self.workers[1]

    def covers_rate(self, rate: str) -> bool:
        """Return whether the rate is within the validated range."""
        low, high = map(parse_rate, self.rates)
        return low <= parse_rate(rate) <= high


@dataclass(frozen=True)
class Profile:
    """All measured costs that predictions and planners use.

    Attributes:
        version: the version of this schema.
        title: the measured subject, in words.
        machine: where it was measured.
        model: step of the model.
        copy: CPU seconds of packing, and of unpacking, by elements of a bucket; on a device, like all CPU seconds of a
            profile, the device's seconds.
        codecs: costs by name of the codec.
        links: costs of the link between hosts, by rate in the words of tc; none if one process measured alone.
        inside: costs of the link between ranks of one host, if it was measured.
        collectives: seconds of collectives by bytes of each rank's message, by algorithm and number of ranks.
        disturbance: seconds that a rank's computing loses while it exchanges one small message with all others.
        staging: seconds of copying between device and host, one way, by bytes, where messages are sent from the host's
            memory. The costs of ``links`` are then without it; those of ``collectives`` never are.
        connections: measured bits per second of one TCP connection each way between two hosts, by round trip, loss and
            congestion control, such as "50ms/0.0005/reno".
        environment: facts about hardware and software, in words.
        validation: how well projections from this profile held.
    """

    version: int
    title: str
    machine: Machine
    model: Model
    copy: Cost
    codecs: Mapping[str, CodecCost]
    links: Mapping[str, LinkCost]
    inside: LinkCost | None = None
    collectives: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)
    disturbance: float = 0.0
    staging: Cost | None = None
    connections: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    validation: Validation | None = None

    def __post_init__(self) -> None:
        for rate in self.links:
            parse_rate(rate)

    @property
    def uses_nccl(self) -> bool:
        """Whether messages go from device to device: one stream sends them, and sums may use trees."""
        return self.machine.on_device and self.staging is None

    @property
    def model_alone(self) -> Model:
        """The model's step with a core for each of its threads, also where ranks shared cores while it was measured."""
        machine, model = self.machine, self.model
        share = 1.0 if machine.on_device else min(1.0, machine.cores_per_worker / machine.threads)
        tensors = (replace(each, ready=each.ready * share, used=each.used * share) for each in model.tensors)
        times = {name: getattr(model, name) * share for name in ("forward", "backward", "optimizer")}
        return replace(model, tensors=tuple(tensors), **times)

    @property
    def fastest_rate(self) -> str:
        """The highest rate that was measured; ``ConfigError`` if none was."""
        if not self.links:
            raise ConfigError(_NO_LINKS)
        return max(self.links, key=parse_rate)

    def link(self, rate: str, curves: bool = False) -> LinkCost:
        """Return the costs of a link of ``rate``: alpha-beta costs, or with ``curves`` those of a measured rate."""
        bits = parse_rate(rate)
        known = {parse_rate(name): link for name, link in self.links.items()}
        if curves and bits in known:
            return known[bits]
        if not known:
            raise ConfigError(_NO_LINKS)
        return LinkCost.between(bits, known.items())

    def transfer(self, algorithm: str, workers: int) -> Cost | None:
        """Return measured seconds of a collective by bytes of a rank's message; None if it was not measured."""
        known = self.collectives.get("one_shot" if algorithm == "gather" else algorithm, {})
        return known.get(str(workers))

    def codec(self, name: str) -> CodecCost:
        """Return the costs of a codec; ``ConfigError`` if they were not measured."""
        if name not in self.codecs:
            raise ConfigError(f"profile has no costs of codec {name!r}; {nearest(name, sorted(self.codecs))}")
        return self.codecs[name]

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read a profile from a file; a ``ConfigError`` names the defect and its place."""
        return records.load(cls, path, "profile", PROFILE_VERSION)

    def to_yaml(self, path: str | Path, comment: str = "") -> None:
        """Write the profile to a file that begins with the comment."""
        records.save(self, path, comment)
