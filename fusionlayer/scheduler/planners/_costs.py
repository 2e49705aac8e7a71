"""The costs of a step for planners, and the recurrence of their search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from ...base.plan import TensorInfo

Seconds = Callable[[float], float]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step, as functions of a number of (dense) gradient elements.

    Attributes:
        backward: seconds of backward for each tensor, by name; 0 for a missing name.
        encode: of packing and encoding this many elements on one rank.
        decode: the cost of summing all ranks' messages of this many elements, and of unpacking the sum.
        communicate: the cost of the transfers of a bucket of this many elements, and of recoding between them.
        startup: the cost of an empty transfer.
        disturbance: seconds by which each bucket delays the computing after it, because threads share cores, caches and
            the interpreter. The bucket's own seconds on the communication thread are not part of it.
        ahead: the thread that computes encodes each tensor when its gradient arrives; otherwise the communication
            thread encodes each bucket.
    """

    backward: Mapping[str, float]
    encode: Seconds
    decode: Seconds
    communicate: Seconds
    startup: float
    ahead: bool = False
    disturbance: float = 0.0

    def within(self, tensors: Sequence[TensorInfo], pool: Sequence[TensorInfo]) -> StepCosts:
        """Return the costs of a step of ``pool`` alone; backward of other tensors counts with the next one in it."""
        members = {tensor.name for tensor in pool}
        backward, since = {}, 0.0
        for tensor in tensors:
            since += self.backward.get(tensor.name, 0.0)
            if tensor.name in members:
                backward[tensor.name], since = since, 0.0
        return replace(self, backward=backward)


class Pipeline:
    """The costs of runs of consecutive tensors: ``[i:j]`` of them in one bucket.

    Planners search with it. It is the model of ``planning.simulation`` with one lane and a core for each thread.
    Threads and links are not shared then, so a recurrence replaces the simulated events. Tests hold the two equal.
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
        """Seconds by which each bucket delays the computing after it."""
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
        """Return the seconds for which the run keeps the communication thread busy."""
        n = self.elements(i, j)
        if self._costs.ahead:
            return self._costs.communicate(n) + self._decoded[j] - self._decoded[i]
        return self._costs.encode(n) + self._costs.communicate(n) + self._costs.decode(n)

    def score(self, ends: Sequence[int]) -> tuple[float, float]:
        """Return the score of a partition; a smaller one is better.

        The score is the time of the last result, to the nanosecond, and then the seconds of communication. It equals
        the score of the step that ``planning.prediction`` simulates: with one lane and a core for each thread, a bucket
        starts when it is ready and the previous one has ended.
        """
        free = seconds = 0.0
        for n, (i, j) in enumerate(zip([0, *ends], ends, strict=False)):
            start = max(free, self.ready(j) + self.disturbance * n)
            free = start + self.communicating(i, j)
            seconds += free - start
        return (round(max(free, self.ready(len(self))), 9), seconds)
