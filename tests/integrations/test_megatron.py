"""Megatron-Core over the backend: lossless codecs leave every bit as it is over gloo, lossy ones send what they say."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer import ConfigError
from tests.harness import run_ranks
from tests.tiers import exhaustive, needs, tiered

from . import megatron_training as training

LOSSLESS_TEST = "tests/integrations/test_megatron.py::test_lossless_codecs_change_no_bit"


def both(rank: int, world: int, folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train by Megatron alone, over gloo, and with lossless codecs for all traffic."""
    given = training.KINDS[kind]
    plain = training.train(rank, world, f"{folder}/gloo", over="gloo", **given)
    return plain, training.train(rank, world, f"{folder}/ours", **given, **training.LOSSLESS)


@needs("megatron")
@pytest.mark.medium
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", tiered(training.KINDS, lambda kind: kind == "data"))
def test_lossless_codecs_change_no_bit(kind: str, tmp_path: Path) -> None:
    for plain, ours in run_ranks(both, 2, tmp_path, kind, backend=None, timeout=200):
        assert ours["digest"] == plain["digest"], "losses and weights of all ranks"
        assert ours["train_loss"] < ours["first_loss"]
        buckets, steps = len(ours["shards"]), ours["steps"]
        sent = {"data": "weights and gradients", "overlap": "weights and gradients", "tensor": "activations"}
        assert sent.get(kind, "tokens") in ours["compressed_bytes_per_step"]
        if kind in ("data", "overlap"):
            assert ours["calls"] == {"reduce_scatter": buckets * steps, "all_gather": buckets * steps}
            assert (buckets > 1) == (kind == "overlap")


def lossy(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with two tensor-parallel ranks in each of two replicas."""
    given = {"tensor_parallel": 2, "steps": 12}
    sent = {"activations": "taco", "weights": "qwd", "gradients": "tlq_hs"}
    return {
        "plain": training.train(rank, world, f"{folder}/gloo", over="gloo", **given),
        "papers": training.train(rank, world, f"{folder}/papers", **given, **sent),
        "gradients": training.train(rank, world, f"{folder}/gradients", **given, weights="delta", gradients="int4"),
    }


@needs("megatron")
@pytest.mark.medium
@pytest.mark.timeout(240)
@exhaustive(guarded_by=LOSSLESS_TEST)
def test_the_codecs_of_the_papers_send_what_they_say_and_learn_as_much(tmp_path: Path) -> None:
    """TACO between tensor-parallel ranks, SDP4Bit between replicas."""
    found = run_ranks(lossy, 4, tmp_path, backend=None, timeout=220)
    whole = [each["gradients"]["whole"] for each in found]
    assert whole.count(whole[0]) == 4, "tensor-parallel ranks part: gradients lose something else on each"
    assert whole[0] and whole[0] != found[0]["plain"]["whole"]
    for each in found:
        plain, ours = each["plain"], each["papers"]
        assert ours["replicas_agree"] and each["gradients"]["replicas_agree"]
        assert ours["digest"] != plain["digest"]
        assert ours["train_loss"] < ours["first_loss"] - 0.3
        assert abs(ours["train_loss"] - plain["train_loss"]) < 0.02 * plain["train_loss"]
        weights = fl.codecs.get("int4", hadamard=False, group_size=2048).bare
        gradients = fl.codecs.get("tlq_hs").within.bare  # all ranks are on one host
        (shard,) = ours["shards"]
        expected = weights.wire(shard, torch.float32).capacity + gradients.wire(shard, torch.float32).capacity
        assert ours["compressed_bytes_per_step"]["weights and gradients"] == expected < (2 + 4) * shard / 4


def layers(rank: int, world: int, store: str, over: str) -> tuple[list[bytes], dict[str, int]]:
    """Run layers that are cut by columns, rows and tokens, and each mapping that Megatron has for such layers."""
    torch.set_num_threads(1)
    with training.job(rank, world, store, over):
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer import TransformerConfig

        ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
        rule = {"codec": "zip", "op": ops, "group": "TENSOR_MODEL_PARALLEL_GROUP"}
        dist.init_process_group("fusionlayer", pg_options={"rules": [rule], "min_bytes": 0})
        parallel_state.initialize_model_parallel(world)
        group = parallel_state.get_tensor_model_parallel_group()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=world,
            sequence_parallel=True,
            use_cpu_initialization=True,
        )
        torch.manual_seed(0)
        how: dict[str, Any] = {"config": config, "init_method": config.init_method, "skip_bias_add": False}
        up = tensor_parallel.ColumnParallelLinear(32, 64, gather_output=False, **how)
        down = tensor_parallel.RowParallelLinear(64, 32, bias=True, input_is_parallel=True, **how)
        torch.manual_seed(rank)
        x = torch.randn(8, 2, 32, requires_grad=True)
        y, _ = down(torch.relu(up(x)[0]))
        for mapping in (
            tensor_parallel.copy_to_tensor_model_parallel_region,
            tensor_parallel.reduce_from_tensor_model_parallel_region,
            tensor_parallel.gather_from_sequence_parallel_region,
            tensor_parallel.reduce_scatter_to_sequence_parallel_region,
            tensor_parallel.gather_from_tensor_model_parallel_region,
            tensor_parallel.scatter_to_tensor_model_parallel_region,
            tensor_parallel.scatter_to_sequence_parallel_region,
        ):
            y = mapping(y * 1.0)  # some mappings write into their input
        y = tensor_parallel.all_to_all(group, y)
        y.square().sum().backward()
        results = [y.detach(), x.grad, *(parameter.grad for parameter in (*up.parameters(), *down.parameters()))]
        calls = dict(fl.backend.traffic(group).calls) if over == "fusionlayer" else {}
    return [x.numpy().tobytes() for x in results if x is not None], calls


def page(rank: int, world: int, store: str) -> list[list[str]]:
    """Run what docs/megatron.md says, and return the codecs of the groups of tensor and data parallelism."""
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    start, compress = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with training.job(rank, world, store):
        import train_megatron
        from megatron.core import parallel_state

        exec(start, {})
        options = argparse.Namespace(**training.SMALL, **training.RAW)
        options.tensor_parallel = world
        model, optimizer = train_megatron.build(options)
        exec(compress, {"get_megatron_optimizer": lambda *_: optimizer, "config": None, "model": model, "fl": fl})
        tensor: Any = parallel_state.get_tensor_model_parallel_group()
        data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        described = (tensor.group_desc, data.group_desc)
        assert described == ("TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP")
        return [
            [rule.codec for rule in group.policy.rules if rule.is_for(group.group_desc)] for group in (tensor, data)
        ]


def layers_and_page(rank: int, world: int, folder: Path) -> Any:
    both = [layers(rank, world, f"{folder}/{over}", over) for over in ("gloo", "fusionlayer")]
    return *both, page(rank, world, f"{folder}/page")


@needs("megatron")
@pytest.mark.medium
@pytest.mark.timeout(120)
@exhaustive(guarded_by=LOSSLESS_TEST)
def test_sequence_parallel_layers_and_all_mappings(tmp_path: Path) -> None:
    for (plain, _), (ours, calls), codecs in run_ranks(layers_and_page, 2, tmp_path, backend=None, timeout=100):
        assert codecs == [["taco"], ["tlq"]], "as the page says"
        assert ours == plain
        assert calls == {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 2, "all_to_all": 2}


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
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])
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


@pytest.mark.short
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


@pytest.mark.short
def test_the_backend_is_named_where_it_is_another(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has the backend 'gloo'; start torch.distributed by init_process_group"):
            fl.megatron.compress(an_optimizer(), "sdp4bit")
    finally:
        dist.destroy_process_group()


@pytest.mark.short
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
