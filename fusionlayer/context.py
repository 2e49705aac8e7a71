"""The job of this process: joining and leaving it, its ranks and settings, and its shared transports."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from . import health, launch
from .base import config, job_key, libraries
from .base.errors import ConfigError, UsageError, require
from .elastic import Members
from .launch.last_error import leave_to_launcher
from .process import descriptors, forks, interfaces
from .transport import Transport, local
from .transport.c10d import C10dTransport, make_default_group
from .transport.devices import refuse_old_gpu, refuse_rocm, refuse_torchcomms
from .transport.links.socket_options import chosen

_logger = logging.getLogger("fusionlayer")

# The transports whose processes meet by torch.distributed.
_BY_TORCH = ("c10d", "sockets", "auto")


@dataclass
class _JobState:
    place: launch.RankInfo
    settings: config.Config
    owns_process_group: bool
    transports: dict[tuple[dist.ProcessGroup | None, int | None], Transport]
    members: Members | None = None


_job: _JobState | None = None
# Whether the job belongs to the process from which this one was forked.
_is_parents = False
_before_shutdown: list[Callable[[], None]] = []
_named: set[str] = set()
# Guards _job and its transports. If two threads made a transport for one group, the second would wait for ranks that
# never make it. Reentrant, because a callback before a shutdown may ask for a transport.
_lock = threading.RLock()


def init(
    timeout: float | None = None,
    *,
    transport: str | None = None,
    settings: config.Config | None = None,
    elastic: bool = False,
) -> None:
    """Join the job in which torchrun, mpirun, horovodrun, srun or Ray Train has started this process. Call it first.

    An existing default process group of torch is used. Otherwise one is made, with gloo for CPU tensors and, where
    available, NCCL for CUDA tensors. With ``transport`` "sockets" or "auto" in the settings fusionlayer makes
    connections of its own next to it. With "mpi" or "horovod" in the settings no group is made or used, and that
    library determines the ranks. Without a launcher the job is this process alone. A second call does nothing. Within
    ``transport.local.run`` the call does nothing either.

    Args:
        timeout: seconds that a collective waits for its peers; overrides the configuration.
        transport: "c10d", "sockets", "auto", "mpi" or "horovod"; overrides the configuration.
        settings: used instead of the settings from file and environment.
        elastic: ranks may fail, and others may join, while the job continues (docs/elastic.md). No process group of
            torch is made then. A process that joins later has FUSIONLAYER_JOIN in its environment.

    Raises:
        ConfigError: environment or configuration is invalid.
        FusionLayerError: the native library is absent.
        TransportError: the other processes did not come in time.
    """
    global _job
    with _lock:
        if _job is not None or local.current() is not None:
            return
        libraries.check()  # one rank alone may need it only much later
        refuse_rocm()
        refuse_torchcomms()
        refuse_old_gpu()  # if CUDA is in use already; else when the ranks connect for the first CUDA tensor
        leave_to_launcher()
        if _is_parents and dist.is_initialized():
            raise forks.refuse("torch.distributed and fusionlayer belong to its parent")
        if settings is not None:
            require(settings, config.Config, "settings", "a fusionlayer.base.config.Config")
        settings = settings or config.load()
        given = {"timeout": timeout, "transport": transport}
        settings = config.Config(**vars(settings) | {name: value for name, value in given.items() if value is not None})
        job_key.find()  # a wrong one is an error here, and not where it is used
        interfaces.restrict(settings.interfaces)
        if settings.threads is not None:
            libraries.set_threads(settings.threads)
        by_torch = settings.transport in _BY_TORCH
        begun = by_torch and dist.is_available() and dist.is_initialized()
        place = _place_in_group() if begun else launch.find_place()
        if by_torch and place.size > 1:
            own, keeps_store = chosen(settings), place.rank == 0 and not launch.is_kept_by_launcher()
            descriptors.reserve(place.size, keeps_store=keeps_store, connections=own.connections if own else 0)
        if elastic or os.environ.get("FUSIONLAYER_JOIN"):
            _job = _join_members(settings, place, begun, elastic)
            _name_unknown_variables(_job.place)
            forks.at_exit(shutdown)
            return
        owns = False
        shared: dict[tuple[dist.ProcessGroup | None, int | None], Transport] = {}
        if not by_torch:
            opened = _open_by_mpi(settings)
            shared[None, settings.ranks_per_node] = opened
            place = _place_in(opened, place, settings.transport)
        elif place.size > 1 and not begun:
            store = launch.make_store(place, settings.timeout)
            place = launch.settle(place, store, settings.timeout)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            make_default_group(backend, store, place.rank, place.size, settings.timeout, settings.stall_warning)
            owns = True
        _job = _JobState(place, settings, owns, shared)
        _name_unknown_variables(place)
        forks.at_exit(shutdown)
        if settings.watch and dist.is_available() and dist.is_initialized():
            health.begin(dist.distributed_c10d._get_default_store(), place.rank, place.size, settings)


def _join_members(settings: config.Config, place: launch.RankInfo, begun: bool, elastic: bool) -> _JobState:
    """Return an elastic job: of the processes that a launcher has started, or one that this process joins later."""
    address, written = os.environ.get("FUSIONLAYER_JOIN"), os.environ.get("FUSIONLAYER_MEMBERS") or None
    if not elastic:
        raise ConfigError(
            f"FUSIONLAYER_JOIN={address} and no elastic=True: call fusionlayer.init(elastic=True), or unset it"
        )
    if begun:
        raise ConfigError(
            "elastic=True in a process that has a process group of torch, whose ranks cannot change; leave "
            "init_process_group() out"
        )
    if settings.transport != "c10d":
        raise ConfigError(
            f"elastic=True with transport {settings.transport!r}, not tried with ranks that change; expected c10d"
        )
    if settings.rates:
        raise ConfigError(
            f"elastic=True with rates={list(settings.rates)}, which are those of certain ranks; leave rates out"
        )
    if address:
        members = Members.newcomer(address, settings, written)
    else:
        store = None
        if place.size > 1:
            store = launch.make_store(place, settings.timeout)
            place = launch.settle(place, store, settings.timeout)
        members = Members.begin(place, store, settings, launch.is_on_one_host(place), written)
    job = _JobState(members.place, settings, False, {}, members)

    def adopt() -> None:
        job.place = members.place
        job.transports = {(None, settings.ranks_per_node): members.transport}
        health.follow(members.store, *((members.rank, members.size) if members.has_joined else (0, 1)), settings)

    adopt()
    members.when_changed(adopt)
    return job


def _place_in_group(environ: Mapping[str, str] = os.environ) -> launch.RankInfo:
    """Return this process's place where torch has a default group, which knows its rank and the number of ranks.

    Variables only say where on its host a process is. A process that makes a group need not set all variables of
    launchers: Lightning, started as ``python train.py``, sets WORLD_SIZE and LOCAL_RANK without RANK.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        place = launch.find_place(environ)
    except ConfigError:
        place = launch.RankInfo()
    if place.size == size:
        return replace(place, rank=rank, size=size)
    local, among = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    here = int(local) if local.isdecimal() else 0
    return launch.RankInfo(rank, size, here, max(here + 1, int(among) if among.isdecimal() else 1))


def _name_unknown_variables(place: launch.RankInfo) -> None:
    """Warn once of variables that mean nothing. No error: a newer version's may be in an environment that is shared."""
    if place.local_rank == 0:
        for name, hint in config.unknown_variables().items():
            if name not in _named:
                _named.add(name)
                _logger.warning("environment variable %s is unknown and has no effect; %s", name, hint)


def _open_by_mpi(settings: config.Config) -> Transport:
    """Return a transport over the processes of MPI."""
    from .transport import mpi  # imported here, because it loads the library

    return mpi.of_world(settings.timeout, settings.stall_warning, settings.ranks_per_node, settings.checksum)


def _place_in(transport: Transport, launched: launch.RankInfo, library: str) -> launch.RankInfo:
    """Return this process's place according to the transport's library; a ``ConfigError`` if launchers disagree."""
    rank, size = transport.rank, transport.size
    if launched.launcher != "single" and launched.size != size:
        raise ConfigError(
            f"transport {library!r} sees {size} processes, the variables of {launched.launcher} say {launched.size}; "
            f"start with the launcher of the library that is imported here (`fusionlayer doctor` names both)"
        )
    if dist.is_available() and dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"transport {library!r} makes this rank {rank} of {size}, torch.distributed rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; give both the same ranks"
        )
    if launched.launcher != "single" and launched.rank == rank:
        return launched
    (mine,) = (ranks for ranks in transport.nodes if rank in ranks)
    return launch.RankInfo(rank, size, mine.index(rank), len(mine), library)


def shutdown() -> None:
    """Leave the job and close the objects of ``init``. Optimizers and hooks of this process stop working."""
    global _job
    with _lock:
        if _job is None:
            return
        # Callbacks first: they may still use the transports.
        for callback in _before_shutdown:
            callback()
        job, _job = _job, None
        forks.not_at_exit(shutdown)
        health.leave()
        for opened in job.transports.values():
            opened.finish()
        if job.members is not None:
            job.members.leave()
        if job.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def before_shutdown(callback: Callable[[], None]) -> None:
    """Register ``callback`` to run each time the job is left, while the other ranks can still be reached."""
    _before_shutdown.append(callback)


def is_initialized() -> bool:
    """Return whether ``init`` has been called (always true within ``transport.local.run``)."""
    return _job is not None or local.current() is not None


def _begin_child() -> None:
    """Detach a forked child from its parent's job, whose threads and connections it does not have."""
    global _job, _lock, _is_parents
    _lock = threading.RLock()
    if dist.is_available() and dist.is_initialized():
        # Torch's groups wait for threads, too, when they are freed. A group of our backend may be there without a job.
        forks.keep(dict(dist.distributed_c10d._world.pg_map))
        forks.keep(dist.distributed_c10d._get_default_store())
    if _job is not None:
        _is_parents, job, _job = True, _job, None
        forks.keep(job)
        health.leave()


os.register_at_fork(after_in_child=_begin_child)


def refuse_child() -> None:
    """Raise ``UsageError`` if the job belongs to the process from which this one was forked."""
    if _job is None and _is_parents:
        raise forks.refuse("fusionlayer belongs to its parent")


def _current() -> _JobState:
    refuse_child()
    if _job is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("fusionlayer is not initialized; call fusionlayer.init() first")
        init()
    assert _job is not None
    return _job


def rank() -> int:
    """Return this process's rank in the job."""
    here = local.current()
    return here.rank if here else _current().place.rank


def size() -> int:
    """Return the number of processes of the job."""
    here = local.current()
    return here.size if here else _current().place.size


def local_rank() -> int:
    """Return this process's rank among those of its host, which is the index of the device to use."""
    here = local.current()
    return here.rank if here else _current().place.local_rank


def local_size() -> int:
    """Return the number of processes of this host."""
    here = local.current()
    return here.size if here else _current().place.local_size


def membership() -> Members:
    """Return the members of the elastic job that ``init(elastic=True)`` has begun or joined.

    Raises:
        UsageError: the job is not elastic.
    """
    members = None if local.current() else _current().members
    if members is None:
        raise UsageError("this job is not elastic; call fusionlayer.init(elastic=True) first")
    return members


def is_elastic() -> bool:
    """Return whether ranks of the job may fail and others may join."""
    return local.current() is None and _job is not None and _job.members is not None


def refuse_elastic(what: str, instead: str) -> None:
    """Raise ``ConfigError`` if the job is elastic: ``what`` needs all ranks; ``instead`` names the replacement."""
    if is_elastic():
        raise ConfigError(f"{what} in a job that fusionlayer.init(elastic=True) has begun: {instead}")


def launcher() -> str:
    """Return the launcher of the job: "torchrun", "mpirun", ..., or "single" if there is none."""
    return "single" if local.current() else _current().place.launcher


def settings() -> config.Config:
    """Return the job's settings."""
    return config.load() if local.current() else _current().settings


def transport(group: dist.ProcessGroup | Transport | None = None, ranks_per_node: int | None = None) -> Transport:
    """Return the shared transport over ``group`` (None: all ranks), which direct calls use.

    An engine takes a ``duplicate`` of it. All ranks of the group make the first call for a group together.

    Args:
        group: which ranks. A transport is returned as it is.
        ranks_per_node: this many consecutive ranks of the job count as one node; None: as configured. Each number has
            a transport of its own.
    """
    if isinstance(group, Transport):
        return group
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # of which the transport says so itself
    if group not in (None, outside):
        require(group, dist.ProcessGroup, "group", "a process group or transport; None for all ranks")
    here = local.current()
    if here is not None and group is None:
        return here
    job = _current()
    settings = job.settings
    each = settings.ranks_per_node if ranks_per_node is None else ranks_per_node
    with _lock:
        if (group, each) not in job.transports:
            if job.members is not None:
                raise UsageError("an elastic job has one group, of all members; leave group and ranks_per_node out")
            if group is None and not dist.is_initialized():
                job.transports[group, each] = local.alone()
            else:
                job.transports[group, each] = C10dTransport(
                    group,
                    settings.timeout,
                    stall_warning=settings.stall_warning,
                    node=None if each is None else f"node {dist.get_rank() // each}",
                    checksum=settings.checksum,
                    sockets=chosen(settings),
                    peer_bytes=settings.peer_memory_mb << 20,
                )
        return job.transports[group, each]
