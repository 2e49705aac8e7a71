"""Steps of made-up models, with costs, for tests of planners."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from fusionlayer.base.plan import TensorInfo
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Cluster
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, Cost, LinkCost
from fusionlayer.planning.prediction import PlannedBucket, predict
from fusionlayer.planning.profile import Gradient, Model
from fusionlayer.planning.simulation import SimulatedStep
from fusionlayer.scheduler.planners import StepCosts

__all__ = ["costs_of", "steps", "tensors_of", "timeline"]


def tensors_of(sizes: Sequence[int]) -> list[TensorInfo]:
    """Return tensors t0, t1, ... of so many elements."""
    return [TensorInfo(f"t{i}", n, "float32", 4) for i, n in enumerate(sizes)]


def costs_of(
    backward: Sequence[float],
    communicate: Cost,
    encode: Cost = FREE,
    decode: Cost = FREE,
    ahead: bool = False,
    disturbance: float = 0.0,
) -> StepCosts:
    """Return the costs of a step of the tensors t0, t1, ..."""
    by_name = {f"t{i}": seconds for i, seconds in enumerate(backward)}
    return StepCosts(by_name, encode, decode, communicate, communicate(1), ahead, disturbance)


def timeline(tensors: Sequence[TensorInfo], runs: Sequence[Sequence[str]], costs: StepCosts) -> SimulatedStep:
    """Return what is predicted of a plan: a timeline from the start of backward to the last result."""
    encode, decode, sum_of_two, communicate = (
        _as_cost(cost) for cost in (costs.encode, costs.decode, lambda n: costs.decode(n / 2), costs.communicate)
    )
    ranks = Cluster(2, LinkCost(0.0, 0.0, 0.0, FREE, FREE))
    each = BucketCosts(
        CodecCost(8.0, encode, decode, sum_of_two, FREE),  # a byte an element: ``communicate`` takes bytes then
        "gather" if costs.ahead else "two_shot",
        ranks,
        disturbance=costs.disturbance,
        transfer=communicate,
    )
    ready = accumulate(costs.backward[tensor.name] for tensor in tensors)
    model = [Gradient(tensor.name, tensor.numel, at) for tensor, at in zip(tensors, ready, strict=True)]
    buckets = [PlannedBucket(run, each) for run in runs]
    return predict(Model("made up", 0.0, 0.0, 0.0, tuple(model)), buckets, whole=False)


def _as_cost(function: Any) -> Any:
    """Return a function as a cost, which may be a line or a curve only."""
    return function


@st.composite
def steps(draw: st.DrawFn, ahead: bool | None = None) -> tuple[list[TensorInfo], StepCosts]:
    """Draw a step: few tensors or many, small and large, costs from far below backward's to far above."""
    sizes = draw(st.lists(st.sampled_from([1, 10, 100, 1000, 10_000, 100_000]), min_size=1, max_size=40))
    backward = [draw(st.sampled_from([1e-9, 3e-9, 1e-8])) * n + draw(st.sampled_from([0.0, 1e-6, 1e-4])) for n in sizes]
    line = st.builds(AlphaBeta, st.sampled_from([0.0, 1e-6, 1e-4, 1e-3]), st.sampled_from([1e-10, 1e-9, 1e-8, 1e-7]))
    disturbance = draw(st.sampled_from([0.0, 0.0, 1e-5, 1e-3]))
    ahead = draw(st.booleans()) if ahead is None else ahead
    costs = costs_of(backward, draw(line), draw(line), draw(line), ahead, disturbance)
    return tensors_of(sizes), costs
