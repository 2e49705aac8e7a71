"""Several GPUs in a box: each rank sends from the GPU of its tensors, whenever its script has chosen it."""

import os
import pickle
import random
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import reductions
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import context
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.transport.devices import check_devices, refuse_rocm, refuse_torchcomms
from fusionlayer.transport.links.device_memory import DeviceMemory, pack, unpack
from fusionlayer.transport.links.queueing import QueueingLink
from tests.harness import outcomes_of, run_ranks
from tests.streams import OnGpu, Stream, planted
from tests.tiers import tiered
from tests.transport.fake_nccl import FakeNccl, gpus

WORLD = 4


def functional(device: torch.device) -> list[float]:
    x = torch.full((3000,), fl.rank() + 1.0, device=device)
    fl.all_reduce(x, codec="int8")
    y = torch.full((4,), fl.rank() + 1.0, device=device)
    found = [fl.all_gather(y)[-1:], fl.reduce_scatter(y), fl.all_to_all(y)[-1:]]
    fl.all_reduce(y)
    fl.broadcast_parameters({"z": (z := torch.full((5,), fl.rank() + 1.0, device=device))}, root_rank=1)
    return [each.tolist()[0] for each in (x, y, z, *found)]


def horovod(device: torch.device) -> list[float]:
    x = torch.full((5,), fl.rank() + 1.0, device=device)
    even = hvd.add_process_set([0, 2])
    found = [hvd.allreduce(x, op=hvd.Sum, name="x").tolist()[0]]
    if fl.rank() in (0, 2):
        found.append(hvd.allreduce(x, op=hvd.Sum, process_set=even, name="even").tolist()[0])
    return found


def joined(device: torch.device) -> list[float]:
    """Rank 3 has no data for the second sum, nor a tensor on a GPU before it."""
    found = []
    if fl.rank() != 3:
        x = torch.full((5,), 3.0, device=device)
        found = hvd.allreduce(x, op=hvd.Sum, name="x").tolist()[:1]
    hvd.join()
    return found


def optimizer(device: torch.device) -> list[float]:
    """Take two steps with a layer on the GPU; return its bias."""
    layer = torch.nn.Linear(4, 1, device=device)
    torch.nn.init.zeros_(layer.bias)
    plain = torch.optim.SGD(layer.parameters(), lr=1.0)
    wrapped = fl.DistributedOptimizer(plain, layer, codec="raw")
    for _ in range(2):
        wrapped.zero_grad()
        (layer(torch.ones(2, 4, device=device)).sum() * fl.rank()).backward()
        wrapped.step()
    wrapped.close()
    return layer.bias.tolist()


def hook(device: torch.device) -> list[float]:
    layer = torch.nn.Linear(4, 1, device=device)
    torch.nn.init.zeros_(layer.bias)
    model = DistributedDataParallel(layer)
    fl.ddp.register(model, codec="raw")
    return trained(model, layer, device)


def fsdp(device: torch.device) -> list[float]:
    layer = torch.nn.Linear(4, WORLD, device=device)
    torch.nn.init.zeros_(layer.bias)
    model: Any = fully_shard(layer, mesh=init_device_mesh("cuda", (WORLD,)))
    fl.fsdp.compress(model, "raw", "raw")
    return trained(model, layer, device)


def trained(model: torch.nn.Module, layer: torch.nn.Linear, device: torch.device) -> list[float]:
    """Take two steps; return this rank's bias."""
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        plain.zero_grad()
        (model(torch.ones(2, 4, device=device)).sum() * fl.rank()).backward()
        plain.step()
    bias: Any = layer.bias
    return getattr(bias, "to_local", lambda: bias)().tolist()  # type: ignore[no-any-return]


def job(rank: int, world: int, when: str, calls: Callable[[torch.device], list[float]]) -> Any:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    if when == "debug":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    with gpus([rank] if when == "one visible" else range(world)):
        if when == "before":
            torch.cuda.set_device(rank)
        hvd.init()
        if when in ("after", "debug"):
            torch.cuda.set_device(hvd.local_rank())
        found = calls(torch.device("cuda", 0 if when == "one visible" else rank))
        hvd.shutdown()
        return found, FakeNccl.launched


CALLS = [
    (functional, [[2.5, 2.5, 2.0, 4.0, 2.5, 4.0]] * 4),
    (horovod, [[10.0, 4.0], [10.0]] * 2),
    (joined, [[9.0]] * 3 + [[]]),
    (optimizer, [[-6.0]] * 4),
    (hook, [[-6.0]] * 4),
    (fsdp, [[-6.0]] * 4),
]
WHEN = ["before", "after", "never", "one visible", "debug"]
# Every API and every time once, Horovod's usual order among them.
FAST = {
    *((functional, "debug"), (functional, "before"), (horovod, "after"), (horovod, "never")),
    *((joined, "never"), (optimizer, "one visible"), (hook, "never"), (fsdp, "after")),
}


@pytest.mark.parametrize(
    "calls, expected, when",
    tiered(
        # Without set_device, FSDP2 itself would move parameters to the first GPU.
        [(calls, expected, when) for calls, expected in CALLS for when in WHEN if (calls, when) != (fsdp, "never")],
        lambda calls, expected, when: (calls, when) in FAST,
    ),
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_each_rank_sends_from_the_gpu_of_its_tensors(calls: Any, expected: list[list[float]], when: str) -> None:
    every = run_ranks(job, WORLD, when, calls)
    for (found, _), sums in zip(every, expected, strict=True):
        assert found == pytest.approx(sums, rel=0.01)
    check_order([launched for _, launched in every], 1, 3)


def check_order(launched: list[list[tuple[str, str]]], *same: int) -> None:
    """The ranks launch in one order what all of them launch, which is all that the ranks ``same`` launch."""
    first = launched[same[0]]
    in_all = {name for name, _ in first}
    assert first and all(launched[rank] == first for rank in same)
    for each in launched:
        assert [call for call in each if call[0] in in_all] == first, "one order on every rank"


def drained(device: torch.device) -> list[str]:
    """Return the races of a host that reads a message after ``drain``."""
    transport = context.transport()
    x = torch.ones(4, dtype=torch.uint8, device=device)
    out = torch.zeros(WORLD, 4, dtype=torch.uint8, device=device)
    transport.all_gather(x, out)
    transport.drain()
    assert isinstance(out, OnGpu)
    Stream.gpu.host(out.elements, writes=False)
    return Stream.gpu.settle()


def drained_by_a_wrong_event(device: torch.device) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        planted(
            patch, QueueingLink, "_operation", "torch.cuda.current_stream(self.device)", "torch.cuda.current_stream()"
        )
        return drained(device)


def test_the_fake_finds_an_event_of_another_gpu() -> None:
    """The ranks' current GPU is the first."""
    assert [races for races, _ in run_ranks(job, WORLD, "never", drained)] == [[]] * WORLD
    for rank, (races, _) in enumerate(run_ranks(job, WORLD, "never", drained_by_a_wrong_event)):
        assert any("read by the host" in race for race in races) == (rank > 0), races


def bad_job(rank: int, world: int, problem: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    device = torch.device("cuda", rank % 2 if problem == "shared" else rank)
    with gpus(range(world)) if (problem, rank) != ("no GPU", 1) else nullcontext() as gpu:
        if problem == "slices" and rank == 1:
            slices = SimpleNamespace(uuid="MIG-1", pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
            torch.cuda.get_device_properties = lambda device: slices  # type: ignore[assignment, return-value]
        if problem == "old" and rank == 1:  # which is seen at init where CUDA is in use by then, else here
            torch.cuda.is_initialized = lambda: False  # type: ignore[assignment]
            torch.cuda.get_device_capability = lambda device: (7, 5)  # type: ignore[assignment]
            torch.cuda.get_device_name = lambda device: "Tesla T4"  # type: ignore[assignment]
        fl.init(timeout=60)
        fl.all_reduce(torch.ones(5, device=device if gpu else None))
        if problem == "another":
            fl.all_reduce(torch.ones(5, device=torch.device("cuda", 1 - rank)))


@pytest.mark.parametrize(
    "problem, error",
    [
        ("shared", r"PlanMismatch.*ranks 0 and 2 use one GPU \(cuda:0 and cuda:0, GPU-0\).*set_device\("),
        ("slices", r"PlanMismatch.*ranks 0 and 1 have slices of one GPU \(MIG: GPU-0 and MIG-1\).*transport: sockets"),
        ("no GPU", r"PlanMismatch.*setting sees_cuda differs over ranks.*CUDA_VISIBLE_DEVICES"),
        ("old", r"ConfigError.*rank 1: Tesla T4 has compute capability 7.5; expected at least 8.0"),
        ("another", r"UsageError.*got a tensor on cuda:\d, and this rank's connections are those of cuda:\d"),
    ],
    ids=["shared", "slices", "no GPU", "old", "another"],
)
def test_gpus_that_cannot_be_connected_are_named_on_every_rank(problem: str, error: str) -> None:
    for outcome in outcomes_of(bad_job, 3 if problem == "shared" else 2, problem):
        assert re.search(error, ": ".join(outcome.error)), outcome


def test_ranks_that_share_a_gpu_on_purpose_say_so() -> None:
    """NCCL_HOSTID lets NCCL take them for ranks of two hosts."""
    assert run_ranks(sharing_job, 2) == [1.5, 1.5]


def sharing_job(rank: int, world: int) -> float:
    os.environ["NCCL_HOSTID"] = str(rank)
    with gpus([0]):
        fl.init()
        x = torch.full((5,), rank + 1.0, device="cuda")
        fl.all_reduce(x)
        found: float = x.tolist()[0]
        fl.shutdown()
        return found


def test_gpus_are_told_apart_where_torch_knows_no_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index // 2}")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def check(first: int, second: int) -> list[str]:
        store, found = dist.HashStore(), ["", ""]

        def run(rank: int, index: int) -> None:
            try:
                check_devices(store, rank, 2, torch.device("cuda", index))
            except PlanMismatch as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=run, args=place) for place in ((0, first), (1, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert check(0, 2) == ["", ""]
    assert all("ranks 0 and 1 use one GPU (cuda:0 and cuda:1, GPU-0)" in text for text in check(0, 1))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="built for AMD's ROCm.*HIP_VISIBLE_DEVICES"):
        refuse_rocm()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse_rocm()


def test_torchcomms_is_refused() -> None:
    refuse_torchcomms()
    with dist.config.patch(use_torchcomms=True):
        for begin in (
            fl.init,
            lambda: dist.init_process_group("fusionlayer", store=dist.HashStore(), rank=0, world_size=1),
        ):
            with pytest.raises(ConfigError, match="no backend of TorchComms: unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"):
                begin()


STORAGE = torch.storage.TypedStorage
FACTS = (Tensor, (5,), (1,), 0, STORAGE, torch.uint8, 1, b"h" * 66, 512, 1024, False, b"/torch_1_2", 3, b"e" * 64, True)


def test_an_offer_has_all_that_torch_needs() -> None:
    assert unpack(pack(5, FACTS)) == FACTS
    with (
        mock.patch.object(reductions, "reduce_tensor", lambda x: (reductions.rebuild_cuda_tensor, FACTS)),
        mock.patch.object(reductions, "rebuild_cuda_tensor", autospec=True) as rebuild,
    ):
        rebuild.__name__ = "rebuild_cuda_tensor"
        DeviceMemory.reach(DeviceMemory.share(torch.zeros(5, dtype=torch.uint8)))
    assert rebuild.call_args.args == FACTS
    with pytest.raises(RuntimeError, match="memory of cpu cannot be shared"):
        DeviceMemory.share(torch.zeros(5, dtype=torch.uint8))


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


def test_what_is_no_offer_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    whole = pack(5, FACTS)
    chance = random.Random(1)
    wrong = [pickle.dumps(Attack(tmp_path / "was run")), b"", whole[:-1], whole + b"x"]
    wrong += [pack(numel, FACTS) for numel in (0, -1, 513)]
    wrong += [pack(5, FACTS[:6] + (-1,) + FACTS[7:]), pack(5, FACTS[:7] + (b"",) + FACTS[8:])]
    wrong += [chance.randbytes(chance.randrange(200)) for _ in range(2000)]
    for offer in wrong:
        with pytest.raises(OSError, match="are no offer of memory"):
            DeviceMemory.reach(offer)
    assert not (tmp_path / "was run").exists()
