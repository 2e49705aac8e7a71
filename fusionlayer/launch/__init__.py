"""Rank, size and store of this process, from variables of torchrun, mpirun, horovodrun or srun, or from Ray Train."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

from torch.distributed import PrefixStore, Store

from ..base.errors import ConfigError, TransportError
from ..health.meeting import await_all
from ..health.processes import Processes
from ..health.state import Finding, RankState
from ..health.store import StatusKeys
from ..process import outages
from ..process.bounded import Overdue, bounded
from ..process.interfaces import allowed_address, is_loopback
from ..process.processes import Identity, node_name
from . import allocations, meeting, ray_train, slurm
from .meeting import Board
from .stores import SealedStore, open_store

__all__ = ["VARIABLES", "RankInfo", "find_place", "is_kept_by_launcher", "is_on_one_host", "make_store", "settle"]


@dataclass(frozen=True)
class RankInfo:
    """Ranks and sizes of this process in its job and on its host.

    Attributes:
        rank: rank of this process, 0 <= rank < size.
        size: number of processes of the job.
        local_rank: rank among the processes of this host.
        local_size: number of processes of this host.
        launcher: where the numbers come from: one of ``VARIABLES``, "srun", "ray" or "single".
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "single"


VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "jsrun": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_LOCAL_SIZE"),  # the last is not set
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""The variables of rank, size, local rank and local size of each launcher."""


def find_place(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return this process's place. Without a launcher it is rank 0 of 1.

    srun and Ray may have started another launcher, whose variables say more. So their own variables count only if there
    are no others.
    """
    places, halves = [], []
    for launcher, names in VARIABLES.items():
        if "PMI_SIZE" in names and slurm.speaks_pmi(environ):
            continue
        there = [name for name in names[:2] if name in environ]
        if len(there) == 2:
            places.append(_read_place(launcher, names, environ))
        elif there:
            halves.append(f"{there[0]} is set and {next(n for n in names[:2] if n not in there)} is not")
    if not places and halves:
        raise ConfigError(f"{halves[-1]}: set both, as a launcher does, or none")
    if not places:
        return _place_without_launcher(environ)
    # The first launcher in the list wins, but it must not see fewer processes than another one. A launcher that starts
    # the processes of another can only multiply them.
    place, largest = places[0], max(places, key=lambda other: other.size)
    if place.size < largest.size:
        raise ConfigError(
            f"{place.launcher} variables say {place.size} processes, {largest.launcher} variables {largest.size}; if "
            f"{largest.launcher} has started this one, unset {' and '.join(VARIABLES[place.launcher][:2])}"
        )
    return place


def _place_without_launcher(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's place where no launcher has set variables: by Ray's or Slurm's own word."""
    worker = ray_train.find_worker()
    if worker:
        return RankInfo(*worker, "ray")
    nodes, each = environ.get("PET_NNODES", "1"), environ.get("PET_NPROC_PER_NODE", "1")
    if nodes not in ("1", "1:1") or each.isdecimal() and each != "1":
        # Kubeflow sets them on each node for torchrun. Without it every node would train alone.
        raise ConfigError(
            f"PET_NNODES={nodes}, PET_NPROC_PER_NODE={each} and no RANK: these variables are for torchrun; start the "
            "script by torchrun instead of python"
        )
    task = slurm.find_task(environ)
    if task is None:
        allocations.refuse_alone(environ)
    return RankInfo() if task is None or task.size == 1 else RankInfo(*task, "srun")


def _read_place(launcher: str, names: tuple[str, str, str, str], environ: Mapping[str, str]) -> RankInfo:
    try:
        rank, size = int(environ[names[0]]), int(environ[names[1]])
        local_rank = int(environ.get(names[2], rank))
        on_one_host = names[2] not in environ or launcher == "flux" and environ.get("FLUX_JOB_NNODES") == "1"
        local_size = int(environ.get(names[3], max(1, size if on_one_host else local_rank + 1)))
    except ValueError:
        given = {name: environ.get(name) for name in names}
        raise ConfigError(f"{launcher} variables {given}; expected whole numbers") from None
    if not 0 <= rank < size or not 0 <= local_rank < local_size:
        raise ConfigError(
            f"{launcher} variables say rank {rank} of {size}, local rank {local_rank} of {local_size}; "
            "expected 0 <= rank < size"
        )
    return RankInfo(rank, size, local_rank, local_size, launcher)


_store: Store | None = None
_joined = 0
# The key of a store that counts processes which ask rank 0 for a prefix; followed by their tokens, by that number.
_HELLO = "fusionlayer/hello"
# Processes that have counted themselves, and were killed before they asked.
_MOST_GONE = 1024
_POLL = 0.01
# Seconds that ranks wait beyond the timeout, so that those that came find out which ones did not.
_LAST_LOOK = 1.5


def make_store(place: RankInfo, timeout: float, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store through which the job's processes find each other, once all of them have come.

    It uses MASTER_ADDR and MASTER_PORT if they are set, as by torchrun. Otherwise rank 0 opens a port and publishes it:
    through horovodrun's key-value server, or through a file for processes of one mpirun on one host. The connection
    stays open for the life of the process. A later call returns a fresh part of the same store.
    """
    global _store, _joined
    _joined += 1
    deadline = time.monotonic() + timeout

    def meet() -> tuple[Store, Store]:
        kept = _store or _connect(place, timeout, environ)
        store = _meeting(kept)
        _await_all(store, place, timeout, deadline)
        return kept, store

    try:
        # On a thread of its own: a store whose keeper is stopped does not answer, and nothing interrupts that.
        _store, store = bounded(meet, deadline + _LAST_LOOK, name="meeting of ranks")
    except Overdue:
        raise TransportError(
            f"rank {place.rank}: the store by which the ranks meet{_where(environ)} does not answer within "
            f"{timeout:g} s; is rank 0, or the launcher that keeps it, stopped or overloaded, or has another program "
            "that port?",
            [] if is_kept_by_launcher(environ) else [0],
        ) from None
    meeting.clear()
    return store


def settle(place: RankInfo, store: Store, timeout: float, environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the place among the processes of its host, which ranks count by themselves where no variable has it.

    Kubeflow's PyTorchJob, and users with variables of their own, often give RANK and WORLD_SIZE alone. All ranks
    of the launcher must call.
    """
    names = VARIABLES.get(place.launcher)
    if names is None:
        return place
    counts = not environ.keys() >= {*names[2:]}

    def meet() -> list[bytes]:
        sealed = SealedStore(store, "meeting")
        sealed.set(f"node/{place.rank}", node_name())
        return sealed.multi_get([f"node/{rank}" for rank in range(place.size)]) if counts else []

    try:
        nodes = bounded(meet, time.monotonic() + timeout + _LAST_LOOK, name="count of ranks")
    except RuntimeError as error:
        text = f"rank {place.rank}: lost the store by which the ranks meet: {outages.first_line(error)}"
        raise TransportError(text, [] if is_kept_by_launcher(environ) else [0]) from error
    if not counts:
        return place
    here = [rank for rank, node in enumerate(nodes) if node == nodes[place.rank]]
    local_rank = place.local_rank if names[2] in environ else here.index(place.rank)
    return replace(place, local_rank=local_rank, local_size=max(local_rank + 1, len(here)))


def _meeting(kept: Store) -> Store:
    """Return the part of the store that the current call of ``make_store`` is for."""
    return PrefixStore(f"fusionlayer/{_joined}", kept)


def _keys(kept: Store, place: RankInfo) -> StatusKeys:
    """Return the keys with which the ranks of ``place`` announce themselves."""
    return StatusKeys(SealedStore(kept, "meeting"), "ranks", place.rank, place.size)


def _await_all(kept: Store, place: RankInfo, timeout: float, deadline: float) -> None:
    """Return when all ranks have come and each knows the others' processes."""
    keys, processes = _keys(kept, place), Processes(place.rank, place.size, {})
    try:
        _agree_on_size(SealedStore(kept, "meeting"), place)
        state = RankState(place.rank, processes.own, 1)
        keys.arrive(state)
        # This client of the store waits, so checks need another one.
        others = cache(lambda: _keys(kept.clone(), place))  # type: ignore[attr-defined]
        finding = await_all(keys, others, processes, deadline, f"{timeout:g} s; were they started?")
        if finding is not None:
            keys.write(replace(state, heard=True))
            raise TransportError(finding.text, finding.ranks)
        keys.leave()
    except TransportError as error:
        _announce(keys, place, error)
        raise
    except RuntimeError as error:
        ranks = [] if is_kept_by_launcher(os.environ) else [0]
        text = f"rank {place.rank}: lost the store by which the ranks meet: {outages.first_line(error)}"
        raise TransportError(text, ranks) from error


def _agree_on_size(store: SealedStore, place: RankInfo) -> None:
    """Return if this rank's number of ranks is that of the first rank; raise ``TransportError`` otherwise."""
    first, size = _numbers(store.compare_set("size", "", f"{place.rank} {place.size}"), 2)
    if size != place.size:
        name = VARIABLES.get(place.launcher, ("", "the number of processes"))[1]
        raise TransportError(
            f"rank {place.rank} has {name}={place.size}, and rank {first}, which has come to the same "
            f"store{_where(os.environ)}, has {size}; give all ranks of a job the same number, and each job a "
            "port of its own",
            [place.rank, first],
        )


def _announce(keys: StatusKeys, place: RankInfo, error: TransportError) -> None:
    """Let the others know why the ranks cannot meet. Rank 0, which may keep the store, stays until they know."""
    with suppress(RuntimeError):
        keys.settle(Finding("failed", tuple(error.ranks), str(error)))
        keys.go_on()
        end = time.monotonic() + _LAST_LOOK / 2
        while place.rank == 0 and time.monotonic() < end:
            others = keys.read(keys.others)
            if all(state.heard for rank, state in others.items() if rank not in error.ranks):
                return
            time.sleep(_POLL)


def _numbers(text: bytes, count: int) -> list[int]:
    """Return the numbers that a rank has written into the store."""
    words = text.decode(errors="replace").split()
    if len(words) != count or not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise TransportError(
            f"{text[:80]!r} stands in the store by which the ranks meet{_where(os.environ)}: another program has "
            "written it; give each job a port of its own"
        )
    return [*map(int, words)]


def _where(environ: Mapping[str, str]) -> str:
    """Return where the variables say that ranks meet, for a message."""
    there = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    return f" at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}" if there else ""


def is_kept_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher keeps the store by which ranks meet."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(place: RankInfo, timeout: float, environ: Mapping[str, str]) -> Store:
    where = place.rank, place.size
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        agent = is_kept_by_launcher(environ)
        port = meeting.port_of(environ, "MASTER_PORT")
        store = open_store(environ["MASTER_ADDR"], port, *where, timeout, serve_it=place.rank == 0 and not agent)
        return PrefixStore(_greet(store, place, timeout), store) if agent else store
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        board: Board = meeting.HorovodBoard(environ, timeout)
    elif place.launcher == "ray":
        board = ray_train.RayBoard(timeout)
    elif place.local_size == place.size:
        board = meeting.FileBoard(environ, timeout, slurm.step_of(environ) if place.launcher == "srun" else None)
    elif place.launcher == "srun":
        host, port = slurm.meeting_point(environ)
        port = meeting.port_of(environ, "MASTER_PORT") if "MASTER_PORT" in environ else port
        return open_store(environ.get("MASTER_ADDR", host), port, *where, timeout, serve_it=place.rank == 0)
    else:
        missing = " and no ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ)
        raise ConfigError(
            f"{place.size} processes on several hosts ({place.local_size} here) and no {missing}: start with "
            "'mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...', or with torchrun"
        )
    if place.rank == 0:
        own = "127.0.0.1" if is_loopback(board.host) else allowed_address(board.host) or "0.0.0.0"
        store = open_store(own, 0, *where, timeout, serve_it=True)
        board.publish(store.port)
        return store
    return open_store(*board.read(), *where, timeout, serve_it=False)


def _greet(kept: Store, place: RankInfo, timeout: float) -> str:
    """Return a new prefix for the keys of these processes, equal on all of them.

    It is needed because the store of torchrun's agent keeps the keys of processes from before a restart. Rank 0 makes
    the prefix and answers the other ranks with it. Each rank asks with a new random token, so that it cannot read an
    answer to a process from before the restart.
    """
    token = f"fusionlayer/{secrets.token_hex(8)}"
    store = SealedStore(kept, "meeting")
    end = time.monotonic() + timeout
    if place.rank > 0:
        store.set(f"{_HELLO}/{store.add(_HELLO, 1)}", token)
        try:
            store.wait([token], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TransportError(f"rank 0 did not come within {timeout:g} s; was it started?", [0]) from error
        name = store.get(token).decode(errors="replace")
        store.set(f"{name}/met/{place.rank}", "")
        store.add(f"{name}/met", 1)
        return name
    # The others must not report rank 0 while it waits here for a missing rank.
    _keys(_meeting(PrefixStore(token, kept)), place).write(RankState(0, Identity.own(), 0))
    asked: list[str] = []
    seen = 0
    while (met := store.add(f"{token}/met", 0)) < place.size - 1 and time.monotonic() < end:
        # Any process that reaches the store can count up.
        count = min(store.add(_HELLO, 0), seen + max(place.size + _MOST_GONE - len(asked), 0))
        asked += [f"{_HELLO}/{number}" for number in range(seen + 1, count + 1)]
        seen = count
        # A process counts itself before it asks, and may have been killed in between.
        ready = asked if not asked or store.check(asked) else [key for key in asked if store.check([key])]
        if ready:
            tokens = [each.decode(errors="replace") for each in store.multi_get(ready)]
            store.multi_set(tokens, [token] * len(tokens))
            asked = [key for key in asked if key not in ready]
        time.sleep(0.01)
    if met < place.size - 1:
        late = [rank for rank in range(1, place.size) if not store.check([f"{token}/met/{rank}"])]
        raise TransportError(f"ranks {late} did not come within {timeout:g} s; were they started?", late)
    return token


def is_on_one_host(place: RankInfo, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job's processes meet where no other host can come."""
    return is_loopback(environ.get("MASTER_ADDR", "127.0.0.1" if place.size == place.local_size else ""))
