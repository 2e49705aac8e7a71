"""What a planner knows of the costs of a step, and the timeline that follows from them and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from ...plan import TensorInfo

__all__ = ["Pipeline", "Prediction", "Span", "StepCosts", "predict"]

Seconds = Callable[[float], float]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step, as functions of a number of (dense) gradient elements.

    Attributes:
        backward: that backward takes for each tensor, by name; one that is not there takes none.
        encode: of packing and encoding so many elements on one rank.
        decode: of summing all ranks' messages of so many elements, and of unpacking the sum.
        communicate: of a bucket of so many elements: its transfers, and what is done between them.
        startup: of communicating next to nothing.
        disturbance: that each bucket costs what is computed after it, beside its own time on the thread that
            communicates: threads share cores, caches and the interpreter.
        ahead: each tensor is encoded when its gradient arrives, by the thread that computes; otherwise each bucket is,
            by the thread that communicates.
    """

    backward: Mapping[str, float]
    encode: Seconds
    decode: Seconds
    communicate: Seconds
    startup: float
    ahead: bool = False
    disturbance: float = 0.0

    def within(self, tensors: Sequence[TensorInfo], pool: Sequence[TensorInfo]) -> StepCosts:
        """Return the costs of a step of ``pool`` alone, tensors between two of its own counted with the later one."""
        members = {tensor.name for tensor in pool}
        backward, since = {}, 0.0
        for tensor in tensors:
            since += self.backward.get(tensor.name, 0.0)
            if tensor.name in members:
                backward[tensor.name], since = since, 0.0
        return replace(self, backward=backward)


@dataclass(frozen=True)
class Span:
    """A bucket on the timeline, in seconds after the start of backward.

    Attributes:
        ready: when its last gradient is there, and encoded if that is done ahead.
        start: when the communication thread takes it.
        end: when its results are there.
        idle: seconds for which the communication thread had nothing to do before it; 0 for the first bucket. SAFusion
            calls it W (section 3.3).
    """

    ready: float
    start: float
    end: float
    idle: float


@dataclass(frozen=True)
class Prediction:
    """The timeline of a step from the start of backward until all results are there.

    Attributes:
        spans: of the buckets, in order.
        computing: seconds of backward and of what is encoded ahead, undisturbed: the same for all plans.
    """

    spans: tuple[Span, ...]
    computing: float

    @property
    def step(self) -> float:
        """Seconds until all results are there."""
        return max([self.computing, *(span.end for span in self.spans)])

    @property
    def waiting(self) -> float:
        """Seconds by which communication makes the step longer: what is not hidden, and what disturbs computing."""
        return self.step - self.computing

    @property
    def idle(self) -> float:
        """Seconds for which communication waited between buckets."""
        return sum(span.idle for span in self.spans)

    @property
    def rank(self) -> tuple[float, float]:
        """What plans of the same tensors are compared by, the less the better.

        First the step, to the nanosecond, and so the waiting; then the seconds of communication.
        """
        return (round(self.step, 9), sum(span.end - span.start for span in self.spans))


def predict(tensors: Sequence[TensorInfo], runs: Sequence[Sequence[str]], costs: Sequence[StepCosts]) -> Prediction:
    """Return the timeline of a plan on one communication thread, which sends buckets in the order of the plan.

    Args:
        tensors: of the step, in order of arrival.
        runs: names of the tensors of each bucket; every tensor is in one.
        costs: of each bucket; with one codec for all, the same for each.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    bucket_of = {name: i for i, run in enumerate(runs) for name in run}
    computing = disturbed = 0.0
    ready = [0.0] * len(runs)
    left = [len(run) for run in runs]
    for tensor in tensors:
        index = bucket_of[tensor.name]
        computing += costs[index].backward.get(tensor.name, 0.0)
        computing += costs[index].encode(tensor.numel) if costs[index].ahead else 0.0
        ready[index] = computing + disturbed
        left[index] -= 1
        disturbed += costs[index].disturbance if not left[index] else 0.0
    seconds = [
        Pipeline([by_name[name] for name in run], cost).communicating(0, len(run))
        for run, cost in zip(runs, costs, strict=True)
    ]
    return Prediction(_queue(zip(ready, seconds, strict=True)), computing)


class Pipeline:
    """What runs of consecutive tensors cost: ``[i:j]`` of them in one bucket.

    Args:
        tensors: of a step, in order of arrival.
        costs: of the step.
    """

    def __init__(self, tensors: Sequence[TensorInfo], costs: StepCosts) -> None:
        sizes = [tensor.numel for tensor in tensors]
        backward = [costs.backward.get(tensor.name, 0.0) for tensor in tensors]
        encoded = [costs.encode(n) if costs.ahead else 0.0 for n in sizes]
        self._costs = costs
        self._elements = list(accumulate(sizes, initial=0))
        self._backward = list(accumulate(backward, initial=0.0))
        self._ready = list(accumulate((b + e for b, e in zip(backward, encoded, strict=True)), initial=0.0))
        self._decoded = list(accumulate((costs.decode(n) if costs.ahead else 0.0 for n in sizes), initial=0.0))
        self.communicating: Callable[[int, int], float] = cache(self._communicating)

    def __len__(self) -> int:
        return len(self._elements) - 1

    @property
    def disturbance(self) -> float:
        """Seconds by which each bucket makes all that is computed after it later."""
        return self._costs.disturbance

    def elements(self, i: int, j: int) -> int:
        """Return the elements of the run."""
        return self._elements[j] - self._elements[i]

    def backward(self, i: int, j: int) -> float:
        """Return the seconds of backward for the run."""
        return self._backward[j] - self._backward[i]

    def computing(self, i: int, j: int) -> float:
        """Return the seconds until the run is ready: of backward, and of encoding if that is done ahead."""
        return self._ready[j] - self._ready[i]

    def ready(self, j: int) -> float:
        """Return when the first ``j`` tensors are ready, disturbances apart."""
        return self._ready[j]

    def _communicating(self, i: int, j: int) -> float:
        """Return the seconds for which the run keeps the communication thread."""
        n = self.elements(i, j)
        if self._costs.ahead:
            return self._costs.communicate(n) + self._decoded[j] - self._decoded[i]
        return self._costs.encode(n) + self._costs.communicate(n) + self._costs.decode(n)

    def predict(self, ends: Sequence[int]) -> Prediction:
        """Return the timeline of the partition into runs that end before the indices ``ends``, the last the length."""
        runs = zip([0, *ends], ends, strict=False)
        each = self.disturbance
        spans = _queue((self.ready(j) + each * n, self.communicating(i, j)) for n, (i, j) in enumerate(runs))
        return Prediction(spans, self.ready(len(self)))


def _queue(buckets: Iterable[tuple[float, float]]) -> tuple[Span, ...]:
    """Return the spans of buckets of (ready, seconds) that one thread takes in turn."""
    spans: list[Span] = []
    free = None
    for ready, seconds in buckets:
        start = ready if free is None else max(ready, free)
        spans.append(Span(ready, start, start + seconds, 0.0 if free is None else start - free))
        free = start + seconds
    return tuple(spans)
