"""One copy of the model for each method, and how each method trains it."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.peers import PEERS, Attached, attach
from benchmarks.variants import Variant
from fusionlayer.planning.codec_rules import AUTO

from .methods import BASELINE, COMPUTE, NULL
from .timed_codec import Clock, timed
from .workloads import Workload

__all__ = ["Replica", "Trainee", "Turn", "digest", "make_replica"]

POWERSGD_START = 2
"""Steps before PowerSGD compresses, of which warm start needs two."""

MEASURED_STEPS = 12
"""Until a planner that measures has done so, and its plan is at work."""

TRIAL_MEGABYTES = (1, 4, 16)
TRIAL_SECONDS = 1.0


@dataclass(frozen=True)
class Turn:
    """What some consecutive steps took on this worker; seconds."""

    seconds: float
    cpu: float
    waiting: float | None
    codec: float | None
    codec_cpu: float | None
    losses: tuple[float, ...]


class Replica(ABC):
    """A method's model in training. A turn is ``prepare``, a barrier of the caller's, ``run``, a barrier, ``rest``."""

    warm_up = 2
    """Steps, each a turn, until every step is like the next: buckets and plans are made, memory is there."""

    lead = 0
    """Steps at the beginning of a turn that are not timed."""

    period = 1
    """Steps after which the next ones are as these were: with local steps, those between two syncs. A turn, also one
    of the warm-up, has whole periods."""

    note = ""

    @abstractmethod
    def prepare(self, first: int, steps: int) -> None:
        """Get the data of the steps ``first``, ``first + 1``, ... ready, those of the lead among them."""

    @abstractmethod
    def run(self) -> Turn:
        """Do the steps."""

    @abstractmethod
    def rest(self) -> None:
        """Finish what is under way and leave cores and network to others until the next ``prepare``."""

    @abstractmethod
    def digest(self) -> str:
        """Return a hash of all parameters."""

    @abstractmethod
    def close(self) -> None:
        """Give up threads and processes; all ranks together."""


class Trainee(Replica):
    """A model that is trained by this process.

    Args:
        workload: model and data.
        model: whose forward is called: the module itself or a wrapper.
        optimizer: of its parameters.
        clock: of the codec.
        note: what was chosen, in words.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        optimizer: Optimizer,
        clock: Clock | None = None,
        note: str = "",
    ) -> None:
        self._workload = workload
        self._model = model
        self._optimizer = optimizer
        self._clock = clock
        self.note = note
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._waited: float | None = None

    def prepare(self, first: int, steps: int) -> None:  # noqa: D102 - described in Replica
        self._batches = [self._workload.batch(step) for step in range(first, first + steps)]

    def run(self) -> Turn:  # noqa: D102 - described in Replica
        clock = self._clock or Clock()
        losses = [self._step(*batch) for batch in self._batches[: self.lead]]
        codec, codec_cpu = clock.seconds, clock.cpu
        self._waited = None
        start, cpu = time.perf_counter(), time.process_time()
        losses += [self._step(*batch) for batch in self._batches[self.lead :]]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Turn(
            seconds,
            cpu,
            self._waited,
            clock.seconds - codec if self._clock else None,
            clock.cpu - codec_cpu if self._clock else None,
            tuple(loss.item() for loss in losses),
        )

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss: Tensor = self._model(inputs, targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def rest(self) -> None:  # noqa: D102 - described in Replica
        self._batches = []

    def digest(self) -> str:  # noqa: D102 - described in Replica
        with getattr(self._optimizer, "anchored", nullcontext)():  # what ranks share, where steps are local
            return digest(self._model)

    def close(self) -> None:  # noqa: D102 - described in Replica
        if callable(close := getattr(self._optimizer, "close", None)):
            close()


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters of ``model``."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def make_replica(method: str, workload: Workload) -> Replica:
    """Return a new replica for ``method``; all ranks call it together."""
    if method.startswith("horovod"):
        from .horovod_replica import HorovodReplica

        return HorovodReplica(method, workload)
    if method.startswith(("fsdp", "hsdp", "zero:")):
        from .sharded_replica import ShardedReplica, Sharding

        return ShardedReplica(workload, Sharding.parse(method))
    model, optimizer = workload.begin()
    if method == COMPUTE:
        return Trainee(workload, model, optimizer)
    if method == "ddp-tuned":
        megabytes = _fastest_buckets(workload)
        wrapper = DistributedDataParallel(model, bucket_cap_mb=megabytes)
        return Trainee(workload, wrapper, optimizer, note=f"{method}: buckets of {megabytes} MB")
    if (name := BASELINE if method == NULL else method) in PEERS:
        return Attachment(workload, name, attach(name, model, optimizer, POWERSGD_START))
    return _fusionlayer(method, workload, model, optimizer)


class Attachment(Trainee):
    """What a library of others trains."""

    def __init__(self, workload: Workload, method: str, attached: Attached) -> None:
        super().__init__(workload, attached.model, attached.optimizer)
        self._attached = attached
        self.period = PEERS[method].period
        if method == "ddp-powersgd":
            self.warm_up = POWERSGD_START + 2

    def close(self) -> None:  # noqa: D102 - described in Replica
        self._attached.close()


class Waiting(Trainee):
    """fusionlayer, which waits for averages at the end of backward, or else in ``step``: both by one method."""

    def __init__(self, workload: Workload, model: nn.Module, optimizer: Optimizer, *more: Any) -> None:
        super().__init__(workload, model, optimizer, *more)
        trained: Any = optimizer
        self._wait: Callable[[], object] = trained.reducer.reduce
        trained.reducer.reduce = self._timed

    def _timed(self) -> object:
        start = time.perf_counter()
        try:
            return self._wait()
        finally:
            self._waited = (self._waited or 0.0) + time.perf_counter() - start


class Overlapped(Trainee):
    """fusionlayer with ``overlap_forward``, in its steady state: each step begins with the last one still under way.

    So a turn is timed from the end of one step to the end of another: as many communications as steps lie in between.
    """

    warm_up = 4
    lead = 1

    def rest(self) -> None:  # noqa: D102 - described in Replica
        self._optimizer.synchronize()  # type: ignore[attr-defined]
        super().rest()


class Streaming(Trainee):
    """fusionlayer with local steps whose fragments arrive some steps after they have left.

    As with overlap, a turn is timed from the end of one period to the end of another, both with something under way.
    """

    def rest(self) -> None:  # noqa: D102 - described in Replica
        self._optimizer.state_dict()  # waits for what is under way, and changes nothing
        super().rest()


def _fusionlayer(method: str, workload: Workload, model: nn.Module, optimizer: Optimizer) -> Replica:
    variant, clock = Variant.parse(method), Clock()
    kind: type[Trainee] = Overlapped if variant.overlap else Waiting
    if variant.sync is not None:
        kind = Streaming if getattr(variant.sync, "overlaps", False) else Trainee
    if variant.codec == AUTO:
        replica = kind(workload, variant.place(model), variant.wrap(optimizer, model))
    else:
        codec = timed(variant.make_codec(), f"{method} (timed)", clock)
        replica = kind(workload, variant.place(model), variant.wrap(optimizer, model, codec), clock)
    replica.period = variant.cycle
    if isinstance(replica, Streaming):
        replica.lead = variant.cycle
    if variant.measures:
        replica.warm_up = MEASURED_STEPS
    return replica


def _fastest_buckets(workload: Workload) -> int:
    """Return which of ``TRIAL_MEGABYTES`` gives DDP the shortest steps, tried on replicas that are thrown away."""
    found: dict[float, int] = {}
    for megabytes in TRIAL_MEGABYTES:
        model, optimizer = workload.begin()
        wrapper = DistributedDataParallel(model, bucket_cap_mb=megabytes)
        trainee = Trainee(workload, wrapper, optimizer)
        trainee.prepare(0, 1)
        seconds = slowest(trainee.run().seconds)
        steps = max(1, min(8, round(TRIAL_SECONDS / seconds)))
        trainee.prepare(1, steps)
        dist.barrier()
        found[slowest(trainee.run().seconds) / steps] = megabytes
    return found[min(found)]


def slowest(seconds: float) -> float:
    """Return the largest ``seconds`` of all ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
