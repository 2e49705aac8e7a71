"""Process groups come and go: nothing of them is left, and the next ones are not disturbed."""

import gc
import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer.base.errors import TransportError
from tests.harness import run_ranks
from tests.ports import free_port
from tests.ranks import on_processes
from tests.tiers import exhaustive, long

pytestmark = pytest.mark.medium

POLICY = {"min_bytes": 64, "rules": [{"codec": "int8"}]}
LONG = timedelta(seconds=60)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store as a launcher keeps one, beside the ranks: it outlives all groups."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    yield server.port
    del server


class Control:
    """A store beside that of the groups, by which the test's ranks wait for each other."""

    def __init__(self, folder: str, world: int) -> None:
        self._store, self._world, self._meetings = dist.FileStore(f"{folder}/control", world), world, 0

    def meet(self) -> None:
        self._meetings += 1
        if self._store.add(f"came/{self._meetings}", 1) == self._world:
            self._store.set(f"met/{self._meetings}", "")
        self._store.wait([f"met/{self._meetings}"])

    def share(self, name: str, make: Callable[[], str], rank: int) -> str:
        if rank == 0:
            self._store.set(name, make())
        return self._store.get(name).decode()


def left(store: dist.Store) -> dict[str, Any]:
    """Return what groups may leave: keys, threads, and files with the ports."""
    gc.collect()
    threads = sorted(Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task"))
    return {"keys": store.num_keys(), "threads": threads, "files": len(os.listdir("/proc/self/fd"))}


def use(group: Any, world: int) -> None:
    for x in (torch.ones(3000), torch.ones(3), torch.ones(3000, dtype=torch.float64)):
        group.allreduce([x]).wait()
        assert float((x - world).abs().max()) < 0.05


def end(group: Any) -> None:
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
    else:
        group.shutdown()  # torch does not know of groups that were split off


def new_local_group(ranks: list[int]) -> Any:
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    except ValueError as error:
        # torch names it by its ranks and by how many groups there are, which another one may have been named by.
        assert "name has already been created" in str(error)
        return dist.new_group()


def come_and_go(rank: int, world: int, folder: str, port: int, seed: int, rounds: int) -> None:
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "FUSIONLAYER_WATCH": "true"}
    control, chance, every = Control(folder, world), random.Random(seed), list(range(world))
    store = dist.TCPStore("127.0.0.1", port, world, False, LONG, wait_for_workers=False)
    beginning = left(store)
    for _ in range(rounds):
        dist.init_process_group(
            "fusionlayer", store=store, rank=rank, world_size=world, timeout=LONG, pg_options=POLICY
        )
        makes: list[Callable[[], Any]] = [
            dist.new_group,
            lambda: new_local_group(every),
            lambda: dist.group.WORLD.split_group(every),  # type: ignore[union-attr]
        ]
        groups: list[Any] = [dist.group.WORLD]
        done = []
        for _ in range(8):
            done.append(chance.choice(["make", "make", "use", "use", "end"]))
            if done[-1] == "make":
                groups.append(chance.choice(makes)())
            elif done[-1] == "use":
                use(chance.choice(groups), world)
            elif len(groups) > 1:
                end(groups.pop(chance.randrange(1, len(groups))))
        while groups:
            end(groups.pop())
        control.meet()
        assert left(store) == beginning, done
        control.meet()


def test_random_groups_leave_nothing(port: int, tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/129868: gloo's groups left files, one for each epoch of a loader."""
    run_ranks(come_and_go, 2, str(tmp_path), port, 1, 8, backend=None)


@exhaustive(guarded_by="tests/backend/test_lifetimes.py::test_random_groups_leave_nothing")
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=long) for seed in range(3, 8))])
def test_more_random_groups_leave_nothing(seed: int, port: int, tmp_path: Path) -> None:
    run_ranks(come_and_go, 3, str(tmp_path), port, seed, 20, backend=None)


def begin_again(rank: int, world: int, folder: str, method: str) -> None:
    control = Control(folder, world)
    method = method.format(folder=folder, port=control.share("port", lambda: str(free_port()), rank))
    for number in range(4):
        place = {"rank": rank, "world_size": world, "timeout": LONG}
        dist.init_process_group("fusionlayer", method, pg_options=POLICY, **place)  # type: ignore[arg-type]
        if number % 2:
            fl.watch()  # a second watcher, which the group does not know
        use(dist.group.WORLD, world)
        dist.destroy_process_group()
        if method.startswith("file"):  # torch removes the file with the last of its stores, and gloo hangs just as well
            control.meet()


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:{port}", "file://{folder}/store"])
def test_a_program_begins_again_at_the_same_address(method: str, tmp_path: Path) -> None:
    run_ranks(begin_again, 2, str(tmp_path), method, backend=None)


def differ(rank: int, world: int) -> str:
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)  # and so the next name is another one
    with pytest.raises(TransportError, match=r"ranks \[0, 1\]: ranks \[[01]\] did not come within 2 s") as no:
        dist.new_group([0, 1], timedelta(seconds=2), use_local_synchronization=True)
    assert no.value.ranks == (1 - rank,)
    return str(no.value)


def test_ranks_with_different_histories_time_out_with_a_sentence() -> None:
    run_ranks(differ, 2, backend="fusionlayer")


@on_processes(2, backend="fusionlayer")
def test_a_timeout_that_is_changed_holds_for_compressed_calls(rank: int, world: int) -> None:
    change: Any = getattr(dist, "set_timeout", dist.distributed_c10d.__dict__.get("_set_pg_timeout"))
    group: Any = dist.new_group(timeout=timedelta(seconds=30), pg_options=POLICY)
    change(LONG, group)
    use(group, world)
    assert group._queue._transport.timeout == 60
    change(timedelta(seconds=1), group)
    if rank == 0:
        with pytest.raises(TransportError, match="rank 1 is alive but late") as late:
            group.allreduce([torch.ones(3000)]).wait()
        assert late.value.ranks == (1,)
