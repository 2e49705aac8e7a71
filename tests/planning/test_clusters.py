"""What ``codec="auto"`` chooses on twelve clusters, and why."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.gpu_profile import NVLINK, PCIE, gpu_profile
from fusionlayer import codecs, collectives
from fusionlayer.planning.bucket_costs import short_name
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.codec_rules import AUTO, CodecRule, CodecRules
from fusionlayer.planning.online import CANDIDATES
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import predict_plan
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.projection import Method, project
from fusionlayer.planning.selection import Selection, select
from fusionlayer.scheduler import planners
from tests.loops import looped

ROOT = Path(__file__).parents[2]
H100 = "codec-gpu_nvidia-h100-80gb-hbm3_2026-11-26.json"


def offered(profile: Profile) -> Profile:
    """Return the profile with the codecs that "auto" chooses from in training."""
    return replace(profile, codecs={name: cost for name, cost in profile.codecs.items() if name in CANDIDATES})


@cache
def cpu() -> Profile:
    """A GPT of 44 MB of f32 on a virtual machine of two cores."""
    return offered(Profile.from_yaml(ROOT / "profiles" / "gpt_intel-r-xeon-r-processor_2026-11-25.yaml"))


@cache
def gpus(inside: str) -> Profile:
    """A GPT of 1 GB of bf16 on nodes of eight H100."""
    rows = json.loads((ROOT / "benchmarks" / "results" / H100).read_text())["rows"]
    return offered(gpu_profile(rows, {"NVLink": NVLINK, "PCIe": PCIE}[inside]))


def chosen(profile: Profile, scenario: Scenario, workers: int, fidelity: str) -> tuple[str, Selection]:
    """Return codec and collective of most elements, and the selection."""
    policy = CodecRules((CodecRule(AUTO),), fidelity)
    found = select(profile, policy, planners.get("tapered"), scenario, workers)
    sent: dict[str, int] = {}
    for tensor in profile.model.tensors:
        choice = found.choices[tensor.name]
        name = f"{short_name(choice.codec)} by {choice.algorithm}"
        sent[name] = sent.get(name, 0) + tensor.numel
    return max(sent, key=sent.__getitem__), found


GPT, NVLINKS, PCIES = "GPT of 44 MB on CPUs", "NVLink", "PCIe"
FEWER, SPARSE = "fewer bytes cross the slow link", "a hundredth of the elements crosses it"
ONCE, FAST = "each value leaves a node once", "the links are as fast as the codec"
MANY = collectives.choose(codecs.get("int8"), (1,) * 64)
CLUSTERS = [
    (GPT, Scenario("100mbit"), 2, "int by one_shot", 3.5, "chunked_topk by gather", SPARSE),
    (GPT, Scenario("1gbit"), 2, "int by one_shot", 2.5, "int2 by one_shot", FEWER),
    (GPT, Scenario("10gbit"), 2, "int by one_shot", 1.05, "int2 by one_shot", FEWER),
    (GPT, Scenario("1gbit"), 16, "int by two_shot", 3.0, "int2 by two_shot", FEWER),
    (GPT, Scenario("1gbit"), 64, f"int by {MANY}", 3.0, f"int2 by {MANY}", FEWER),
    (GPT, Scenario("100mbit", 2), 4, "int by two_level", 4.0, "chunked_topk by gather", ONCE),
    (GPT, Scenario("100mbit", 2), 8, "int by two_level", 4.0, "chunked_topk by gather", ONCE),
    (NVLINKS, Scenario("100gbit", 8), 64, "int by two_level", 1.8, "int2 by two_level", ONCE),
    (NVLINKS, Scenario("3200gbit", 8), 64, "raw by dense", 0.99, "raw by dense", FAST),
    (PCIES, Scenario("100gbit", 8), 8, "int by two_shot", 1.3, "int2 by two_shot", FEWER),
    (NVLINKS, Scenario("100gbit", 8), 8, "raw by dense", 0.99, "raw by dense", FAST),
    (GPT, Scenario("1gbit", rtt=0.05), 16, "int by two_shot", 9.0, "chunked_topk by gather", "two round trips, not 30"),
]


@looped("model, scenario, workers, near, faster, aggressive, why", CLUSTERS)
def test_what_auto_chooses(
    model: str, scenario: Scenario, workers: int, near: str, faster: float, aggressive: str, why: str
) -> None:
    """The default fidelity and "aggressive", and how often faster than raw the default's step is at least."""
    profile = cpu() if model == GPT else gpus(model)
    first, lossy = chosen(profile, scenario, workers, "aggressive")
    assert first == aggressive, (why, lossy.verdict)
    first, found = chosen(profile, scenario, workers, "near_lossless")
    assert first == near, (why, found.verdict)
    (raw,) = re.findall(r"raw by dense for all ([0-9.]+) ms", found.verdict)
    assert float(raw) / 1e3 >= faster * found.prediction.seconds, (why, found.verdict)
    if near == "raw by dense":
        assert all(choice.codec.lossless for choice in found.choices.values())


def test_on_nodes_of_gpus_neither_a_flat_sum_nor_raw_is_chosen() -> None:
    """Eight nodes of eight, 100 Gbit/s between them: two levels, and each node sends a fraction of what raw sends."""
    _, found = chosen(gpus("NVLink"), Scenario("100gbit", 8), 64, "near_lossless")
    every = sum(bucket.nbytes for bucket in found.plan.buckets)
    two_level = sum(bucket.nbytes for bucket in found.plan.buckets if bucket.algorithm == "two_level")
    assert two_level > 0.999 * every and {bucket.algorithm for bucket in found.plan.buckets} <= {"two_level", "dense"}
    assert found.prediction.sent / every == pytest.approx(0.9, abs=0.02)
    for codec, algorithm, sent in (("int8", "two_shot", 7.22), ("raw", "dense", 1.97)):
        scenario, planner = Scenario("100gbit", 8), planners.get("tapered")
        plan = make_plan(gpus("NVLink"), planner, codecs.get(codec), scenario, 64, algorithm=algorithm)
        step = predict_plan(gpus("NVLink"), plan, scenario)
        assert step.sent / every == pytest.approx(sent, abs=0.03) and step.seconds > 1.8 * found.prediction.seconds


def test_a_codec_must_save_something() -> None:
    """With adapters of 3.2 Tbit/s two bits would save 0.2 % of a step."""
    profile, scenario = gpus("NVLink"), Scenario("3200gbit", 8)
    name, found = chosen(profile, scenario, 64, "aggressive")
    (lossy,) = re.findall(r"int2 by two_level for all ([0-9.]+) ms", found.verdict)
    assert name == "raw by dense" and float(lossy) / 1e3 < found.prediction.seconds
    reasons = {choice.reason for choice in found.choices.values()}
    assert reasons == {"rules[0]: auto, aggressive: no codec saves 2 % of the step; raw by dense loses nothing"}


@looped("nodes", [8, 32, 128])
@looped("rate", ["100gbit", "400gbit"])
def test_projections_of_nodes_of_gpus(nodes: int, rate: str) -> None:
    """DDP is the faster of NCCL's ring and its trees; at 100 Gbit/s a node int8 beats it by a third and more."""
    profile, scenario = gpus("NVLink"), Scenario(rate, 8)
    names = ("ddp", "ddp-ring", "ddp-tree", "int8")
    ddp, ring, tree, int8 = (project(profile, Method.named(n, profile), scenario, 8 * nodes).seconds for n in names)
    assert ddp <= min(ring, tree) < ring < 1.3 * nodes / 8 * tree, "a ring has a hop for each rank"
    assert (1.3 * int8 < ddp) == (rate == "100gbit")
