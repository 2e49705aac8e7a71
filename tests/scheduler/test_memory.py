from __future__ import annotations

import pytest
import torch

from fusionlayer.plan import Bucket, FusionPlan, TensorInfo
from fusionlayer.scheduler import Memory

pytestmark = pytest.mark.short

CPU = torch.device("cpu")
TENSORS = {name: TensorInfo(name, numel, "float32", 4) for name, numel in (("a", 3), ("b", 5), ("c", 2))}


def bucket(*names: str, align: int = 4) -> Bucket:
    return FusionPlan.build([[TENSORS[name] for name in names]], 1, "int", {}, "two_shot", align).buckets[0]


def filled(*names: str) -> Memory:
    """Return a memory of one bucket whose residuals are 1, 2, 3, ..., gaps included."""
    memory = Memory()
    flat = memory.flat(bucket(*names), CPU)
    flat.copy_(torch.arange(1.0, flat.numel() + 1))
    return memory


def as_lists(memory: Memory) -> dict[str, list[float]]:
    return {name: residual.tolist() for name, residual in memory.state_dict()["residuals"].items()}


def test_it_starts_from_zero() -> None:
    flat = Memory().flat(bucket("a", "b"), CPU)
    assert flat.shape == (12,) and flat.dtype == torch.float32 and not flat.any()


def test_names_refer_to_their_slots() -> None:
    assert as_lists(filled("a", "b")) == {"a": [1, 2, 3], "b": [5, 6, 7, 8, 9]}


def test_residuals_follow_their_names_into_other_buckets() -> None:
    memory = filled("a", "b")
    first = memory.flat(bucket("b", "c"), CPU)
    second = memory.flat(bucket("a"), CPU)
    assert first.tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]
    assert second.tolist() == [1, 2, 3, 0]
    first[0] = 50
    assert as_lists(memory) == {"a": [1, 2, 3], "b": [50, 6, 7, 8, 9], "c": [0, 0]}


def test_state_is_a_copy() -> None:
    memory = filled("a")
    state = memory.state_dict()
    state["residuals"]["a"].zero_()
    assert as_lists(memory) == {"a": [1, 2, 3]}


def test_state_comes_back_before_and_after_the_buckets_are_made() -> None:
    state = filled("a", "b").state_dict()
    early, late = Memory(), Memory()
    early.load_state_dict(state)
    before = early.flat(bucket("b", "a"), CPU)
    after = late.flat(bucket("b", "a"), CPU)
    late.load_state_dict(state)
    assert before.tolist() == after.tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 1, 2, 3, 0]
    state["residuals"]["a"].fill_(9)
    assert before.tolist() == after.tolist()
    assert as_lists(early) == as_lists(late)


def test_what_a_state_does_not_name_starts_from_zero() -> None:
    memory = filled("a", "b")
    memory.load_state_dict({"residuals": {"b": torch.ones(5, dtype=torch.float64)}})
    assert as_lists(memory) == {"a": [0, 0, 0], "b": [1] * 5}
    memory.load_state_dict({"residuals": {"c": torch.ones(2, 1, dtype=torch.float16)}})
    assert as_lists(memory) == {"a": [0, 0, 0], "b": [0] * 5, "c": [1, 1]}
    assert memory.state_dict()["residuals"]["c"].dtype == torch.float32
