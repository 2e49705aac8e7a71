"""What ranks do with Megatron-Core in tests, over gloo or compressed: the example, small; layers and stages alone."""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fusionlayer as fl

SOURCE = Path(__file__).parents[2]
PAGE = (SOURCE / "docs" / "megatron.md").read_text()

sys.path.insert(0, str(SOURCE / "examples"))

SMALL = {
    **{
        "tensor_parallel": 1,
        "experts": None,
        "expert_parallel": None,
        "steps": 3,
        "batch_size": 8,
        "learning_rate": 2e-3,
        "seed": 0,
    },
    **{"width": 64, "layers": 1, "heads": 4, "context": 32, "json": None},
}
LOSSLESS = {"activations": "zip", "weights": "delta", "gradients": "zip", "tokens": "zip"}
RAW = dict.fromkeys(LOSSLESS, "raw")
KINDS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "experts": {"experts": 4},
    "overlap": {"overlap": True},
}


@contextmanager
def job(rank: int, world: int, store: str, backend: str = "fusionlayer") -> Iterator[None]:
    """Have the example start ``backend``, whatever it names, and end Megatron and the backend afterwards."""
    real = dist.init_process_group

    def init(name: str, pg_options: Any = None) -> None:
        options = {"pg_options": pg_options} if backend == name else {}
        real(backend, init_method=f"file://{store}", rank=rank, world_size=world, **options)

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, place):
        warnings.simplefilter("ignore")
        from megatron_on_cpu import on_cpu

        with on_cpu(), mock.patch.object(dist, "init_process_group", init):
            from megatron.core import parallel_state

            try:
                yield
            finally:
                fl.shutdown()
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()


def train(
    rank: int, world: int, store: str, *, over: str = "fusionlayer", command: Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    """Return what the example says of a training, with its norms, its shards' sizes and what its groups have sent."""
    import train_megatron

    given = {**SMALL, **RAW, **given}
    torch.set_num_threads(1)
    with job(rank, world, store, over), ExitStack() as stack:
        from megatron.core import distributed, optimizer, parallel_state

        if given.pop("overlap", False):
            buckets = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
            for module, name, options in (
                (distributed, "DistributedDataParallelConfig", buckets),
                (optimizer, "OptimizerConfig", {"overlap_param_gather": True}),
            ):
                stack.enter_context(mock.patch.object(module, name, partial(getattr(module, name), **options)))
        if over == "gloo":
            stack.enter_context(mock.patch.object(fl.megatron, "compress", lambda *_: None))
            stack.enter_context(mock.patch.object(fl.backend, "traffic", lambda _: mock.Mock(bytes_sent=0)))
        built: list[Any] = []
        build = train_megatron.build
        stack.enter_context(
            mock.patch.object(train_megatron, "build", lambda options: built.append(build(options)) or built[0])
        )
        options = argparse.Namespace(**given)
        if command:
            sizes = ("--width", "64", "--layers", "1", "--context", "32", "--batch-size", "8", "--steps", "3")
            with mock.patch("sys.argv", ["train_megatron", *command, *sizes]):
                options = train_megatron.parse_options()
        train_megatron.start(options)
        result: dict[str, Any] = train_megatron.train(options)
        model, _ = built[0]
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        result["norms"] = {
            name: p.detach().float().tolist() for name, p in model.named_parameters() if "layernorm" in name
        }
        result["shards"] = [bucket.param_data.numel() // data.size() for b in model.buffers for bucket in b.buckets]
        if over == "fusionlayer":
            result["calls"] = dict(fl.backend.traffic(data).calls)
            result["calls of experts"] = dict(fl.backend.traffic(parallel_state.get_expert_data_parallel_group()).calls)
    return result


def layers(rank: int, world: int, store: str, over: str) -> tuple[list[bytes], dict[str, int]]:
    """Run layers that are cut by columns, rows and tokens, and each mapping that Megatron has for such layers."""
    torch.set_num_threads(1)
    with job(rank, world, store, over):
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


def stages(rank: int, world: int, store: str, over: str) -> tuple[list[bytes], list[float], dict[str, int]]:
    """Run a GPT of two pipeline stages forward and backward, with four microbatches."""
    with job(rank, world, store, over):
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig

        rule = {"codec": "zip", "op": "send", "group": "PIPELINE_MODEL_PARALLEL_GROUP"}
        dist.init_process_group("fusionlayer", pg_options={"rules": [rule], "min_bytes": 0})
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            pipeline_model_parallel_size=world,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        torch.manual_seed(0)
        ends = {"pre_process": rank == 0, "post_process": rank == world - 1}
        model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16, **ends)
        batches = torch.randint(64, (4, 2, 16), generator=torch.Generator().manual_seed(0))
        places = torch.arange(16).expand(2, -1)

        def step(batches: Iterator[torch.Tensor], model: Any) -> Any:
            tokens = next(batches)
            return model(tokens, places, None, labels=tokens), lambda loss: (loss.mean(), loss.mean().item())

        losses = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=16,
            micro_batch_size=2,
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        calls = dict(fl.backend.traffic(group).calls) if over == "fusionlayer" else {}
    return [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None], losses, calls


def python_of_the_page(rank: int, world: int, store: str) -> list[str]:
    """Run it, and return the codecs of the first rules for tensor and for data parallelism."""
    start, compress = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    with job(rank, world, store):
        import train_megatron
        from megatron.core import parallel_state

        exec(start, {})
        options = argparse.Namespace(**{**SMALL, **RAW, "tensor_parallel": world})
        model, optimizer = train_megatron.build(options)
        exec(compress, {"get_megatron_optimizer": lambda *_: optimizer, "config": None, "model": model, "fl": fl})
        tensor: Any = parallel_state.get_tensor_model_parallel_group()
        data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found = []
        for group, name in ((tensor, "TENSOR_MODEL_PARALLEL_GROUP"), (data, "DATA_PARALLEL_GROUP_WITH_CP")):
            assert group.group_desc == name
            found.append(next(rule.codec for rule in group.policy.rules if rule.is_for(name)))
    return found
