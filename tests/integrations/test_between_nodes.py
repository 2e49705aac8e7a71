"""Bytes that a node sends to other nodes by default, in every API: those of one message, whatever its ranks."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import codecs
from fusionlayer.backend import calls
from fusionlayer.collectives.choice import sent_by_node
from fusionlayer.transport import Transport
from fusionlayer.transport.linked import LinkedTransport
from fusionlayer.transport.local import LocalTransport
from tests.harness import run_ranks
from tests.loops import looped
from tests.ranks import over_threads

N = 1 << 18
WIDTH = 512
SMALL = 1024
"""Agreements and other messages of this length do not count."""

BITS = {"int8": 8 + 32 / 128, "int4": 4 + 32 / 128}
"""Of an element: its code, and a scale in f32 for each group of 128."""


def count(kind: type[Transport], replace: Callable[[type, str, Any], None]) -> Counter[int]:
    """Return what ranks of each node send to other nodes over transports of this ``kind``: it grows from now on."""
    sent: Counter[int] = Counter()
    lock, within = threading.Lock(), threading.local()

    def counting(call: Callable[..., None], messages: Callable[[Transport, Any], Any]) -> Callable[..., None]:
        def counted(self: Transport, x: Any, *out: Any) -> None:
            outer, within.outer = getattr(within, "outer", True), False
            if outer:
                (node,) = (each for each in self.nodes if self.rank in each)
                sizes = [m.numel() for to, m in messages(self, x) if to not in node]
                with lock:
                    sent[self.nodes.index(node)] += sum(size for size in sizes if size > SMALL)
            try:
                call(self, x, *out)
            finally:
                within.outer = outer

        return counted

    replace(kind, "exchange", counting(kind.exchange, lambda _, x: of_exchange(x)))
    replace(kind, "all_to_all", counting(kind.all_to_all, lambda _, x: enumerate(x)))
    replace(kind, "all_gather", counting(kind.all_gather, lambda self, x: enumerate([x] * self.size)))
    return sent


def of_exchange(messages: Mapping[int, tuple[Tensor, Tensor]]) -> Iterable[tuple[int, Tensor]]:
    """Return each message of an exchange with its rank."""
    return ((to, send) for to, (send, _) in messages.items())


def step(x: Tensor, make: Callable[[nn.Parameter], Any]) -> Any:
    """Make one step of the optimizer that ``make`` returns for a parameter; its gradient is ``x``."""
    parameter = nn.Parameter(torch.zeros_like(x))
    optimizer = make(parameter)
    (parameter * x).sum().backward()
    optimizer.step()
    return optimizer


def in_optimizer(x: Tensor, codec: str, group: Transport) -> None:
    step(x, lambda p: fl.DistributedOptimizer(SGD([p], lr=0.1), [("p", p)], codec=codec, group=group)).close()


def in_shards(x: Tensor, codec: str, group: Transport) -> None:
    step(x, lambda p: fl.ShardedOptimizer([p], SGD, weights=codec, gradients=codec, group=group, lr=0.1))


def part(x: Tensor, group: Transport) -> Tensor:
    return x.chunk(group.size)[group.rank].clone()


def reduced(x: Tensor, codec: str, group: Transport) -> None:
    calls.all_reduce([x], dist.ReduceOp.SUM, codecs.get(codec).bare, None, lambda _: 1)(group)


def scattered(x: Tensor, codec: str, group: Transport) -> None:
    calls.reduce_scatter(part(x, group), [x], dist.ReduceOp.SUM, codecs.get(codec).bare, None, lambda _: 1)(group)


def gathered(x: Tensor, codec: str, group: Transport) -> None:
    calls.all_gather([x], part(x, group), codecs.get(codec).bare, lambda _: 1)(group)


Case = tuple[Callable[..., object], int]
OVER_TRANSPORTS: dict[str, Case] = {
    "fl.all_reduce": (lambda x, codec, group: fl.all_reduce(x, codec, group=group), 2),
    "fl.reduce_scatter": (lambda x, codec, group: fl.reduce_scatter(x, codec, group=group), 1),
    "fl.all_gather": (lambda x, codec, group: fl.all_gather(part(x, group), codec, group=group), 1),
    "fl.DistributedOptimizer": (in_optimizer, 2),
    "fl.ShardedOptimizer": (in_shards, 2),
    "dist.all_reduce": (reduced, 2),
    "dist.reduce_scatter": (scattered, 1),
    "dist.all_gather": (gathered, 1),
}
"""Each API, and how many halves of an all-reduce it makes."""


@looped("codec, dtype", [("int8", torch.float32), ("int4", torch.bfloat16)])
def test_a_node_of_eight_sends_one_message(codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight nodes of eight ranks: 7/8 of a message before the sum, and as much after it."""
    with monkeypatch.context() as patch:
        sent = count(LocalTransport, patch.setattr)
        found = {}
        for name, (call, halves) in OVER_TRANSPORTS.items():
            sent.clear()
            over_threads(64, lambda group, call=call: call(torch.ones(N, dtype=dtype), codec, group), ranks_per_node=8)  # type: ignore[misc]
            found[name] = {node: sent[node] / (halves * 7 / 8 * N * BITS[codec] / 8) for node in range(8)}
    assert all(each == pytest.approx(1, rel=0.05) for every in found.values() for each in every.values()), found


@looped("name", ["one_shot", "two_shot", "two_level"])
def test_the_bytes_that_are_shown_are_those_that_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the node that sends most, where nodes have 3, 3 and 2 ranks."""
    with monkeypatch.context() as patch:
        sent = count(LocalTransport, patch.setattr)
        over_threads(8, lambda group: fl.all_reduce(torch.ones(N), "int8", name, group=group), ranks_per_node=3)
    shown = sent_by_node(name, (3, 3, 2))
    assert shown is not None and max(sent.values()) == pytest.approx(shown * N * BITS["int8"] / 8, rel=0.01)


def in_ddp(x: Tensor, codec: str, group: Transport) -> None:
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False, dtype=x.dtype))
    hook = fl.ddp.register(model, codec)
    model(torch.ones(1, WIDTH, dtype=x.dtype)).sum().backward()
    hook.close()


def in_fsdp(x: Tensor, codec: str, group: Transport) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=x.dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size,)))
    fl.fsdp.compress(model, weights=codec, gradients=codec)
    model(torch.ones(1, WIDTH, dtype=x.dtype)).sum().backward()


def in_horovod(x: Tensor, codec: str, group: Transport) -> None:
    hvd.init()
    hvd.allreduce(x, name="x", compression=getattr(hvd.Compression, codec))
    hvd.shutdown()


def in_groups(x: Tensor, codec: str, group: Transport) -> None:
    rules = [{"codec": codec, "op": ["all_reduce", "reduce_scatter", "all_gather"]}]
    made = dist.new_group(backend="fusionlayer", pg_options={"rules": rules})  # type: ignore[arg-type]
    dist.all_reduce(x, group=made)
    dist.reduce_scatter(part(x, group), [*x.chunk(group.size)], group=made)
    dist.all_gather([*x.chunk(group.size)], part(x, group), group=made)
    dist.destroy_process_group(made)


OVER_PROCESSES: dict[str, Case] = {
    **OVER_TRANSPORTS,
    "fl.ddp": (in_ddp, 2),
    "fl.fsdp": (in_fsdp, 2),
    "hvd.allreduce": (in_horovod, 2),
    "dist, in a group": (in_groups, 4),
}


def every_api(rank: int, world: int, folder: str) -> tuple[dict[tuple[str, str], tuple[int, float]], str]:
    """Return what this rank sends to the other node, with what its node should send, and what the log has."""
    path = Path(folder) / f"settings.{rank}.yaml"
    path.write_text("ranks_per_node: 2")
    os.environ["FUSIONLAYER_CONFIG"] = str(path)
    logging.getLogger("fusionlayer").setLevel(logging.INFO)
    logging.getLogger("fusionlayer").addHandler(logging.FileHandler(Path(folder) / f"log.{rank}"))
    sent = count(LinkedTransport, setattr)
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for name, (call, halves) in OVER_PROCESSES.items():
        for codec, dtype in (("int8", torch.bfloat16), ("int4", torch.float32)):
            fl.init()
            sent.clear()
            call(torch.ones(N, dtype=dtype), codec, fl.context.transport())
            found[name, codec] = sent.total(), halves / 2 * N * BITS[codec] / 8
            dist.barrier()
            fl.shutdown()
    return found, (Path(folder) / f"log.{rank}").read_text()


@pytest.mark.medium
def test_a_node_of_two_processes_sends_one_message(tmp_path: Path) -> None:
    """The log of rank 0 says so."""
    results = run_ranks(every_api, 4, str(tmp_path))
    ratios = {
        name: [sum(results[rank][0][name][0] for rank in node) / expected for node in ((0, 1), (2, 3))]
        for name, (_, expected) in results[0][0].items()
    }
    assert all(each == pytest.approx(1, rel=0.05) for every in ratios.values() for each in every), ratios
    log = [line.partition(": ") for line in results[0][1].splitlines()]
    sends = {"gradients of float32": "0.1393", "sums of calls": "0.1393", "reduce-scatters": "0.06963"}
    for what, sent in sends.items():
        words = [words for name, _, words in log if name == what and words.startswith(str(codecs.get("int4").bare))]
        assert len(words) == 1 + (what == "gradients of float32"), "the optimizer's and DDP's; others once"
        assert words[0].endswith(
            f"by two_level over 2 nodes of 2 ranks; for {N} elements a node sends {sent} MB to other nodes"
        )
    assert not results[1][1]
