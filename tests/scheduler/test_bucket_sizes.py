"""Buckets follow the number of ranks, the codec, the device and the rate, and a plan says why."""

from pathlib import Path

from fusionlayer import codecs
from fusionlayer.base.plan import FusionPlan, TensorInfo
from fusionlayer.planning.cost_model import FREE
from fusionlayer.scheduler import planners
from fusionlayer.scheduler.fusing import fuse
from fusionlayer.scheduler.planners import StepCosts
from tests.loops import looped

MIB = 1 << 20
MODEL = [TensorInfo(f"{i}", MIB, "bfloat16", 2) for i in range(256)]  # 512 MiB in tensors of 2 MiB


def plan_of(codec: str, nodes: tuple[int, ...], **how: object) -> FusionPlan:
    return fuse(MODEL, planners.get("tapered"), codecs.get(codec), nodes, **how)  # type: ignore[arg-type]


def sizes(plan: FusionPlan) -> list[int]:
    return [bucket.nbytes // MIB for bucket in plan.buckets]


@looped("codec, nodes", [("int8", (1,) * 16), ("int8", (8,) * 8), ("int4", (8,) * 8), ("raw", (8,) * 8)])
def test_a_gpu_gets_larger_buckets(codec: str, nodes: tuple[int, ...]) -> None:
    on_cpu, on_gpu = plan_of(codec, nodes), plan_of(codec, nodes, on_device=True)
    assert max(sizes(on_cpu)) == 8 and max(sizes(on_gpu)) == 32 and len(on_gpu.buckets) < 24
    assert "up to 8 MiB on the CPU" in on_cpu.reason and "up to 32 MiB on a GPU" in on_gpu.reason


@looped("codec, ranks", [("int8", 8), ("int8", 256), ("int4", 256), ("int8", 512)])
def test_no_message_to_a_rank_is_too_short(codec: str, ranks: int) -> None:
    """Of 16 KiB at least, as far as 64 MiB of gradients allow."""
    plan = plan_of(codec, (1,) * ranks, algorithm="two_shot")
    for bucket in plan.buckets[:-1]:
        message = codecs.get(codec).bare.wire(bucket.numel).capacity / ranks
        assert message >= 16 << 10 or bucket.nbytes >= 60 * MIB or ranks == 8
    assert max(sizes(plan)) <= 64
    assert (f"each of {ranks} ranks has few bytes" in plan.reason) == (ranks > 8)
    whole = plan_of(codec, (1,) * ranks, algorithm="one_shot")
    assert max(sizes(whole)) == 8 and "few bytes" not in whole.reason


def test_startups_take_a_small_part_of_transfers() -> None:
    def costs(startup: float) -> StepCosts:
        return StepCosts({}, FREE, FREE, lambda elements: startup + 1e-9 * elements, startup)

    fast, slow = (plan_of("int8", (1, 1), costs=lambda codec, name, s=s: costs(s)) for s in (1e-6, 5e-3))
    assert max(sizes(fast)) == 8 and max(sizes(slow)) == 32
    assert "startups" not in fast.reason and "32 MiB, or startups take a quarter of the transfers" in slow.reason


def test_a_plan_keeps_its_reason_and_ranks_do_not_compare_it(tmp_path: Path) -> None:
    plan = plan_of("int8", (8,) * 8, on_device=True)
    assert plan.reason.startswith("int by two_level: buckets of up to 32 MiB on a GPU")
    plan.to_yaml(tmp_path / "plan.yaml")
    for again in (FusionPlan.from_yaml(tmp_path / "plan.yaml"), FusionPlan.from_bytes(plan.to_bytes())):
        assert again == plan and again.reason == plan.reason
    assert FusionPlan(plan.buckets, 64).digest() == plan.digest()


def test_sizes_of_the_users_stay() -> None:
    planner = planners.get("tapered", threshold=4 * MIB)
    plan = fuse(MODEL, planner, codecs.get("int8"), (8,) * 8, on_device=True)
    assert max(sizes(plan)) == 4
    given = fuse(MODEL, planners.get("tapered", threshold=4 * MIB, edge=MIB), codecs.get("int8"), (8,) * 8)
    assert given.reason == ""


def test_a_slow_network_needs_no_long_messages() -> None:
    """At 1 MB/s sixteen ranks' pieces of a small bucket take longer than all startups, however short they are."""
    costs = StepCosts({}, FREE, FREE, lambda elements: 1e-3 + 1e-6 * elements, 1e-3)
    unknown, slow = (
        plan_of("int8", (1,) * 256, algorithm="two_shot", **how) for how in ({}, {"costs": lambda codec, name: costs})
    )
    assert sizes(unknown)[0] > 1 >= sizes(slow)[0] - 1
