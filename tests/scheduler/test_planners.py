from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.errors import ConfigError
from fusionlayer.plan import TensorInfo
from fusionlayer.scheduler import planners

pytestmark = pytest.mark.short

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@st.composite
def models(draw: st.DrawFn) -> list[TensorInfo]:
    """Draw the tensors of a step in the order of their arrival."""
    facts = draw(
        st.lists(
            st.tuples(st.integers(0, 3000), st.sampled_from(sorted(SIZES)), st.sampled_from([None, None, None, 0, 1])),
            max_size=30,
        )
    )
    return [TensorInfo(f"t{i}", n, dtype, SIZES[dtype], group) for i, (n, dtype, group) in enumerate(facts)]


@pytest.mark.parametrize("name", planners.names())
@given(models())
def test_what_every_planner_keeps(name: str, model: list[TensorInfo]) -> None:
    runs = planners.get(name)(model)
    position = {tensor.name: i for i, tensor in enumerate(model)}
    assert sorted(position[tensor.name] for run in runs for tensor in run) == list(range(len(model)))
    assert all(runs), "an empty run"
    completed = [max(position[tensor.name] for tensor in run) for run in runs]
    assert completed == sorted(completed), "a run stands before one that is complete earlier"
    for run in runs:
        assert len({(tensor.dtype, tensor.group) for tensor in run}) == 1
        assert [position[tensor.name] for tensor in run] == sorted(position[tensor.name] for tensor in run)
    for dtype in SIZES:
        for group in (0, 1):
            whole = [tensor for tensor in model if (tensor.dtype, tensor.group) == (dtype, group)]
            assert not whole or whole in runs
    assert planners.get(name)(model) == runs


@given(models(), st.integers(1, 20_000))
def test_horovod_fills_buckets_to_the_threshold(model: list[TensorInfo], threshold: int) -> None:
    runs = planners.get("horovod", threshold=threshold)(model)
    free = [run for run in runs if run[0].group is None]
    for run in free:
        assert len(run) == 1 or sum(tensor.nbytes for tensor in run) <= threshold
    for dtype in SIZES:
        same = [run for run in free if run[0].dtype == dtype]
        for run, following in zip(same, same[1:], strict=False):
            assert sum(tensor.nbytes for tensor in [*run, following[0]]) > threshold, "room was left"


@given(models(), st.integers(1, 20_000), st.integers(1, 5_000))
def test_tapered_buckets_double_from_both_ends(model: list[TensorInfo], threshold: int, edge: int) -> None:
    free = [tensor for tensor in model if (tensor.dtype, tensor.group) == ("float32", None)]
    runs = planners.get("tapered", threshold=threshold, edge=edge)(free)
    sizes = [sum(tensor.nbytes for tensor in run) for run in runs]
    for place, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        before, after = sum(sizes[:place]), sum(sizes[place + 1 :])
        assert len(run) == 1 or size <= min(threshold, before + edge), "larger than what is sent meanwhile"
        assert len(run) == 1 or size <= max(edge, after + edge), "too large for what comes after it"


@given(models())
def test_wfbp_fuses_nothing_but_groups(model: list[TensorInfo]) -> None:
    assert all(len(run) == 1 for run in planners.get("wfbp")(model) if run[0].group is None)


def test_an_example() -> None:
    model = [TensorInfo(name, numel, "float32", 4) for name, numel in (("d", 10), ("c", 30), ("b", 20), ("a", 5))]
    runs = planners.get("horovod", threshold=160)(model)
    assert [[tensor.name for tensor in run] for run in runs] == [["d", "c"], ["b", "a"]]
    runs = planners.get("horovod", threshold=100)(model)
    assert [[tensor.name for tensor in run] for run in runs] == [["d"], ["c"], ["b", "a"]]


def test_a_tapered_example() -> None:
    model = [TensorInfo(f"{i}", 25, "float32", 4) for i in range(24)]
    runs = planners.get("tapered", threshold=800, edge=100)(model)
    assert [len(run) for run in runs] == [1, 2, 4, 8, 5, 2, 1, 1]
    runs = planners.get("tapered", threshold=300, edge=100)(model)
    assert [len(run) for run in runs] == [1, 2, 3, 3, 3, 3, 3, 3, 2, 1]


@pytest.mark.parametrize("threshold", [0, -1, 1.5, "8MB", None, True])
def test_a_threshold_that_is_no_size_is_refused(threshold: object) -> None:
    with pytest.raises(ConfigError, match="threshold=.*; expected bytes"):
        planners.get("horovod", threshold=threshold)


@pytest.mark.parametrize("name", ["threshold", "edge"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "4", None, True])
def test_tapered_sizes_that_are_none_are_refused(name: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"tapered planner: {name}=.*; expected bytes"):
        planners.get("tapered", **{name: size})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown planner 'wbfp'; did you mean 'wfbp'"):
        planners.get("wbfp")
