"""The watcher of this process: ``fl.watch`` and the functions that start, move and end it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from ..base import config
from ..base.errors import FusionLayerError, UsageError
from ..observe import counts
from .watcher import Watcher

_logger = logging.getLogger("fusionlayer")

# The thread that makes and ends transports alone sets these two. Others read the first once, for its numbers.
_current: Watcher | None = None
# The last rendezvous of the members of an elastic job, and this process's identity there; None: the job is not elastic.
_members: tuple[dist.Store | None, int, int] | None = None


def begin(
    store: dist.Store,
    rank: int,
    size: int,
    settings: config.Config,
    patience: float = 5.0,
    *,
    asked: bool = True,
    name: str = "",
) -> Watcher | None:
    """Watch this process of a job whose ranks have met by a store, unless it is watched already or is alone."""
    global _current
    if size < 2 or settings.watch is False or (not asked and not settings.watch and _is_file(store)):
        return None
    if _current is not None and not _current.is_closed and _current.store is not store:
        _current.close()  # of a process group that was destroyed
    return _open(store, rank, size, settings, patience, name)


def _open(
    store: dist.Store | None, rank: int, size: int, settings: config.Config, patience: float = 5.0, name: str = ""
) -> Watcher | None:
    global _current
    if _current is None or _current.is_closed:
        try:
            path = Path(settings.status) if settings.status else None
            _current = Watcher(store, rank, size, patience, path, name)
        except FusionLayerError as error:
            _logger.warning("this job is not watched: %s", error)
            return None
    return _current


def follow(store: dist.Store | None, rank: int, size: int, settings: config.Config) -> None:
    """Watch the present members of an elastic job, if this process is watched or its settings ask for it."""
    global _members
    _members = store, rank, size
    if _current is not None and not _current.is_closed:
        _current.move(store, rank, size)
    elif settings.watch:
        _open(store, rank, size, settings)


def leave() -> None:
    """End ``follow``: this process leaves the elastic job while the others can be reached."""
    global _members
    if _members is not None and _current is not None:
        _current.close()
    _members = None


def _is_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@counts.add_gauges
def _gauges() -> Mapping[str, float]:
    return {} if _current is None else _current.counts()


def watch(patience: float = 5.0) -> Watcher | None:
    """Watch the job of torch.distributed that this process belongs to; all ranks call it.

    If a rank straggles, is stopped, gone or in another call, rank 0 logs one line with the rank and its line of the
    program. ``fusionlayer status`` shows the job meanwhile. No call costs more: torch's flight recorder notes calls in
    any case, and a thread of this process reads it. The thread that calls this is the one whose line is reported. In an
    elastic job it continues with the present members after each change.

    Args:
        patience: seconds that a rank may wait in a call before it is asked why. If longer waits are usual, three times
            the usual wait.

    Returns:
        The watcher, to ``close`` it early; None for a job of one process, and where the setting ``watch`` is false.

    Raises:
        UsageError: torch.distributed is not initialized.
        ConfigError: a setting cannot be used.
    """
    if _members is None and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "fusionlayer.watch needs torch.distributed; call init_process_group() or fusionlayer.init() first"
        )
    if not 0 < patience < float("inf"):
        raise UsageError(f"patience={patience!r}; expected seconds above 0")
    if _members is not None:
        settings = config.load()
        return None if settings.watch is False else _open(*_members, settings, patience)
    store = dist.distributed_c10d._get_default_store()
    return begin(store, dist.get_rank(), dist.get_world_size(), config.load(), patience)
