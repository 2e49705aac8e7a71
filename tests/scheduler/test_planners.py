import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import TensorInfo
from fusionlayer.planning.cost_model import AlphaBeta
from fusionlayer.planning.simulation import SimulatedSpan, SimulatedStep
from fusionlayer.scheduler import planners
from fusionlayer.scheduler.planners import StepCosts
from fusionlayer.scheduler.planners._costs import Pipeline
from fusionlayer.scheduler.planners.safusion import _adaptive
from tests.loops import looped

from .steps import costs_of, steps, tensors_of, timeline

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


COST = AlphaBeta(1e-4, 1e-7)


@looped("name", planners.names())
@given(models(), st.booleans())
def test_what_every_planner_keeps(name: str, model: list[TensorInfo], ahead: bool) -> None:
    costs = StepCosts({t.name: 1e-6 * t.numel for t in model}, COST, COST, COST, COST(1), ahead)
    runs = planners.get(name)(model, costs)
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
    assert planners.get(name)(model, costs) == runs


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


@looped("threshold", [0, -1, 1.5, "8MB", None, True])
def test_a_threshold_that_is_no_size_is_refused(threshold: object) -> None:
    with pytest.raises(ConfigError, match="threshold=.*; expected bytes"):
        planners.get("horovod", threshold=threshold)


@looped("name", ["threshold", "edge"])
@looped("size", [0, -1, 1.5, "4", True])
def test_tapered_sizes_that_are_none_are_refused(name: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"tapered planner: {name}=.*; expected bytes"):
        planners.get("tapered", **{name: size})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown planner 'wbfp'; did you mean 'wfbp'"):
        planners.get("wbfp")


# ---- planners that need costs ---------------------------------------------------------------------------------------

BY_COSTS = [name for name in planners.names() if planners.get(name).needs_costs]


def ends_of(runs: list[list[TensorInfo]]) -> list[int]:
    return [sum(map(len, runs[: i + 1])) for i in range(len(runs))]


def prediction(name: str, step: tuple[list[TensorInfo], StepCosts], **options: object) -> SimulatedStep:
    tensors, costs = step
    runs = planners.get(name, **options)(tensors, costs)
    return timeline(tensors, [[tensor.name for tensor in run] for run in runs], costs)


def last_result(name: str, step: tuple[list[TensorInfo], StepCosts], **options: object) -> float:
    tensors, costs = step
    return Pipeline(tensors, costs).score(ends_of(planners.get(name, **options)(tensors, costs)))[0]


def counts(name: str, tensors: list[TensorInfo], costs: StepCosts, **options: object) -> list[int]:
    return [len(run) for run in planners.get(name, **options)(tensors, costs)]


def no_worse(one: float, other: float) -> bool:
    return one <= other + 1e-9


def test_which_planners_need_costs() -> None:
    assert BY_COSTS == ["cupcake", "cupcake_optimal", "mg_wfbp", "omgs", "safusion", "safusion_inter", "safusion_paper"]


@looped("name", BY_COSTS)
def test_planners_without_the_costs_that_they_need_say_how_to_get_them(name: str) -> None:
    planner = planners.get(name)
    with pytest.raises(ConfigError, match=f"planner '{planner.name}' plans by measured costs .* `fusionlayer profile`"):
        planner(tensors_of([1, 2]))


def test_single_is_one_bucket() -> None:
    tensors = tensors_of([3, 1, 2])
    assert planners.get("single")(tensors) == [tensors]


def test_the_thresholds_of_two_generations_of_horovod() -> None:
    assert (planners.get("horovod").threshold, planners.get("horovod_64mb").threshold) == (128 << 20, 64 << 20)  # type: ignore[attr-defined]


class TestTimeline:
    def test_behind_the_communication_thread_encodes(self) -> None:
        tensors = tensors_of([10, 20, 30])
        costs = costs_of([1.0, 1.0, 1.0], AlphaBeta(1, 0.1), AlphaBeta(0, 0.01), AlphaBeta(0, 0.02))
        found = timeline(tensors, [["t0"], ["t1", "t2"]], costs)
        assert found.alone == 3
        first, second = found.spans
        assert first == SimulatedSpan(1, 1, pytest.approx(1 + 0.1 + 2 + 0.2), 0)  # type: ignore[comparison-overlap]
        assert second == SimulatedSpan(3, pytest.approx(3.3), pytest.approx(3.3 + 0.5 + 6 + 1), 0)  # type: ignore[comparison-overlap]
        assert found.waiting == pytest.approx(10.8 - 3) and found.idle == 0

    def test_ahead_the_computing_thread_encodes(self) -> None:
        tensors = tensors_of([10, 20])
        costs = costs_of([1.0, 1.0], AlphaBeta(0.5, 0), AlphaBeta(0, 0.01), AlphaBeta(0, 0.02), ahead=True)
        found = timeline(tensors, [["t0"], ["t1"]], costs)
        assert [span.ready for span in found.spans] == [pytest.approx(1.1), pytest.approx(2.3)]
        assert [span.end for span in found.spans] == [pytest.approx(1.8), pytest.approx(3.2)]
        assert found.idle == pytest.approx(0.5), "the paper's W between two buffers"
        assert found.waiting == pytest.approx(0.9)

    @given(steps(), st.data())
    def test_planners_judge_a_partition_by_what_is_predicted_of_it(
        self, step: tuple[list[TensorInfo], StepCosts], data: st.DataObject
    ) -> None:
        tensors, costs = step
        ends = sorted(data.draw(st.sets(st.integers(1, len(tensors)))) | {len(tensors)})
        runs = [[t.name for t in tensors[i:j]] for i, j in zip([0, *ends], ends, strict=False)]
        judged, predicted = Pipeline(tensors, costs).score(ends), timeline(tensors, runs, costs).score
        assert judged == (pytest.approx(predicted[0], abs=2e-9), pytest.approx(predicted[1]))

    def test_tensors_of_other_pools_count_with_the_next_one(self) -> None:
        tensors = tensors_of([1, 1, 1, 1])
        costs = costs_of([1.0, 2.0, 4.0, 8.0], COST)
        assert costs.within(tensors, tensors[1::2]).backward == {"t1": 3, "t3": 12}


class TestMGWFBP:
    def test_it_merges_what_waits_for_less_than_a_startup(self) -> None:
        tensors = tensors_of([10] * 3)
        assert counts("mg_wfbp", tensors, costs_of([1.0, 0.5, 0.5], AlphaBeta(2.0, 0.0))) == [3]
        assert counts("mg_wfbp", tensors, costs_of([1.0, 0.5, 3.0], AlphaBeta(2.0, 0.0))) == [2, 1]
        assert counts("mg_wfbp", tensors, costs_of([1.0, 1.0, 1.0], AlphaBeta(0.1, 0.0))) == [1, 1, 1]

    def test_what_is_in_the_queue_anyway_is_merged(self) -> None:
        long = costs_of([1.0, 1.0, 0.5, 0.5], AlphaBeta(0.4, 0.1))
        assert counts("mg_wfbp", tensors_of([20, 1, 1, 1]), long) == [1, 3]


class TestOMGS:
    def test_it_merges_what_saves_more_than_it_waits(self) -> None:
        tensors = tensors_of([10] * 3)
        assert counts("omgs", tensors, costs_of([1.0, 0.5, 3.0], AlphaBeta(2.0, 0.0))) == [2, 1]

    def test_what_is_in_the_queue_anyway_is_merged(self) -> None:
        assert counts("omgs", tensors_of([20, 1, 1]), costs_of([1.0, 0.7, 0.7], AlphaBeta(0.6, 0.1))) == [1, 2]

    def test_encoding_at_once_may_cost_more_than_apart(self) -> None:
        def square(elements: float) -> float:
            return elements * elements / 100

        costs = StepCosts({f"t{i}": 0.5 for i in range(2)}, square, AlphaBeta(0, 0), AlphaBeta(2.0, 0.0), 2.0)
        assert counts("omgs", tensors_of([10, 10]), costs) == [1, 1], "2 s of encoding more, 2 s saved, 0.5 s waited"
        assert counts("omgs", tensors_of([5, 5]), costs) == [2]


class TestCupcake:
    @given(steps())
    def test_the_optimum_has_no_better(self, step: tuple[list[TensorInfo], StepCosts]) -> None:
        best = last_result("cupcake", step, partition="optimal")
        for name in planners.names():
            assert no_worse(best, last_result(name, step)), name

    @given(steps())
    def test_two_groups_are_no_worse_than_one(self, step: tuple[list[TensorInfo], StepCosts]) -> None:
        assert len(counts("cupcake", *step)) <= 2
        assert no_worse(last_result("cupcake", step), last_result("single", step))

    def test_an_optimum_by_hand(self) -> None:
        tensors, costs = tensors_of([1, 1, 1, 1]), costs_of([1.0] * 4, AlphaBeta(1.0, 0.25))
        assert prediction("cupcake", (tensors, costs), partition="optimal").seconds == 5.5
        assert counts("cupcake", tensors, costs) == [2, 2]

    def test_an_optimum_by_hand_where_buckets_disturb(self) -> None:
        tensors = tensors_of([1, 1, 1, 1])
        costs = costs_of([1.0] * 4, AlphaBeta(0.1, 0.25), disturbance=0.5)
        found = prediction("cupcake", (tensors, costs), partition="optimal")
        assert counts("cupcake_optimal", tensors, costs) == [3, 1]
        assert (found.spans[1].ready, found.alone) == (4.5, 4.0)
        assert (found.seconds, found.waiting) == (pytest.approx(4.85), pytest.approx(0.85))
        undisturbed = costs_of([1.0] * 4, AlphaBeta(0.1, 0.25))
        assert counts("cupcake_optimal", tensors, undisturbed)[-1] == 1

    def test_unknown_partitions_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="partition='three'; expected one of"):
            planners.get("cupcake", partition="three")


class TestSAFusion:
    @given(steps(), st.integers(1, 40))
    def test_it_never_waits_longer_than_equal_counts_or_no_fusion(
        self, step: tuple[list[TensorInfo], StepCosts], buffers: int
    ) -> None:
        inter, adaptive = last_result("safusion", step, scheme="inter"), last_result("safusion", step)
        assert no_worse(inter, last_result("safusion", step, scheme="naive", buffers=buffers))
        assert no_worse(adaptive, inter)
        for name in ("wfbp", "single"):
            assert no_worse(inter, last_result(name, step))

    def test_naive_has_equal_counts_and_needs_no_costs(self) -> None:
        runs = planners.get("safusion", scheme="naive", buffers=3)(tensors_of([1] * 8))
        assert [len(run) for run in runs] == [3, 3, 2]

    def test_each_buffer_is_what_the_one_before_hides(self) -> None:
        # Equation 2: two tensors, 2 s of backward < 1 startup of 3 s saved. Then C = 3 s hides three of 1 s each.
        tensors, costs = tensors_of([0] * 8), costs_of([1.0] * 8, lambda n: 3.0)  # type: ignore[arg-type]
        assert next(_adaptive(Pipeline(tensors, costs))) == [2, 5, 8]
        assert prediction("safusion", (tensors, costs)).idle == 0

    @pytest.mark.parametrize(("backward", "first"), [(1.4, 2), (1.5, 3), (3.0, 1)])
    def test_the_first_buffer_is_sooner_than_tensor_by_tensor(self, backward: float, first: int) -> None:
        tensors, costs = tensors_of([0] * 8), costs_of([backward] * 8, lambda n: 3.0)  # type: ignore[arg-type]
        assert next(_adaptive(Pipeline(tensors, costs)))[0] == first

    def test_the_paper_s_plan_is_not_replaced_where_equal_counts_wait_less(self) -> None:
        # Its three equations do not know that each bucket disturbs: 6.5 s, where two pairs take 6.
        tensors, costs = tensors_of([1] * 4), costs_of([1.0] * 4, AlphaBeta(1.0, 0.25), disturbance=0.5)
        assert counts("safusion_paper", tensors, costs) == [1, 1, 2]
        waiting = {
            name: last_result(name, (tensors, costs)) for name in ("safusion_paper", "safusion_inter", "safusion")
        }
        assert waiting["safusion"] <= waiting["safusion_inter"] < waiting["safusion_paper"]

    def test_encoding_counts_as_what_is_to_be_hidden(self) -> None:
        tensors = tensors_of([100] * 8)
        costs = costs_of([1.0] * 8, AlphaBeta(3.0, 0.0), encode=AlphaBeta(0.5, 0.0), ahead=True)
        assert next(_adaptive(Pipeline(tensors, costs))) == [2, 4, 6, 8]

    def test_a_long_tail_is_merged(self) -> None:
        # Buffers of 2, 10 and 4: when the second is through, 10 s have gone, and the 7 s after the first are over.
        tensors, costs = tensors_of([0] * 16), costs_of([0.5] * 16, lambda n: 5.0)  # type: ignore[arg-type]
        assert next(_adaptive(Pipeline(tensors, costs))) == [2, 16]

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"scheme": "intra"}, "scheme='intra'; expected one of"), ({"buffers": 0}, "buffers=0; expected a whole")],
    )
    def test_options_that_make_no_sense_are_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            planners.get("safusion", **options)
