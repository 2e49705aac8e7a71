import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import Bucket, FusionPlan, TensorInfo
from fusionlayer.codecs import PackedPart, PackedResidual
from fusionlayer.scheduler import Memory
from tests.loops import looped

CPU = torch.device("cpu")
TENSORS = {name: TensorInfo(name, numel, "float32", 4) for name, numel in (("a", 3), ("b", 5), ("c", 2))}


def bucket(*names: str, align: int = 4) -> Bucket:
    return FusionPlan.build([[TENSORS[name] for name in names]], 1, "int", {}, "two_shot", align).buckets[0]


def plain(residual: torch.Tensor | PackedResidual) -> torch.Tensor:
    assert isinstance(residual, torch.Tensor)
    return residual


def filled(*names: str) -> Memory:
    """Return a memory of one bucket whose residuals are 1, 2, 3, ..., gaps included."""
    memory = Memory()
    flat = plain(memory.flat(bucket(*names), CPU))
    flat.copy_(torch.arange(1.0, flat.numel() + 1))
    return memory


def test_what_codecs_carry_from_sum_to_sum_follows_their_tensors() -> None:
    memory, first, second = Memory(), codecs.get("mxfp8", scale="auto"), codecs.get("mxfp8", scale="auto")
    memory.attach(["a", "b"], first)
    memory.attach(["c"], second)
    assert memory.state_dict()["numbers"] == {}
    first.restore({"headroom": 3.0})
    second.restore({"headroom": 5.0, "sums": 10, "saturated": 2})
    saved = memory.state_dict()
    assert [saved["numbers"][name]["headroom"] for name in "abc"] == [3, 3, 5]
    together = codecs.get("mxfp8", scale="auto")
    memory.attach(["b", "c"], together)
    assert together.kept() == {"headroom": 5, "sums": 10, "saturated": 2}
    memory.attach(["a"], together)
    assert together.kept()["headroom"] == 5, "it is known already"
    memory.load_state_dict({})
    assert together.kept() == {}
    resumed, later = Memory(), codecs.get("mxfp8", scale="auto")
    resumed.load_state_dict(saved)
    resumed.attach(["b"], later)
    assert later.kept()["headroom"] == 3


def as_lists(memory: Memory) -> dict[str, list[float]]:
    return {name: residual.tolist() for name, residual in memory.state_dict()["residuals"].items()}


def test_it_starts_from_zero() -> None:
    flat = plain(Memory().flat(bucket("a", "b"), CPU))
    assert flat.shape == (12,) and flat.dtype == torch.float32 and not flat.any()


def test_names_refer_to_their_slots() -> None:
    assert as_lists(filled("a", "b")) == {"a": [1, 2, 3], "b": [5, 6, 7, 8, 9]}


def test_residuals_follow_their_names_into_other_buckets() -> None:
    memory = filled("a", "b")
    first = plain(memory.flat(bucket("b", "c"), CPU))
    second = plain(memory.flat(bucket("a"), CPU))
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
    before = plain(early.flat(bucket("b", "a"), CPU))
    after = plain(late.flat(bucket("b", "a"), CPU))
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


# ---- states of single tensors ---------------------------------------------------------------------------------------


def test_a_tensor_has_a_state_of_its_own() -> None:
    memory = Memory()
    state = memory.state("a", 3, CPU)
    assert state.residual is not None and state.residual.tolist() == [0, 0, 0]
    assert memory.state("a", 3, CPU) is state
    saved = memory.state_dict()
    assert saved.keys() == {"residuals", "packed", "tensors", "numbers"}
    assert not saved["packed"] and not saved["tensors"] and not saved["numbers"]
    assert as_lists(memory) == {"a": [0, 0, 0]}


def test_residuals_follow_their_names_ahead_and_behind() -> None:
    memory = filled("a", "b")
    alone = memory.state("b", 5, CPU).residual
    assert alone is not None and alone.tolist() == [5, 6, 7, 8, 9]
    assert alone.untyped_storage().nbytes() == 4 * 5, "the flat residual must not live on for it"
    alone[0] = 50
    assert plain(memory.flat(bucket("b", "a"), CPU)).tolist() == [50, 6, 7, 8, 9, 0, 0, 0, 1, 2, 3, 0]
    assert memory.state("b", 5, CPU).residual is not alone


def test_without_feedback_there_is_no_residual_but_the_rest_is_kept() -> None:
    memory = filled("a")
    state = memory.state("a", 3, CPU, feedback=False)
    assert state.residual is None
    state.numbers["age"] = 2
    assert as_lists(memory) == {"a": [1, 2, 3]}
    assert memory.state("a", 3, CPU).numbers == {"age": 2}


def test_whole_states_come_back_in_place() -> None:
    memory = Memory()
    state = memory.state("a", 3, CPU)
    assert state.residual is not None
    state.residual.fill_(1)
    state.tensors["velocity"] = torch.full((3,), 2.0)
    state.numbers["threshold"] = 0.5
    saved = memory.state_dict()
    state.residual.fill_(9)
    state.tensors["velocity"].fill_(9)
    state.tensors["other"] = torch.zeros(3)
    state.numbers.update(threshold=9, age=9)

    memory.load_state_dict(saved)
    fresh = Memory()
    fresh.load_state_dict(saved)
    for loaded in (state, fresh.state("a", 3, CPU)):
        assert loaded.residual is not None and loaded.residual.tolist() == [1, 1, 1]
        assert {key: kept.tolist() for key, kept in loaded.tensors.items()} == {"velocity": [2, 2, 2]}
        assert loaded.numbers == {"threshold": 0.5}
    state.tensors["velocity"].fill_(9)
    assert saved["tensors"]["a"]["velocity"].tolist() == [2, 2, 2]

    memory.load_state_dict({"residuals": {"a": torch.ones(3)}})
    assert state.residual.tolist() == [1, 1, 1] and not state.tensors and not state.numbers
    memory.load_state_dict({})
    assert not state.residual.any()


def test_a_state_of_another_model_is_refused() -> None:
    memory = Memory()
    memory.load_state_dict({"residuals": {"a": torch.ones(4)}})
    for use in (lambda: memory.state("a", 3, CPU), lambda: memory.flat(bucket("a"), CPU)):
        with pytest.raises(ConfigError, match="'a' has 4 elements, its gradient 3; load the state of the same model"):
            use()


# ---- 8 bits ---------------------------------------------------------------------------------------------------------

SIZES = {"d": 300, "e": 1, "f": 257, "g": 128, "none": 0}


def wide(*names: str, align: int) -> Bucket:
    tensors = [TensorInfo(name, SIZES[name], "float32", 4) for name in names]
    return FusionPlan.build([tensors], 1, "int", {}, "two_shot", align).buckets[0]


def contents(memory: Memory) -> dict[str, torch.Tensor]:
    return {name: PackedPart(**kept).expanded() for name, kept in memory.state_dict()["packed"].items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(kept, other[name]) for name, kept in one.items())


@looped("align", [1, 4, 128])
def test_packed_residuals_follow_their_names_without_a_change_of_bits(align: int) -> None:
    """From bucket to bucket, aligned or not, to a tensor alone, through a checkpoint, and on in f32."""
    memory, first = Memory(8), wide("none", "d", "e", "f", align=align)
    given = torch.randn(first.numel, generator=torch.Generator().manual_seed(1))
    flat = memory.flat(first, CPU)
    assert isinstance(flat, PackedResidual)
    flat.pack(given, seed=7)
    out = flat.unpack(torch.full((first.numel,), 9.0))
    kept = contents(memory)
    for slot in first.slots:
        mine = slice(slot.offset, slot.offset + slot.numel)
        assert torch.equal(out[mine], kept[slot.name])
        assert torch.all((out[mine] - given[mine]).abs() <= given.abs().max() / 100)
        out[mine] = 0
    assert not out.any(), "between the tensors there are zeros, whatever was packed there"

    saved = memory.state_dict()
    alone = memory.state("f", SIZES["f"], CPU)
    assert alone.residual is None and alone.packed is not None
    assert torch.equal(alone.packed.unpack(torch.empty(SIZES["f"])), kept["f"])
    memory.flat(wide("f", "g", "none", "d", align=4), CPU)
    moved = contents(memory)
    assert same({name: moved[name] for name in kept}, kept) and not moved["g"].any()

    early, late, plain = Memory(8), Memory(8), Memory()
    early.load_state_dict(saved)
    early.flat(wide("f", "none", "d", "e", align=128), CPU)
    late.flat(wide("f", "none", "d", "e", align=128), CPU)
    late.load_state_dict(saved)
    plain.load_state_dict(saved)
    assert same(contents(early), kept) and same(contents(late), kept)
    assert same(plain.state_dict()["residuals"], kept) and not plain.state_dict()["packed"]
    late.load_state_dict({})
    assert not any(residual.any() for residual in contents(late).values())
    late.load_state_dict(plain.state_dict())
    for name, residual in contents(late).items():
        largest = float(kept[name].abs().max()) if len(residual) else 0.0
        torch.testing.assert_close(residual, kept[name], rtol=0, atol=largest / 250)
    with pytest.raises(ConfigError, match="'d' has 300 elements, its gradient 3"):
        late.state("d", 3, CPU)


def test_packing_at_random_keeps_small_residuals_in_the_mean() -> None:
    """A value of a tenth of a code beside a large one: rounding to the nearest would forget it in each step."""
    residual, steps = PackedResidual([(0, 128)], 128, CPU), 2000
    given = torch.full((128,), 0.1)
    given[0] = 127
    total = torch.zeros(128)
    for step in range(steps):
        residual.pack(given, seed=step)
        total += residual.unpack(torch.empty(128))
    torch.testing.assert_close(total / steps, given, rtol=0, atol=0.05)


def test_another_number_of_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="feedback_bits=4; expected 32 or 8"):
        Memory(4)
