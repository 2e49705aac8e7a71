"""Start and end of a job, ranks and sizes, features of this build, and the session that runs all operations."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import context
from ..base.errors import ConfigError, FusionLayerError, require
from ..coordination import Session
from ..observe.timeline import Timeline
from ..transport import Transport, local
from . import environment

_logger = logging.getLogger("fusionlayer")


class HorovodInternalError(FusionLayerError, RuntimeError):
    """An operation has failed: a peer failed, or ranks asked for it differently. The message says which.

    Attributes:
        ranks: the ranks that caused the failure, if known.
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    @classmethod
    def of(cls, error: FusionLayerError) -> HorovodInternalError:
        """Return the error that Horovod's users expect, for one of fusionlayer's."""
        return cls(str(error), getattr(error, "ranks", ()))


_sessions: WeakKeyDictionary[Transport, Session] = WeakKeyDictionary()
# The session of this process, so that calls find it without a look-up. None where ranks are threads.
_process: Session | None = None
# Guards _sessions and _process. It is not held while a session is made or closed. Both wait for other ranks; where
# ranks are threads, these would wait for the lock.
_lock = threading.Lock()


def begin(comm: Sequence[int] | None) -> None:
    """Join the job and begin its session, as ``init`` says."""
    global _process
    context.refuse_elastic(
        "init()", "hvd.elastic restarts workers instead; use fusionlayer's own functions, or leave elastic=True out"
    )
    settings = environment.read()
    context.init(settings=settings.job)
    transport = context.transport()
    if environment.is_set(os.environ, "HOROVOD_AUTOTUNE") and transport.rank == 0:
        _logger.warning("HOROVOD_AUTOTUNE has no effect: buckets are not searched for while training runs")
    if comm is not None and sorted(_ranks(comm)) not in ([], list(range(transport.size))):
        raise ConfigError(
            f"init(comm={list(comm)}); the job is all {transport.size} processes: start fewer, or use process_sets"
        )
    with _lock:
        here = _sessions.get(transport)
    if here is None:
        made = Session(
            transport,
            fusion_bytes=settings.fusion_bytes,
            patience=settings.patience,
            cache_capacity=settings.cache_capacity,
            timeline=Timeline(settings.job.timeline, transport.rank),
        )
        with _lock:
            _sessions[transport] = made
            _process = made if local.current() is None else None


def _ranks(comm: Any) -> list[int]:
    try:
        return [int(rank) for rank in comm]
    except (TypeError, ValueError):
        raise ConfigError(f"init(comm={comm!r}); communicators of mpi4py are not supported: leave comm out") from None


def shutdown() -> None:
    """Leave the job, if there is one. Its optimizers cannot be used afterwards. ``init`` begins a new job."""
    if local.current() is None:
        context.shutdown()
    else:
        _close_session()


def _close_session() -> None:
    """Close the session of this thread's rank, where ranks are threads."""
    transport = context.transport()
    with _lock:
        here = _sessions.pop(transport, None)
    if here is not None:
        here.close()


def _close_all() -> None:
    """Close all sessions. ``context.shutdown`` calls it before it closes the transport."""
    global _process
    with _lock:
        _process = None
        open_ones = list(_sessions.values())
        _sessions.clear()
    for each in open_ones:
        each.close()


context.before_shutdown(_close_all)


def _begin_child() -> None:
    """Forget the sessions: this process was forked, and their threads and connections are its parent's."""
    global _process, _lock, _sessions
    _process, _lock, _sessions = None, threading.Lock(), WeakKeyDictionary()


os.register_at_fork(after_in_child=_begin_child)


def is_initialized() -> bool:
    """Return whether ``init`` has been called and ``shutdown`` has not."""
    if not context.is_initialized():
        return False
    with _lock:
        return context.transport() in _sessions


def session() -> Session:
    """Return the session of this process."""
    if _process is not None and local.current() is None:
        return _process
    here = _sessions.get(context.transport()) if context.is_initialized() else None
    if here is None:
        context.refuse_child()
        raise ConfigError("fusionlayer.torch is not initialized; call hvd.init() first")
    return here


def _transport() -> Transport:
    session()
    return context.transport()


def rank() -> int:
    """Return this process's rank in the job."""
    return session().rank


def size() -> int:
    """Return the number of processes of the job."""
    return session().size


def _node() -> tuple[int, ...]:
    transport = _transport()
    return next(node for node in transport.nodes if transport.rank in node)


def _by_launcher() -> bool:
    session()
    return context.launcher() != "single"


def local_rank() -> int:
    """Return this process's rank among those of its host. Scripts use it as the index of their device."""
    return context.local_rank() if _by_launcher() else _node().index(rank())


def local_size() -> int:
    """Return the number of processes of this host."""
    return context.local_size() if _by_launcher() else len(_node())


def cross_rank() -> int:
    """Return this host's place among the hosts that have a process of this local rank."""
    mine = _node()
    place = mine.index(rank())
    return [node for node in _transport().nodes if len(node) > place].index(mine)


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    place = _node().index(rank())
    return sum(len(node) > place for node in _transport().nodes)


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return len({len(node) for node in _transport().nodes}) == 1


def mpi_threads_supported() -> bool:
    """Return True: programs may use MPI from any thread, since fusionlayer does not use it."""
    session()
    return True


def mpi_enabled() -> bool:
    """Return False: messages are not sent by MPI, even if mpirun has started the processes."""
    return False


def mpi_built() -> bool:
    """Return False: nothing here is built against MPI. mpirun may start the processes nevertheless."""
    return False


def gloo_enabled() -> bool:
    """Return True: CPU tensors are sent by gloo."""
    return gloo_built()


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as a number such as 22304, or 0 if torch has no NCCL or there is no GPU."""
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version = torch.cuda.nccl.version()
    if isinstance(version, int):
        return version
    major, minor, patch = (*version, 0, 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether CUDA tensors can be sent."""
    return bool(torch.backends.cuda.is_built())


def rocm_built() -> bool:
    """Return whether torch is built for AMD's GPUs."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the following operations of this process, in Chrome's trace format.

    Args:
        file_path: ``.<rank>`` is appended, so every rank has its own file.
        mark_cycles: without effect. There are no cycles: an operation is sent when all ranks have requested it.
    """
    require(file_path, (str, os.PathLike), "start_timeline", "the path of a file")
    here = session()
    here.timeline.close()
    here.timeline = Timeline(file_path, here.rank)


def stop_timeline() -> None:
    """End the timeline and complete its file."""
    here = session()
    here.timeline.close()
    here.timeline = Timeline(None, here.rank)
