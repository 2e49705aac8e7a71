"""Megatron-Core over the backend: lossless codecs leave every bit as it is over gloo, lossy ones send what they say."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import fusionlayer as fl
from fusionlayer import ConfigError
from tests.harness import run_ranks
from tests.tiers import engine, exhaustive, long, needs

from . import megatron_training as training

EXACT = {"weights": "delta", "gradients": "raw", "tokens": "zip"}
GUARD = "tests/integrations/test_megatron.py::test_buckets_over_the_backend"


def on_megatron(test: Any) -> Any:
    """Mark a test that imports Megatron."""
    return needs("megatron")(engine(pytest.mark.medium(test)))


def sdp4bit(numel: int) -> int:
    """Return the bytes that a rank sends another for a shard: its weights in 4 bits, gradients in 8 on one host."""
    weights = fl.codecs.get("int4", hadamard=False, group_size=2048).bare
    gradients: Any = fl.codecs.get("tlq_hs")
    return sum(codec.wire(numel, torch.float32).capacity for codec in (weights, gradients.within.bare))


def of_kinds(rank: int, world: int, folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Train over gloo, and compressed without loss."""
    results: dict[str, Any] = {}
    for kind in kinds:
        given = training.KINDS[kind]
        plain = training.train(rank, world, f"{folder}/{kind} gloo", over="gloo", **given)
        results[kind] = plain, training.train(rank, world, f"{folder}/{kind}", **given, **training.LOSSLESS)
    return results


def in_pairs(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """All else that needs two ranks, in one start: importing Megatron takes longer than each training."""
    results = of_kinds(rank, world, folder, [kind for kind in training.KINDS if kind != "data"])
    results["layers"] = [
        training.layers(rank, world, f"{folder}/layers {over}", over) for over in ("gloo", "fusionlayer")
    ]
    results["stages"] = [
        training.stages(rank, world, f"{folder}/stages {over}", over) for over in ("gloo", "fusionlayer")
    ]
    results["page"] = training.python_of_the_page(rank, world, f"{folder}/page")
    for number, words in enumerate(
        re.findall(r"^torchrun --nproc-per-node 2 examples/train_megatron.py(.*)$", training.PAGE, re.M)
    ):
        results["commands", number] = training.train(rank, world, f"{folder}/command {number}", command=words.split())
    return results


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what CI looks at."""
    return run_ranks(of_kinds, 2, tmp_path_factory.mktemp("data"), ["data"], backend=None, timeout=200)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(in_pairs, 2, tmp_path_factory.mktemp("pairs"), backend=None, timeout=200)


@on_megatron
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[long] * (kind != "data")) for kind in training.KINDS])
@exhaustive(guarded_by=GUARD)
def test_lossless_codecs_change_no_bit(kind: str, request: pytest.FixtureRequest) -> None:
    for each in request.getfixturevalue("data" if kind == "data" else "pairs"):
        plain, ours = each[kind]
        assert ours["digest"] == plain["digest"], "losses and weights of all ranks"
        assert ours["train_loss"] < ours["first_loss"]
        buckets, steps = len(ours["shards"]), ours["steps"]
        sent = {"data": "weights and gradients", "overlap": "weights and gradients", "tensor": "activations"}
        assert sent.get(kind, "tokens") in ours["compressed_bytes_per_step"]
        if kind in ("data", "overlap"):
            overlaps = kind == "overlap"  # the gather of the last step would run under the next forward
            assert ours["calls"] == {"reduce_scatter": buckets * steps, "all_gather": buckets * (steps - overlaps)}
            assert (buckets > 1) == overlaps


@on_megatron
@long(guarded_by=GUARD)
def test_sequence_parallel_layers_and_all_mappings(pairs: list[dict[str, Any]]) -> None:
    for each in pairs:
        (plain, _), (ours, calls) = each["layers"]
        assert ours == plain
        assert calls == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 2, "all_to_all": 2}


@on_megatron
@long(guarded_by=GUARD)
def test_pipeline_stages(pairs: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(pairs):
        (plain, losses, _), (*ours, calls) = each["stages"]
        assert ours == [plain, losses] and len(plain) > 10 and len(losses) == 4 * rank
        assert calls == {"send": 4, "recv": 4}, "each microbatch forward and back"


@on_megatron
@long(guarded_by=GUARD)
def test_the_programs_of_the_page(pairs: list[dict[str, Any]]) -> None:
    """The command for four ranks is run in tests/examples."""
    for each in pairs:
        assert each["page"] == ["taco", "tlq"]
        lossless, experts = each["commands", 0], each["commands", 1]
        assert lossless["replicas_agree"] and lossless["compressed_bytes_per_step"].keys() == {"weights and gradients"}
        assert experts["compressed_bytes_per_step"].keys() == {"weights and gradients", "tokens"}


@pytest.fixture(scope="module")
def fours(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(in_fours, 4, tmp_path_factory.mktemp("fours"), backend=None, timeout=220)


def in_fours(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with two tensor-parallel ranks in each of two replicas, and with experts that two ranks share."""
    given = {"tensor_parallel": 2, "steps": 12}
    experts = {"experts": 4, "expert_parallel": 2}
    sent = {"activations": "taco", "weights": "qwd", "gradients": "tlq_hs"}
    return {
        "plain": training.train(rank, world, f"{folder}/gloo", over="gloo", **given),
        "papers": training.train(rank, world, f"{folder}/papers", **given, **sent),
        "gradients": training.train(rank, world, f"{folder}/gradients", **given, weights="delta", gradients="int4"),
        "plain experts": training.train(rank, world, f"{folder}/experts gloo", over="gloo", **experts),
        "experts": training.train(rank, world, f"{folder}/experts", **experts, **EXACT),
    }


@on_megatron
@long(guarded_by=GUARD)
def test_the_codecs_of_the_papers_send_what_they_say_and_learn_as_much(fours: list[dict[str, Any]]) -> None:
    """TACO between tensor-parallel ranks, SDP4Bit between replicas."""
    norms = [each["gradients"]["norms"] for each in fours]
    assert norms.count(norms[0]) == 4, "tensor-parallel ranks part: gradients lose something else on each"
    assert norms[0] and norms[0] != fours[0]["plain"]["norms"]
    for each in fours:
        plain, ours = each["plain"], each["papers"]
        assert ours["replicas_agree"] and each["gradients"]["replicas_agree"]
        assert ours["digest"] != plain["digest"]
        assert ours["train_loss"] < ours["first_loss"] - 0.3
        assert abs(ours["train_loss"] - plain["train_loss"]) < 0.02 * plain["train_loss"]
        (shard,) = ours["shards"]
        sent = ours["compressed_bytes_per_step"]["weights and gradients"]
        assert sent == sdp4bit(shard) < (2 + 4) * shard / 3.8, (
            "bf16 weights and f32 gradients, from 6 bytes to about 1.5"
        )


@on_megatron
@long(guarded_by=GUARD)
def test_weights_of_experts_that_replicas_share(fours: list[dict[str, Any]]) -> None:
    """Megatron steps an optimizer for experts after the other one."""
    for each in fours:
        plain, ours = each["plain experts"], each["experts"]
        assert ours["digest"] == plain["digest"]
        assert ours["calls"] == ours["calls of experts"] == {"all_gather": ours["steps"]}


class BucketGroup(SimpleNamespace):
    """What ``compress`` asks of a bucket group of Megatron; it counts how often its weights were gathered."""

    gathered = 0

    def start_param_sync(self, force_sync: bool = False) -> None:
        self.gathered += 1


class Optimizer(SimpleNamespace):
    """What ``compress`` asks of Megatron's distributed optimizer, whose step gathers all weights of its model."""

    def step_with_ready_grads(self) -> bool:
        for group in (*self.model_chunks[0].bucket_groups, *self.model_chunks[0].expert_parallel_bucket_groups):
            group.start_param_sync()
        return True


def an_optimizer(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Optimizer:
    """Return one with a group of one bucket, over the default group."""
    bucket = SimpleNamespace(param_data=torch.zeros(8, dtype=dtype))
    group = BucketGroup(buckets=[bucket], intra_distributed_optimizer_instance_group=dist.group.WORLD)
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[], named_parameters=lambda: [])
    known = {"num_distributed_optimizer_instances": 1, **options}
    return Optimizer(
        ddp_config=SimpleNamespace(**known), buffers=[SimpleNamespace(buckets=[bucket])], model_chunks=[chunk]
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("fusionlayer", init_method=f"file://{tmp_path}/ours", rank=0, world_size=1)
    yield
    fl.shutdown()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_each_weight_is_gathered_once_though_several_optimizers_step() -> None:
    """Megatron has one for experts, and either gathers all weights of the model when it has stepped."""
    dense, experts = an_optimizer(), an_optimizer()
    (chunk,) = dense.model_chunks
    chunk.expert_parallel_bucket_groups = experts.model_chunks[0].bucket_groups
    experts.model_chunks = [chunk]
    fl.megatron.compress(SimpleNamespace(chained_optimizers=[dense, experts]), "delta")
    for _ in range(3):
        assert dense.step_with_ready_grads() and experts.step_with_ready_grads()
    assert chunk.bucket_groups[0].gathered == chunk.expert_parallel_bucket_groups[0].gathered == 3
    chunk.bucket_groups[0].start_param_sync(force_sync=True)
    assert chunk.bucket_groups[0].gathered == 4, "what a program asks for itself"


class GatheringGroup(BucketGroup):
    """A bucket group that sends as Megatron's does: in place, through torch's coalescing manager."""

    def start_param_sync(self, force_sync: bool = False) -> None:
        (bucket,), group = self.buckets, self.intra_distributed_optimizer_instance_group
        with _coalescing_manager(group, async_ops=True) as manager:
            shard = bucket.param_data.view(group.size(), -1)[group.rank()]
            dist.all_gather_into_tensor(bucket.param_data, shard, group=group, async_op=True)
        manager.wait()


class Descent(Optimizer):
    """Takes steps towards a goal, with f32 weights that only this rank has."""

    def step_with_ready_grads(self) -> bool:
        (bucket,), group = self.buffers[0].buckets, dist.group.WORLD
        gradient = bucket.param_data.float() * (1 + dist.get_rank()) - 1
        mine = gradient.view(group.size(), -1)[group.rank()]
        with _coalescing_manager(group, async_ops=False):
            dist.reduce_scatter_tensor(mine, gradient, group=group)
        self.main -= 0.05 * mine
        bucket.param_data.view(group.size(), -1)[group.rank()].copy_(self.main)
        self.model_chunks[0].bucket_groups[0].start_param_sync()
        return True


def descend(rank: int, world: int, weights: str | None, gradients: str | None) -> tuple[list[float], Any]:
    optimizer = Descent(**vars(an_optimizer()))
    (bucket,) = optimizer.buffers[0].buckets
    bucket.param_data = torch.randn(world * 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer.main = bucket.param_data.view(world, -1)[rank].float()
    optimizer.model_chunks[0].bucket_groups = [GatheringGroup(**vars(optimizer.model_chunks[0].bucket_groups[0]))]
    group: Any = dist.group.WORLD
    if weights is not None:
        fl.megatron.compress(optimizer, weights, gradients)
    for _ in range(40):
        optimizer.step_with_ready_grads()
    calls = group.traffic if weights is not None else None
    error = (bucket.param_data.view(world, -1)[rank].float() - optimizer.main).abs().max().item()
    return bucket.param_data.tolist(), calls and (dict(calls.calls), calls.bytes_sent), error


@pytest.mark.medium
def test_buckets_over_the_backend() -> None:
    """Lossless differences are the bits of gloo; those in int4 leave all ranks the same, near the exact weights."""
    first, *_ = plain = run_ranks(descend, 2, None, None, backend="gloo")
    for weights, gradients, factor in (("delta", "zip", 1.0), ("sdp4bit", None, 5.0)):
        found = run_ranks(descend, 2, weights, gradients, backend="fusionlayer")
        assert found[0][0] == found[1][0]
        assert (found[0][0] == first[0]) == (weights == "delta")
        for (_, (calls, sent), error), (_, _, rounding) in zip(found, plain, strict=True):
            assert calls == {"reduce_scatter": 40, "all_gather": 40}
            assert error <= factor * rounding
            if weights == "sdp4bit":
                assert sent == 40 * sdp4bit(4096)
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(first[0]), rtol=0, atol=0.02)


def test_the_backend_is_named_where_it_is_another(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has the backend 'gloo'; start torch.distributed by init_process_group"):
            fl.megatron.compress(an_optimizer(), "sdp4bit")
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ConfigError, match="got a SGD; expected Megatron's distributed optimizer"):
        fl.megatron.compress(torch.optim.SGD([torch.zeros(1)]), "qwd")
    for optimizer, arguments, complaint in (
        (an_optimizer(), (None, "topk"), "the codec needs error feedback, which Megatron's buckets do not have"),
        (an_optimizer(), ("sdp4bit", "int8"), "weights=sdp4bit names gradients too"),
        (an_optimizer(torch.float32), ("qwd",), "the model has no bf16 or f16 weights"),
        (an_optimizer(num_distributed_optimizer_instances=2), ("qwd",), "use 1, or weights='delta'"),
        (an_optimizer(use_megatron_fsdp=True), ("qwd",), "shards weights in another way"),
        (
            an_optimizer(reduce_scatter_with_fp32_accumulation=True),
            (None, "int8"),
            "sends gradients by an all-to-all, not by a reduce-scatter",
        ),
    ):
        with pytest.raises(ConfigError, match=complaint):
            fl.megatron.compress(optimizer, *arguments)
    group: Any = dist.group.WORLD
    fl.megatron.compress(an_optimizer(), "qwz", "int8")
    assert [(rule.codec, rule.op) for rule in group.policy.rules] == [("int", "reduce_scatter"), ("int", "all_gather")]
