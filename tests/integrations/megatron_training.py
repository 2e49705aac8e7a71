"""Trainings by Megatron-Core that tests start in their ranks: the example, small, over gloo or compressed."""

from __future__ import annotations

import argparse
import os
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

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

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
    rank: int,
    world: int,
    store: str,
    *,
    over: str = "fusionlayer",
    command: Sequence[str] = (),
    **given: Any,
) -> dict[str, Any]:
    """Return what the example says of a training, with its norms, its shards' sizes and what its groups have sent.

    Args:
        rank: of this process.
        world: number of processes.
        store: a file by which they meet.
        over: the backend.
        command: options of the example, in place of ``given``.
        given: options that differ from small ones without codecs; ``overlap``, of Megatron.
    """
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
