"""Groups of the backend: how they are made, what they refuse, how they end."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer import backend
from fusionlayer.backend import calls
from fusionlayer.backend.call_queue import CallQueue
from fusionlayer.backend.group import CompressingGroup
from fusionlayer.base.errors import ConfigError, FusionLayerError, PlanMismatch, TransportError, UsageError
from fusionlayer.transport import Transport
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.ranks import on_processes, on_threads
from tests.synthetic import gradient

pytestmark = pytest.mark.medium

INT8 = {"min_bytes": 0, "rules": [{"codec": "int8"}]}
FEW = timedelta(seconds=120)
CPU = torch.device("cpu")


def numbers(rank: int, numel: int = 2000) -> Tensor:
    return gradient(numel, rank)


def total(world: int, numel: int = 2000) -> Tensor:
    return torch.stack([numbers(r, numel) for r in range(world)]).sum(0)


def near(x: Tensor, y: Tensor) -> bool:
    return not torch.equal(x, y) and float((x - y).norm() / y.norm()) < 0.02


def inherit(rank: int, world: int, folder: str) -> None:
    def codec_of(group: Any) -> str:
        x = numbers(rank)
        dist.all_reduce(x, group=group)
        return "compressed" if near(x, total(world)) else "passes" if torch.equal(x, total(world)) else "wrong"

    assert dist.get_backend() == "fusionlayer" and isinstance(dist.group.WORLD, CompressingGroup)
    assert dist.group.WORLD.name() == "fusionlayer" and "cpu" in {d.type for d in dist.group.WORLD._device_types}
    assert codec_of(None) == "passes"
    assert codec_of(dist.new_group(pg_options=INT8)) == "compressed"
    assert codec_of(dist.new_group(None, FEW, "fusionlayer", backend.Policy.of(INT8))) == "compressed"
    path = Path(folder) / f"policy.{rank}.yaml"
    path.write_text("min_bytes: 0\nrules: [{codec: int8, group: mine*}]\n")
    assert codec_of(dist.new_group(pg_options=path)) == "passes"
    assert codec_of(dist.new_group(pg_options=path, group_desc="mine, too")) == "compressed"
    assert backend.use(INT8) is None
    assert codec_of(None) == "passes", "groups that exist keep their policy"
    assert codec_of(dist.new_group()) == "compressed"
    assert codec_of(dist.new_group(pg_options={})) == "passes"
    assert codec_of(dist.new_group(backend="gloo")) == "passes"
    before = backend.use(None)
    assert before is not None and before.rules[0].codec == "int8"
    assert codec_of(dist.new_group()) == "passes"
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    assert mesh["dp"].get_group().group_desc == "mesh_dp" and mesh["tp"].get_group() is dist.group.WORLD
    assert isinstance(mesh["dp"].get_group(), CompressingGroup)

    part = dist.new_group(pg_options=INT8).split_group(list(range(world))[::-1], group_name="turned", group_desc="part")
    assert isinstance(part, CompressingGroup) and part.rank() == world - 1 - rank and part.size() == world
    assert (part.group_name, part.group_desc) == ("turned", "part")
    x = numbers(rank)
    part.allreduce([x]).wait()
    assert near(x, total(world))
    assert (part.split_group([0], group_name="alone") is None) == (part.rank() != 0)
    part.shutdown()

    qualified = dist.new_group(backend="cpu:fusionlayer,cuda:nccl", pg_options=INT8)
    assert codec_of(qualified) == "compressed"
    assert codec_of(dist.new_group(backend="cpu:gloo,cuda:fusionlayer", pg_options=INT8)) == "passes"
    with pytest.raises(ConfigError, match="next to fusionlayer, cpu tensors can only be sent by gloo: name 'gloo' or"):
        codec_of(dist.new_group(backend="cuda:fusionlayer,cpu:mpi", pg_options=INT8))

    with pytest.raises(ConfigError, match=r"policy: rules\[0\]: unknown op 'allreduce'"):
        dist.new_group(pg_options={"rules": [{"codec": "int8", "op": "allreduce"}]})
    with pytest.raises(ConfigError, match="policy: got an int; expected"):
        dist.new_group(pg_options=3)
    with pytest.raises(PlanMismatch, match=r"\[1\] differ from rank 0. Rank 0 has\n(.|\n)*bits=8") as caught:
        dist.new_group(pg_options={"rules": [{"codec": "int8" if rank == 0 else "int4"}]})
    assert caught.value.ranks == (1,) and (rank == 0 or "bits=4" in str(caught.value))
    with pytest.raises(UsageError, match="counted in groups of the backend 'fusionlayer'"):
        backend.traffic(dist.new_group(backend="gloo"))


def test_where_a_policy_comes_from_and_errors(tmp_path: Path) -> None:
    run_ranks(inherit, 2, str(tmp_path), backend="fusionlayer")


def configured(rank: int, world: int, folder: str) -> None:
    path = Path(folder) / f"settings.{rank}.yaml"
    os.environ["FUSIONLAYER_CONFIG"] = str(path)
    path.write_text("checksum: true\nbackend: {min_bytes: 0, rules: [{codec: int8}]}\n")
    store = dist.FileStore(f"{folder}/store", world)
    lone = CompressingGroup(
        dist.PrefixStore("lone", store), rank, range(world), FEW, backend.Policy.of({**INT8, "min_bytes": 4})
    )
    alone = [lone, lone.split_group(range(world))]
    with suppress(ImportError):  # gone since torch 2.14
        from torch.distributed import _dist2

        make: Any = _dist2._BACKENDS["fusionlayer"]
        alone.append(make(dist.PrefixStore("second", store), rank, world, FEW, CPU, **INT8))
    options = dist.ProcessGroupGloo._Options()
    options._threads = 3
    dist.init_process_group(
        "cpu:fusionlayer", store=store, rank=rank, world_size=world, timeout=FEW, pg_options=options
    )
    assert dist.group.WORLD.options._threads == 3 and dist.group.WORLD.options._timeout == FEW
    for each in alone:  # torch does not know of these groups
        x = numbers(rank)
        each.allreduce([x]).wait()
        assert near(x, total(world))
        each.shutdown()
    x = numbers(rank)
    dist.all_reduce(x)
    assert near(x, total(world))
    group = dist.new_group()
    x = numbers(rank)
    dist.all_reduce(x, group=group)
    assert near(x, total(world)) and backend.traffic(group).calls == {"all_reduce": 1}
    os.environ["FUSIONLAYER_TIMEOUT"] = "0.5"
    impatient = dist.new_group(None, FEW)
    if rank == 0:
        with pytest.raises(TransportError, match="all_reduce of .*other ranks have not made this call within 0.5 s"):
            dist.all_reduce(numbers(rank).double(), group=impatient)
        with pytest.raises(TransportError, match=r"ranks \[1\] did not come within 0.5 s"):
            dist.all_reduce(numbers(rank), group=impatient)
    dist.barrier()
    dist.destroy_process_group()
    path.write_text("backend: {rules: [{codec: int8, opp: send}]}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'opp'; did you mean 'op'"):
        dist.init_process_group("fusionlayer", store=store, rank=rank, world_size=world, timeout=FEW)
    path.write_text("backend: int8\n")
    with pytest.raises(ConfigError, match="backend='int8'; expected keys and values or null"):
        dist.init_process_group("fusionlayer", store=store, rank=rank, world_size=world, timeout=FEW)


def test_the_policy_of_the_settings(tmp_path: Path) -> None:
    run_ranks(configured, 2, str(tmp_path), backend=None)


def works(rank: int, world: int) -> None:
    group = dist.new_group(pg_options={"min_bytes": 0, "rules": [{"codec": "int8", "op": list(backend.OPS)}]})
    expected = total(world)

    x = numbers(rank)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work.wait(timedelta(seconds=180)) and work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is x and work.get_future().wait()[0] is x and near(x, expected)
    work.synchronize()

    # What is chained to futures may call the group again, and wait for that.
    x, y = numbers(rank), numbers(rank)

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        dist.all_reduce(y, group=group)
        return future.value()[0] + y

    chained = dist.all_reduce(x, group=group, async_op=True).get_future().then(again)
    assert near(chained.wait(), 2 * expected) and not chained.value().is_inference()

    with torch.inference_mode():
        x = numbers(rank)
        dist.all_reduce(x, dist.ReduceOp.AVG, group)
    assert near(x, expected / world)

    x = numbers(rank).view(40, 50).t()
    dist.all_reduce(x, group=group)
    assert near(x, expected.view(40, 50).t())

    half = numbers(rank).half() * 1e4 / numbers(rank).abs().max() * 6
    biggest = half.clone()
    dist.all_reduce(biggest, dist.ReduceOp.AVG, group)
    assert biggest.isfinite().all(), "the sum of what can be averaged need not be in range"

    with pytest.raises(ConfigError, match="all_reduce with op=AVG got a torch.int64 tensor; expected floats: sum"):
        dist.all_reduce(torch.arange(4), dist.ReduceOp.AVG, group)

    with pytest.raises(ConfigError, match="broadcast got a torch.int16 tensor, which gloo cannot send"):
        dist.broadcast(torch.ones(3, dtype=torch.int16), 0, group=group)
    with pytest.raises(ConfigError, match=r"all_gather of \(3,\), \(3,\): .*expected length 2, got 1.*; correct the"):
        dist.all_gather([torch.ones(3)], torch.ones(3), group=group)

    # The names before torch 2.13, by which older versions call.
    base: Any = group
    out, part = torch.empty(world * 2000), torch.empty(2000 // world)
    base._allgather_base(out, numbers(rank)).wait()
    base._reduce_scatter_base(part, numbers(rank)).wait()
    assert near(out, torch.cat([numbers(r) for r in range(world)])) and near(part, expected.view(world, -1)[rank])
    base.alltoall_base(out := torch.empty(2000), numbers(rank), [], []).wait()
    assert near(out, torch.cat([numbers(r).view(world, -1)[rank] for r in range(world)]))
    outs, parts = [torch.empty(world * 2000) for _ in range(2)], [torch.empty(2000 // world) for _ in range(2)]
    base.allgather_into_tensor_coalesced(outs, [numbers(rank)] * 2).wait()
    base.reduce_scatter_tensor_coalesced(parts, [numbers(rank)] * 2, dist.ReduceScatterOptions()).wait()
    assert near(outs[1], torch.cat([numbers(r) for r in range(world)])) and near(
        parts[1], expected.view(world, -1)[rank]
    )
    x = numbers(rank)
    base.allreduce(x, dist.ReduceOp.SUM).wait()
    assert near(x, expected)

    # Calls that pass and calls that do not, of one group, in one order on all ranks.
    works, results = [], []
    for number in range(20):
        x = numbers(rank) if number % 3 else numbers(rank).double()
        works.append(dist.all_reduce(x, group=group, async_op=True))
        results.append(x)
    dist.barrier(group)
    for work, x in zip(works, results, strict=True):
        work.wait()
        assert near(x, expected) if x.dtype is torch.float32 else torch.equal(x.float(), expected)
    counts = backend.traffic(group).calls
    assert counts == {"all_reduce": 6 + 1 + 13, "all_gather": 3, "reduce_scatter": 3, "all_to_all": 1}, counts

    dist.destroy_process_group(group)
    with pytest.raises(FusionLayerError, match="was destroyed: it can send nothing any more"):
        group.allreduce([numbers(rank)])


def test_works_and_futures() -> None:
    run_ranks(works, 2, backend="fusionlayer")


def work_of(x: Tensor, group: Any) -> Any:
    return dist.all_reduce(x, group=group, async_op=True)


def lose_a_rank(rank: int, world: int) -> None:
    group = dist.new_group(None, timedelta(seconds=8), pg_options=INT8, group_desc="doomed")
    x = numbers(rank)
    dist.all_reduce(x, group=group)
    data = dist.new_group(None, timedelta(seconds=8), pg_options=INT8)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 20), process_group=data)
    for _ in range(2):
        loss = model(torch.ones(2, 20)).sum()
        loss.backward()
    loss = model(torch.ones(2, 20)).sum()
    if rank == 1:
        checkpoint("dies")
    with pytest.raises(TransportError, match="rank 1") as caught:
        loss.backward()  # DDP makes a plain RuntimeError of an error in a future
    assert caught.value.ranks == (1,)
    work = dist.all_reduce(x, group=group, async_op=True)
    with pytest.raises(
        TransportError, match=r"all_reduce SUM of \(2000,\) float32, process group 'doomed': .*rank 1"
    ) as caught:
        work.wait()
    assert caught.value.ranks == (1,)
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), TransportError)
    with pytest.raises(RuntimeError, match="process group 'doomed'"):
        work.get_future().wait()
    with pytest.raises(TransportError, match="rank 1"):
        dist.all_reduce(x, group=group)
    y = torch.ones(3).double()
    for call in (
        lambda: dist.all_reduce(y, group=group),
        lambda: dist.recv(y, 1, group=group),
        lambda: dist.barrier(group=group),
        lambda: work_of(y, group).wait(),
    ):
        with pytest.raises(TransportError, match="another rank has closed its connection, as a rank does") as caught:
            call()
        assert caught.value.__cause__ is None
    dist.destroy_process_group(group)
    os._exit(0)


def test_a_lost_rank_is_named() -> None:
    first, second = outcomes_of(lose_a_rank, 2, signals={(1, "dies"): signal.SIGKILL}, backend="fusionlayer")
    assert (first.kind, first.exit_code) == ("died", 0), first.trace
    assert second.kind == "died"


CALLS: dict[str, Callable[..., dist.Work]] = {
    "all_reduce SUM of (4096,) float32": lambda group: all_reduce(group, torch.ones(4096)),
    "all_reduce AVG of (4096,) float32": lambda group: all_reduce(group, torch.ones(4096), dist.ReduceOp.AVG),
    "all_reduce SUM of (64, 64) float32": lambda group: all_reduce(group, torch.ones(64, 64)),
    "all_reduce SUM of (4096,) bfloat16": lambda group: all_reduce(group, torch.ones(4096).bfloat16()),
    "all_reduce SUM of (4096,) float16": lambda group: all_reduce(group, torch.ones(4096).half()),
    "all_reduce SUM of (4094,) (2,) float32": lambda group: group.allreduce_coalesced(
        [torch.ones(4094), torch.ones(2)]
    ),
    "all_gather of (4096,) float32": lambda group: group.all_gather_single(torch.ones(12288), torch.ones(4096)),
    "all_to_all of float32": lambda group: group.all_to_all_single(torch.ones(12288), torch.ones(12288), [], []),
}
SAME, *OTHERS = CALLS


def all_reduce(group: dist.ProcessGroup, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    return dist.all_reduce(x, op, group, async_op=True)


def differ(rank: int, world: int) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return, for each call that rank 1 makes in place of the others' one, the error that follows."""
    rules = {"min_bytes": 0, "rules": [{"codec": "int8", "op": list(backend.OPS)}]}
    x = torch.ones(()) if rank == 1 else torch.ones(1)
    dist.all_reduce(x, group=dist.new_group(None, timedelta(seconds=8), pg_options=rules))
    assert abs(x.item() - world) < 0.1, "DeepSpeed's pipelines do this, and it is meant"
    groups = {other: dist.new_group(None, timedelta(seconds=8), pg_options=rules) for other in OTHERS}
    works = {other: CALLS[other if rank == 1 else SAME](group) for other, group in groups.items()}
    errors = {}
    for other, work in works.items():
        with pytest.raises(TransportError) as caught:
            work.wait()
        errors[other] = type(caught.value).__name__, caught.value.ranks, str(caught.value)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    checked = dist.new_group(None, FEW)
    x = torch.ones(5).double()
    dist.all_reduce(x, group=checked)
    assert x.tolist() == [world] * 5
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
        dist.all_reduce(x if rank != 1 else x[:4], group=checked)
    return errors


def test_calls_that_differ_over_ranks_are_named_though_their_messages_have_equal_sizes() -> None:
    """Without it, a sum here and an average there would end without an error, and with different values."""
    for rank, errors in enumerate(run_ranks(differ, 3, backend="fusionlayer")):
        assert list(errors) == OTHERS
        for other, (_, ranks, told) in errors.items():
            assert ranks == (1,) and other in told and SAME in told, (rank, other, told)


@on_threads(2)
def test_where_asked_to_ranks_compare_calls_before_they_make_them(transport: Transport) -> None:
    """Messages of NCCL have no keys; here no call sends any."""
    queue = CallQueue("g", lambda: transport, compare=True)
    queue.submit("a sum", lambda transport: None, [torch.zeros(1)]).wait()
    try:
        with pytest.raises(TransportError, match="rank 1 (is )?in a mean"):
            what = "a mean" if transport.rank == 1 else "a sum"
            queue.submit(what, lambda transport: None, [torch.zeros(1)]).wait()
    finally:
        queue.close(wait=False)


@on_processes(2, backend="fusionlayer")
def test_what_one_rank_raises_the_others_learn(rank: int, world: int) -> None:
    group = dist.new_group(None, timedelta(seconds=60), pg_options=INT8)
    dist.all_reduce(numbers(rank), group=group)

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    if rank == 1:
        calls._spread = broken  # what follows the collective
        work = dist.all_reduce(numbers(rank), group=group, async_op=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                work.wait()
        dist.barrier(group)
        with pytest.raises(ValueError, match="broken"):
            dist.all_reduce(numbers(rank), group=group)
    else:
        dist.all_reduce(numbers(rank), group=group)
        dist.barrier(group)
        with pytest.raises(TransportError, match="rank 1 closed its transport"):
            dist.all_reduce(numbers(rank), group=group)
    dist.destroy_process_group(group)
