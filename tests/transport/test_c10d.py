"""The transport over real processes and gloo; what happens when one of them fails is in test_faults."""

import contextlib
import datetime
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.base.errors import ConfigError, TransportError, UsageError
from fusionlayer.health.monitor import STORE_PATIENCE
from fusionlayer.health.state import RankState
from fusionlayer.health.store import StatusKeys
from fusionlayer.launch import stores
from fusionlayer.transport import C10dTransport, Transport, linked
from tests.harness import run_ranks
from tests.ranks import on_processes
from tests.tiers import tiered

from . import conformance, relays
from .test_faults import once_it_waits

pytestmark = pytest.mark.medium

TIMEOUT = 150.0


def conform(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=TIMEOUT)
    assert (transport.rank, transport.size, transport.timeout) == (rank, world, TIMEOUT)
    conformance.conform(transport)
    transport.close()


@pytest.mark.parametrize(
    "world, store", tiered([(1, "file"), (2, "file"), (3, "tcp"), (4, "file")], lambda world, store: world < 4)
)
def test_conformance(world: int, store: str) -> None:
    run_ranks(conform, world, store=store)


@on_processes(3)
def test_conformance_with_tensors_out_of_the_links_reach(rank: int, world: int) -> None:
    """As if all tensors were where the link cannot reach them: it gets copies, and room that holds anything."""

    def copies(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [x.clone() for x in xs]

    def room(xs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [torch.empty_like(x).view(-1).view(torch.uint8).fill_(0xA5).view(x.dtype).view(x.shape) for x in xs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked, "bring", copies)
        patch.setattr(linked, "space", room)
        conform(rank, world)


KEEPER = """
import datetime, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=180), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def meet_by_a_slow_store(rank: int, world: int, port: int, store_rank: int) -> float:
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=180), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    first = C10dTransport(timeout=TIMEOUT)
    read_states = StatusKeys.read_all

    def read_slowly(keys: StatusKeys, ranks: Sequence[int]) -> dict[int, RankState]:
        os.kill(store_rank, signal.SIGSTOP)
        threading.Timer(1.5 * STORE_PATIENCE, os.kill, (store_rank, signal.SIGCONT)).start()
        return read_states(keys, ranks)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(StatusKeys, "read_all", read_slowly)
        second = first.duplicate()
    x = torch.ones(5)
    second.all_reduce(x)
    first.close()
    second.close()
    return x.sum().item()


def test_ranks_meet_though_their_store_is_slow() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as store_rank:
        assert store_rank.stdout is not None
        try:
            port = int(store_rank.stdout.readline())
            assert run_ranks(meet_by_a_slow_store, 2, port, store_rank.pid, backend=None) == [10.0, 10.0]
        finally:
            store_rank.kill()


ENDS = """
import datetime, sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=180), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
from fusionlayer.transport import C10dTransport
transport = C10dTransport(timeout=30)
transport.barrier()
transport._watch.keys.keys.update(f"more/{number}" for number in range(800))
print(flush=True)
sys.stdin.readline()
"""


def test_a_process_ends_well_though_its_store_is_far_away() -> None:
    """At its end the last rank deletes keys."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=180), wait_for_workers=False)
    relay = relays.Relay(("127.0.0.1", store.port))
    is_far = threading.Event()

    def delay(place: int, from_caller: bool, passed: int, data: bytes) -> bytes:
        if is_far.is_set() and not from_caller:
            time.sleep(0.01)
        return data

    relay.alter = delay
    command = [sys.executable, "-c", ENDS]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(relay.address[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "\n"
        is_far.set()
        ends = [rank.communicate("\n") for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ends
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        relay.close()


def use_groups(rank: int, world: int) -> list[float]:
    odd = dist.new_group([1, 3])
    sums = []
    if rank % 2:
        transport = C10dTransport(odd, TIMEOUT)
        assert (transport.rank, transport.size) == (rank // 2, 2)
        x = torch.tensor([float(rank)])
        transport.all_reduce(x)
        sums.append(x.item())
        transport.close()
    else:
        with pytest.raises(UsageError, match="not in the group"):
            C10dTransport(odd, TIMEOUT)
    first, second = C10dTransport(None, TIMEOUT), C10dTransport(dist.group.WORLD, TIMEOUT)
    first.close()
    x = torch.tensor([float(rank)])
    second.all_reduce(x)
    dist.all_reduce(x)  # the group itself is as usable as before
    return [*sums, x.item()]


def test_groups_and_several_transports_of_one_group() -> None:
    assert run_ranks(use_groups, 4) == [[24.0], [4.0, 24.0], [24.0], [4.0, 24.0]]


def test_without_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        C10dTransport()


@on_processes(3)
def test_the_sum_is_gloos_within_rounding(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=TIMEOUT)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(50_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        ours, theirs = x.clone(), x.clone()
        transport.all_reduce(ours)
        dist.all_reduce(theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)  # gloo rounds at every step


@pytest.mark.parametrize("world", [2, 3])
@on_processes()
def test_large_sums_through_memory_and_without(rank: int, world: int) -> None:
    """Sums of 1 MiB and more, by ranks that see each other's memory and by ranks that do not."""

    def refuse(name: str) -> int:
        raise OSError("no file descriptors left")

    together = C10dTransport(timeout=TIMEOUT)
    apart = C10dTransport(timeout=TIMEOUT, node=str(rank))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "memfd_create", refuse)
        one_without = C10dTransport(timeout=TIMEOUT)
        one_without.all_reduce(torch.ones(1 << 18))
    # Pieces of 2 MiB and no more, one element more, a part of one, many; and one after the other in the same memory.
    lengths = [1 << 20, (1 << 19) + 1, 2_000_003, (9 << 20) + 5, 1 << 19, 1 << 19, 1 << 19]
    for transport, sees in ((together, True), (apart, False), (one_without, False)):
        dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        for dtype in dtypes if sees else dtypes[:2]:
            for n in lengths if sees and dtype is torch.float32 else lengths[:1]:
                each = [torch.arange(n).add(r).remainder(1000).div(7).to(dtype) for r in range(world)]
                wide = torch.float32 if dtype is torch.bfloat16 else dtype
                expected = sum((x.to(wide) for x in each[1:]), each[0].to(wide)).to(dtype)
                transport.all_reduce(each[rank])
                if sees or world == 2:
                    assert torch.equal(each[rank], expected), (dtype, n)
                else:  # gloo adds each share in another order
                    torch.testing.assert_close(each[rank], expected)
        assert (transport._links["cpu"]._memory is not None) == sees  # type: ignore[attr-defined]
        assert not any("memfd" in os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
        transport.close()


@on_processes(2)
def test_a_transport_that_nobody_holds_is_closed(rank: int, world: int) -> None:
    transport: Transport | None = C10dTransport(timeout=60)
    assert transport is not None
    transport.barrier()
    if rank == 0:
        del transport
        gc.collect()
        return
    with pytest.raises(TransportError, match="rank 0 closed its transport after collective 1") as caught:
        transport.barrier()
    assert caught.value.ranks == (0,)


@on_processes(3)
def test_a_transport_can_be_dropped_as_soon_as_it_is_made(rank: int, world: int) -> None:
    store, get = dist.distributed_c10d._get_default_store(), stores.EndingStore.get

    def late(self: stores.EndingStore, key: str) -> bytes:
        if key == "gloo/0/2":  # rank 0 has all its connections by now, and ranks 1 and 2 have none to each other
            with contextlib.suppress(RuntimeError):
                store.wait(["dropped"], datetime.timedelta(seconds=1))
        return get(self, key)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(stores.EndingStore, "get", late)
        assert C10dTransport(timeout=20).size == world
        gc.collect()
    store.set("dropped", "")


def file_size(rank: int, world: int) -> tuple[int, int]:
    transport = C10dTransport(timeout=2.0)
    transport.barrier()
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    time.sleep(0.5)
    before = os.path.getsize(store.path)
    for _ in range(20):
        transport.barrier()
        time.sleep(0.05)
    return before, os.path.getsize(store.path)


def test_a_file_store_does_not_grow_while_all_is_well() -> None:
    for before, after in run_ranks(file_size, 2):
        assert before == after


def warn(rank: int, world: int) -> list[str]:
    records: list[logging.LogRecord] = []
    store = dist.distributed_c10d._get_default_store()

    def note(record: logging.LogRecord) -> None:
        records.append(record)
        store.set(f"rank {rank} is warned", "")

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger("fusionlayer").addHandler(handler)
    transport = C10dTransport(timeout=30, stall_warning=1.0)
    transport.barrier()
    if rank == 1:
        store.wait(["rank 0 is warned", "rank 2 is warned"])
        time.sleep(1.5)  # long enough for a second warning
    transport.barrier()
    return [record.getMessage() for record in records]


def test_a_stall_is_warned_of_once_and_waited_out() -> None:
    warnings = run_ranks(warn, 3)
    assert warnings[1] == []
    for rank in (0, 2):
        (text,) = warnings[rank]
        assert re.search("rank 1 is alive but late: at collective 1 while rank [02] is at 2", text), "one asks for both"


@on_processes(2)
def test_closing_ends_a_call_in_flight(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=60)
    transport.barrier()
    if rank == 0:
        once_it_waits(transport, transport.close)
        with pytest.raises(TransportError, match="rank 0: this transport is closed"):
            transport.recv(torch.empty(5), 1)
    else:
        with pytest.raises(TransportError, match="rank 0 closed its transport in collective 1"):
            transport.recv(torch.empty(5), 0)


@on_processes(3)
def test_a_rank_that_does_not_make_the_transport_is_named_also_to_itself(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 knows", "rank 2 knows"])
    with pytest.raises(TransportError, match=r"ranks \[1\] did not come within 1 s") as caught:
        C10dTransport(timeout=1.0)
    store.set(f"rank {rank} knows", "")
    assert caught.value.ranks == (1,)


@on_processes(2)
def test_a_rank_does_not_send_to_itself(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=TIMEOUT)
    with pytest.raises(ConfigError, match="not this rank"):
        transport.send(torch.zeros(1), rank)


@on_processes(2, store="tcp")
def test_transports_that_come_and_go_leave_no_keys_in_the_store(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    keeper = C10dTransport(timeout=TIMEOUT)
    keeper.barrier()
    before = store.num_keys()
    keeper.barrier()
    for _ in range(3):
        with_parts = [keeper.duplicate(), keeper.subset(range(world)), C10dTransport(timeout=TIMEOUT)]
        for each in with_parts:
            each.barrier()
            each.close()
    deadline = time.monotonic() + TIMEOUT
    while store.num_keys() > before:
        assert time.monotonic() < deadline, f"{store.num_keys() - before} keys are left"
        time.sleep(0.05)
    keeper.barrier()
