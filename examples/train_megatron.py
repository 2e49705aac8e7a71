"""Train a small GPT of Megatron-Core with compressed traffic: tensor, data and expert parallelism.

    torchrun --nproc-per-node 4 examples/train_megatron.py --tensor-parallel 2
    torchrun --nproc-per-node 2 examples/train_megatron.py --weights delta --gradients zip
    torchrun --nproc-per-node 2 examples/train_megatron.py --experts 4 --tokens zip

Activations between tensor-parallel ranks are sent by TACO, weights and gradients between data-parallel ranks by
SDP4Bit; ``raw`` sends what it is given for as it is. Megatron-Core is installed by pip install 'fusionlayer[megatron]'.
Without a GPU the CPU does what Megatron asks of CUDA. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Config, Corpus
from megatron_on_cpu import on_cpu
from train_gpt import Parser, average, mistakes, positive, progress, writable

import fusionlayer as fl

CODECS = fl.codecs.names()


def main() -> None:
    """Run the command line."""
    options = parse_options()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")  # of libraries that it would like to have
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that it calls
    with mistakes("train_megatron"), on_cpu():
        start(options)
        result = train(options)
        if dist.get_rank() == 0:
            report(result, options.json)
    fl.shutdown()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument("--tensor-parallel", type=positive, default=1, help="ranks that share a layer (default 1)")
    parser.add_argument("--experts", type=positive, help="experts of each layer, dealt out to ranks (default none)")
    parser.add_argument("--expert-parallel", type=positive, help="ranks that share the experts (default all)")
    parser.add_argument("--activations", choices=CODECS, default="taco", help="tensor-parallel (default taco)")
    parser.add_argument("--weights", choices=["qwd", *CODECS], default="qwd", help="data-parallel (default qwd)")
    parser.add_argument("--gradients", choices=CODECS, default="tlq_hs", help="data-parallel (default tlq_hs)")
    parser.add_argument("--tokens", choices=CODECS, default="zip", help="to experts and back (default zip)")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=16, help="pieces of text per replica (default 16)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    return parser.parse_model()


def start(options: argparse.Namespace) -> None:
    """Start torch.distributed and Megatron's groups, with a codec for each kind of traffic."""
    if "WORLD_SIZE" not in os.environ:
        raise fl.ConfigError("nothing has started this process as one of several; use torchrun --nproc-per-node N")
    size = int(os.environ["WORLD_SIZE"])
    if size % options.tensor_parallel or options.heads % options.tensor_parallel:
        raise fl.ConfigError(
            f"--tensor-parallel {options.tensor_parallel} does not divide {size} processes and {options.heads} heads"
        )
    sharing = options.expert_parallel or size
    if options.experts and (options.experts % sharing or size % sharing or options.tensor_parallel > 1):
        raise fl.ConfigError(
            f"{sharing} ranks do not share --experts {options.experts}, or --tensor-parallel is above 1"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise fl.ConfigError(f"Megatron-Core is missing ({error}); pip install 'fusionlayer[megatron]'") from error

    # The first difference to a program without compression: the backend, and a policy for Megatron's groups by name.
    rules = [
        {
            "codec": options.activations,
            "group": "TENSOR_MODEL_PARALLEL_GROUP",
            "op": ["all_reduce", "all_gather", "reduce_scatter"],
            "dtype": "bfloat16",  # sums of the loss are f32
        },
        {"codec": options.tokens, "group": "EXPERT_MODEL_PARALLEL_GROUP", "op": "all_to_all", "dtype": "bfloat16"},
    ]
    dist.init_process_group("fusionlayer", pg_options={"rules": rules})
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=sharing if options.experts else 1,
    )


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return a GPT of Megatron-Core within its data parallelism, and its distributed optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import moe_utils

    # The router of Megatron-Core 0.16 asks for this name also where Transformer Engine, which has it, is missing.
    vars(moe_utils).setdefault("te_general_gemm", None)
    torch.manual_seed(options.seed)
    on_gpu = torch.cuda.is_available()
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed, inference_rng_tracker=not on_gpu)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        num_moe_experts=options.experts,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=not options.experts,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )
    layer = get_gpt_layer_local_spec(num_experts=options.experts, moe_grouped_gemm=False)
    network = GPTModel(config, layer, Config.vocabulary, options.context)
    if on_gpu:
        network.cuda()
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, sharded, Float16Module(config, network))
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=options.learning_rate, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [model],
    )
    # The second difference: how weights and gradients are sent between data-parallel ranks.
    fl.megatron.compress(optimizer, options.weights, options.gradients)
    return model, optimizer


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    model, optimizer = build(options)
    device = next(model.parameters()).device
    corpus = Corpus()
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    data = torch.Generator().manual_seed(options.seed * replicas + replica + 1)
    places = torch.arange(options.context, device=device).expand(options.batch_size, -1)
    losses: list[float] = []
    seconds: list[float] = []
    with progress(f"{replicas} x {options.tensor_parallel} ranks", options.steps) as advance:
        for _ in range(options.steps):
            begin = time.perf_counter()
            tokens, targets = (x.to(device) for x in corpus.sample(options.batch_size, options.context, data))
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = model(tokens, places, None, labels=targets).mean()
            loss.backward()
            finalize_model_grads([model])
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            advance(losses[-1], seconds[-1])
    groups = {
        "activations": parallel_state.get_tensor_model_parallel_group(),
        "weights and gradients": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "weights and gradients of experts": parallel_state.get_expert_data_parallel_group(),
        "tokens": parallel_state.get_expert_model_parallel_group(),
    }
    sent = {name: fl.backend.traffic(group).bytes_sent for name, group in groups.items()}
    return {
        "tensor_parallel": options.tensor_parallel,
        "replicas": replicas,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": options.steps,
        "first_loss": average(losses[0], device),
        "train_loss": average(statistics.fmean(losses[-10:]), device),
        "step_seconds": statistics.median(seconds),
        "compressed_bytes_per_step": {name: count / options.steps for name, count in sent.items() if count},
        "replicas_agree": replicas_agree(model),
        "digest": digest(losses, model),
    }


def replicas_agree(model: Any) -> bool:
    """Return whether data-parallel ranks have the same bits in the parameters that they share."""
    from megatron.core import parallel_state

    shared = [parameter for parameter in model.parameters() if getattr(parameter, "allreduce", True)]
    mine = (parallel_state.get_tensor_model_parallel_rank(), _hash(shared))
    every = {fl.broadcast_object(mine, root_rank=rank) for rank in range(dist.get_world_size())}
    return len(every) == parallel_state.get_tensor_model_parallel_world_size()


def digest(losses: list[float], model: Any) -> str:
    """Return a digest of the losses and weights of all ranks."""
    mine = f"{losses} {_hash(model.parameters())}"
    every = [fl.broadcast_object(mine, root_rank=rank) for rank in range(dist.get_world_size())]
    return hashlib.sha256(" ".join(every).encode()).hexdigest()[:16]


def _hash(parameters: Any) -> str:
    return hashlib.sha256(b"".join(p.detach().float().cpu().numpy().tobytes() for p in parameters)).hexdigest()


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    print(f"parameters        {result['parameters']:,} of a rank")
    print(f"mesh              {result['replicas']} replicas of {result['tensor_parallel']} tensor-parallel ranks")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    for name, count in result["compressed_bytes_per_step"].items():
        print(f"{'sent per step':18}{count / 1e6:.3f} MB of {name} by rank 0, compressed")
    print(f"replicas          {'agree' if result['replicas_agree'] else 'DIFFER'} to the last bit")
    print(f"digest            {result['digest']} of all losses and weights")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
