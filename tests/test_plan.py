import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import FusionPlan, Slot, TensorInfo
from tests.codecs.variants import every
from tests.loops import looped

MODEL = [TensorInfo("a", 100, "float32", 4), TensorInfo("b", 300, "float32", 4), TensorInfo("c", 5, "float32", 4)]


def plan_of(runs: list[list[TensorInfo]], align: int = 128) -> FusionPlan:
    return FusionPlan.build(runs, 4, "int", {"bits": 4, "hadamard": True}, "two_shot", align)


PLAN = plan_of([MODEL[:2], MODEL[2:]])
FIRST, SECOND = PLAN.buckets


def with_first(**changes: object) -> FusionPlan:
    return replace(PLAN, buckets=(replace(FIRST, **changes), SECOND))  # type: ignore[arg-type]


# ---- building -------------------------------------------------------------------------------------------------------


TENSORS = st.lists(
    st.builds(TensorInfo, st.uuids().map(str), st.integers(0, 10**10), st.just("float16"), st.just(2)), min_size=2
)


@given(TENSORS, st.integers(1, 300))
def test_what_is_built_passes_the_check(tensors: list[TensorInfo], align: int) -> None:
    half = len(tensors) // 2
    plan = plan_of([tensors[:half], tensors[half:]], align)
    plan.check(tensors, 4)
    for bucket in plan.buckets:
        assert all(slot.offset % align == 0 for slot in bucket.slots) and bucket.numel % align == 0


@looped("names", [{"a"}, {"b"}, {"c"}, {"a", "c"}, set(), {"a", "b", "c"}])
def test_a_plan_without_tensors_is_the_one_that_is_built_without_them(names: set[str]) -> None:
    runs = [[tensor for tensor in run if tensor.name not in names] for run in (MODEL[:2], MODEL[2:])]
    assert PLAN.without(names) == plan_of([run for run in runs if run])


# ---- checking -------------------------------------------------------------------------------------------------------


@looped(
    "plan, message",
    [
        (replace(PLAN, world_size=8), "plan is for 8 ranks, this job has 4"),
        (replace(PLAN, buckets=(FIRST,)), "1 tensors differ, the first is 'c': plan has none, model has .5, 'f"),
        (replace(PLAN, buckets=(FIRST, SECOND, SECOND)), "more than once"),
        (with_first(slots=(FIRST.slots[0], replace(FIRST.slots[0], offset=128), FIRST.slots[1])), "more than once"),
        (with_first(slots=(Slot("a", 100, 0), Slot("b", 301, 128))), "first is 'b': plan has .301, 'float32'."),
        (with_first(slots=(*FIRST.slots, Slot("z", 1, 500))), "first is 'z': plan has .* model has none"),
        (with_first(dtype="float16"), "2 tensors differ, the first is 'a'"),
        (with_first(slots=(Slot("a", 100, 0), Slot("b", 300, 99))), "slot 'b' of bucket 0 overlaps"),
        (with_first(slots=(Slot("a", 100, -1), Slot("b", 300, 128))), "slot 'a' of bucket 0 overlaps"),
        (with_first(numel=427), "bucket 0 has 427 elements, its slots need 428"),
        (with_first(every=4, phase=4), "bucket 0 has every=4 and phase=4; expected every of at least 1, and a phase f"),
        (with_first(shares=(1, 1, 1)), r"bucket 0 has shares=.1, 1, 1.; expected 4 whole numbers, one for each rank"),
        (with_first(shares=(1, 1, 1, -1)), "bucket 0 has shares=.*none is below 0"),
        (with_first(shares=(0, 0, 0, 0)), "bucket 0 has shares=.*not all are 0"),
        (with_first(every=0), "bucket 0 has every=0 and phase=0; expected every of at least 1"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: FusionPlan, message: str) -> None:
    PLAN.check(MODEL, 4)
    with pytest.raises(ConfigError, match=message):
        plan.check(MODEL, 4)


# ---- digest ---------------------------------------------------------------------------------------------------------


def test_equal_plans_have_equal_digests() -> None:
    again = plan_of([MODEL[:2], MODEL[2:]])
    assert again == PLAN and again.digest() == PLAN.digest() and len(PLAN.digest()) == 32
    reordered = with_first(options={"hadamard": True, "bits": 4})
    assert reordered.digest() == PLAN.digest()


def test_every_difference_changes_the_digest() -> None:
    others = [
        replace(PLAN, world_size=5),
        replace(PLAN, buckets=(SECOND, FIRST)),
        plan_of([MODEL]),
        with_first(numel=640),
        with_first(dtype="bfloat16"),
        with_first(codec="raw"),
        with_first(options={"bits": 8, "hadamard": True}),
        with_first(options={}),
        with_first(algorithm="one_shot"),
        with_first(ahead=True),
        with_first(every=2),
        with_first(every=2, phase=1),
        with_first(shares=(1, 1, 1, 0)),
        with_first(shares=(1, 1, 0, 1)),
        with_first(slots=(FIRST.slots[1], FIRST.slots[0])),
        with_first(slots=(replace(FIRST.slots[0], name="A"), FIRST.slots[1])),
        with_first(slots=(replace(FIRST.slots[0], numel=99), FIRST.slots[1])),
        with_first(slots=(FIRST.slots[0], replace(FIRST.slots[1], offset=256))),
    ]
    digests = {plan.digest() for plan in (PLAN, *others)}
    assert len(digests) == len(others) + 1


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for codec in every():
        plan = FusionPlan.build([MODEL], 4, codec.name, codec.options, "two_shot", 1)
        plan.to_yaml(path)
        back = FusionPlan.from_yaml(str(path))
        assert FusionPlan.from_bytes(plan.to_bytes()) == plan
        assert back == plan and back.digest() == plan.digest()
        bucket = back.buckets[0]
        assert codecs.get(bucket.codec, **bucket.options) == codec


@looped(
    "change, message",
    [
        (lambda text: text.replace("version: 1", "version: 99"), "version 99, expected 1"),
        (lambda text: text.replace("version: 1\n", ""), "lacks 'version'"),
        (lambda text: text.replace("world_size", "world"), "unknown key 'world'; did you mean 'world_size'"),
        (lambda text: text.replace("offset", "start"), r"buckets\[0\].slots\[0\]: unknown key 'start'"),
        (lambda text: text.replace("algorithm", "method"), r"buckets\[0\]: unknown key 'method'"),
        (lambda text: text + "\t[", "cannot be read"),
        (lambda text: "just text", "'just text'; expected keys and values"),
        (lambda text: "", "nothing; expected keys and values"),
        (lambda text: text.replace("numel: 100", "numel: many"), r"slots\[0\].numel='many'; expected a whole number"),
        (lambda text: text.replace("world_size: 4", "world_size: four"), "world_size='four'; expected a whole number"),
        (lambda text: text.replace("offset: 128", "offset: null"), r"slots\[1\].offset=None; expected a whole number"),
        (lambda text: re.sub(r"slots:\n(  - .*\n|    .*\n)+", "slots: none\n", text), "slots='none'; expected a list"),
        (lambda text: text.replace("slots:\n", "slots: none\n  options:\n"), "key 'options' twice; .*line"),
        (lambda text: text + "- 7\n", r"buckets\[2\]=7; expected keys and values"),
        (lambda text: text.replace("ahead: false", "ahead: 0"), "ahead=0; expected true or false"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "plan.yaml"
    PLAN.to_yaml(path)
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        FusionPlan.from_yaml(path)


def test_shares_go_where_they_count_and_nowhere_else(tmp_path: Path) -> None:
    by_rates, own = (3, 2, 1, 0), (1, 0, 0, 0)
    plan = replace(PLAN, buckets=(replace(FIRST, shares=own), SECOND, replace(SECOND, algorithm="ring")))
    shared = plan.shared(by_rates, "two_shot")
    assert [bucket.shares for bucket in shared.buckets] == [own, by_rates, ()]
    assert plan.shared((), "two_shot") == plan
    shared.to_yaml(tmp_path / "plan.yaml")
    assert FusionPlan.from_yaml(tmp_path / "plan.yaml") == shared == FusionPlan.from_bytes(shared.to_bytes())


def test_a_plan_that_skips_no_step_has_the_digest_and_the_file_that_it_always_had(tmp_path: Path) -> None:
    assert PLAN.digest().hex() == "7ea3b27001a2d202d36c0ff4da530652aa9c8adc3cc6cf79ef3adf8eb35dade7"
    path = tmp_path / "plan.yaml"
    PLAN.to_yaml(path)
    assert not any(key in path.read_text() for key in ("every", "shares"))
    assert FusionPlan.from_yaml(path) == PLAN
    local = PLAN.staggered(6, 2)
    local.to_yaml(path)
    assert FusionPlan.from_yaml(path) == local == FusionPlan.from_bytes(local.to_bytes()) != PLAN


def test_a_plan_says_what_goes_ahead(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan = FusionPlan.build([MODEL], 4, "int", {}, "gather", 1, ahead=True)
    assert plan.buckets[0].ahead and not FIRST.ahead
    plan.to_yaml(path)
    assert FusionPlan.from_yaml(path) == plan
    path.write_text(path.read_text().replace("  ahead: true\n", ""))
    assert not FusionPlan.from_yaml(path).buckets[0].ahead, "a file from before there was the choice"


# ---- buckets that leave once in several steps -----------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 12))
def test_fragments_leave_one_after_the_other_evenly_spread_over_a_period(
    sizes: list[int], fragments: int, every: int
) -> None:
    tensors = [TensorInfo(f"t{i}", size, "float32", 4) for i, size in enumerate(sizes)]
    plan = plan_of([[tensor] for tensor in tensors], align=1)
    if fragments > min(every, len(sizes)):
        with pytest.raises(ConfigError, match=rf"fragments={fragments} is more than the \d+ (buckets|steps)"):
            plan.staggered(every, fragments)
        return
    local = plan.staggered(every, fragments)
    local.check(tensors, 4)
    assert local.skips == (every > 1)
    phases = [bucket.phase for bucket in local.buckets]
    distinct = sorted(set(phases))
    assert phases == sorted(phases) and len(distinct) == fragments and distinct[-1] == every - 1
    gaps = [after - before for before, after in zip(distinct, [*distinct[1:], distinct[0] + every], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    sent = [index for step in range(every) for index in local.due(step)]
    assert sent == list(range(len(sizes))), "every bucket leaves once in a period"
    loads = [sum(4 * sizes[index] for index in local.due(step)) for step in distinct]
    assert max(loads) == min(
        max(sum(4 * size for size in sizes[a:b]) for a, b in pairwise((0, *cuts, len(sizes))))
        for cuts in combinations(range(1, len(sizes)), fragments - 1)
    )
    assert local.staggered(1) == plan


@looped("every, fragments", [(0, 1), (True, 1), (2.0, 1), (4, 0)])
def test_periods_and_fragments_are_whole_numbers(every: int, fragments: int) -> None:
    with pytest.raises(ConfigError, match=r"(every|fragments)=.*; expected a whole number, at least 1"):
        PLAN.staggered(every, fragments)
