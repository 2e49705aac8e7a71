"""``safusion``: the buffers of SAFusion, which fuses gradients after sparsifying them (HPDC 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...base.errors import ConfigError
from ...base.plan import TensorInfo
from ._base import Planner, registry, split_at
from ._costs import Pipeline, StepCosts

_SCHEMES = ("naive", "inter", "paper", "inter_intra")


@dataclass(frozen=True)
class SAFusion(Planner, name="safusion"):
    """Make each buffer so large that the communication of the buffer before hides its computing.

    In the paper ranks fill their buffers with their own selections, and may disagree about a buffer's tensors until
    counts are aligned (section 3.2). A plan is the same on all ranks, so here every scheme is aligned:

    - "naive": ``buffers`` buffers of equally many tensors; needs no costs.
    - "inter": buffers of equally many tensors; their number is the one with the least predicted waiting.
    - "paper": adaptive sizes (section 3.3), as the paper has them.
    - "inter_intra": the best of the adaptive sizes and their variants below.

    The adaptive sizes follow three equations. Equation 2: the first buffer is the shortest prefix that is communicated
    sooner as one buffer than tensor by tensor. Equation 1: buffer i is the longest run that is ready while buffer i - 1
    communicates. Equation 3: add up the communication of the buffers. From the buffer on at which the sum exceeds the
    computing of all tensors after the first buffer, one buffer has the rest.

    If costs are uneven, these sizes can lose to equal counts. So "inter_intra" predicts several plans and takes the one
    with the least waiting, among equals the one with the least communication. The plans are: equations 1 and 2 with
    each possible tail merged into one buffer; and all equal counts, from tensor by tensor to one buffer. It never waits
    longer than "naive" and "inter".

    Attributes:
        scheme: one of the above.
        buffers: number of buffers for "naive".
    """

    scheme: str = "inter_intra"
    buffers: int = 4

    def __post_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise ConfigError(f"safusion planner: scheme={self.scheme!r}; expected one of: {', '.join(_SCHEMES)}")
        if type(self.buffers) is not int or self.buffers < 1:
            raise ConfigError(f"safusion planner: buffers={self.buffers!r}; expected a whole number above 0")

    @property
    def needs_costs(self) -> bool:
        """Whether the scheme is not "naive"."""
        return self.scheme != "naive"

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return the buffers."""
        if not tensors:
            return []
        if self.scheme == "naive":
            return split_at(tensors, _equal_counts(len(tensors), -(-len(tensors) // self.buffers)))
        pipeline = self.pipeline(tensors, costs)
        if self.scheme == "paper":
            return split_at(tensors, next(_adaptive(pipeline)))
        candidates = list(_all_equal_counts(len(tensors)))
        if self.scheme == "inter_intra":
            candidates = [*_adaptive(pipeline), *candidates]
        best = min(candidates, key=pipeline.score)
        return split_at(tensors, best)


def _equal_counts(whole: int, count: int) -> list[int]:
    """Return the ends of runs of ``count`` tensors; the last run may be shorter."""
    return [*range(count, whole, count), whole]


def _all_equal_counts(whole: int) -> Iterator[list[int]]:
    for count in sorted({-(-whole // buffers) for buffers in range(1, whole + 1)}):
        yield _equal_counts(whole, count)


def _adaptive(pipeline: Pipeline) -> Iterator[list[int]]:
    """Yield the ends of the paper's adaptive buffers, then of those with no merged tail and with each other tail."""
    ends = _overlapping(pipeline, _first_buffer(pipeline))
    tail = _long_tail(pipeline, ends)
    for kept in dict.fromkeys([tail, *reversed(range(len(ends)))]):
        yield [*ends[:kept], len(pipeline)]


def _first_buffer(pipeline: Pipeline) -> int:
    """Return the end of the first buffer, by equation 2; 1 if merging does not pay."""
    layer_wise = 0.0
    for end in range(1, len(pipeline) + 1):
        layer_wise += pipeline.communicating(end - 1, end)
        if end > 1 and pipeline.backward(0, end) + pipeline.communicating(0, end) < layer_wise:
            return end
    return 1


def _overlapping(pipeline: Pipeline, first: int) -> list[int]:
    """Return the ends of all buffers; after the first each is the longest hidden run, by equation 1."""
    ends, hidden = [first], pipeline.communicating(0, first)
    while (begin := ends[-1]) < len(pipeline):
        end = begin + 1
        while end < len(pipeline) and pipeline.computing(begin, end + 1) <= hidden:
            end += 1
        ends.append(end)
        hidden = pipeline.communicating(begin, end)
    return ends


def _long_tail(pipeline: Pipeline, ends: Sequence[int]) -> int:
    """Return how many buffers stay before the merged tail, by equation 3; all but the last if nothing is merged."""
    to_hide = pipeline.computing(ends[0], len(pipeline))
    communicated, begin = 0.0, 0
    for place, end in enumerate(ends[:-1]):
        communicated += pipeline.communicating(begin, end)
        begin = end
        if communicated > to_hide:
            return place
    return len(ends) - 1


registry.add_preset("safusion_naive", "safusion", scheme="naive")
registry.add_preset("safusion_inter", "safusion", scheme="inter")
registry.add_preset("safusion_paper", "safusion", scheme="paper")
