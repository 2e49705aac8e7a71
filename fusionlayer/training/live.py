"""The distributed optimizers of this process that are not closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .. import context
from ..base.errors import ConfigError
from ..scheduler import Engine
from .reduction_policy import ReductionPolicy


class Live(Protocol):
    """The part of a ``Reducer`` that this module uses; ``Reducer`` imports this module."""

    optimizer: Callable[[], Any]
    policy: ReductionPolicy
    names: dict[Tensor, str]


_live: weakref.WeakSet[Live] = weakref.WeakSet()
# Guards _live: any thread may make and close optimizers, and shutdown reads all of them.
_lock = threading.Lock()


def enlist(reducer: Live) -> None:
    """Note that an optimizer's reducer has an engine."""
    with _lock:
        _live.add(reducer)


def forget(reducer: Live) -> None:
    """Note that an optimizer is closed."""
    with _lock:
        _live.discard(reducer)


def _all() -> list[Live]:
    with _lock:
        return list(_live)


def refuse_twice(names: Mapping[Tensor, str], but: Live | None = None) -> None:
    """Raise ``ConfigError`` if a distributed optimizer that is not closed, ``but`` one, has one of the parameters."""
    for other in _all():
        for parameter, name in names.items():
            if other is not but and parameter in other.names:
                raise ConfigError(
                    f"parameter {name!r} belongs to a DistributedOptimizer already and would be reduced twice; close() "
                    "that one first"
                )


def _leave_all() -> None:
    """Let operations of optimizers in flight end: to get results, other ranks need this rank's part."""
    for reducer in _all():
        optimizer = reducer.optimizer()  # kept alive meanwhile
        if optimizer is not None:
            reducer.policy.leave()


def release(engine: Engine, hooks: Sequence[RemovableHandle]) -> None:
    """Remove the hooks of the averaging, and close its engine."""
    for hook in hooks:
        hook.remove()
    engine.close()


context.before_shutdown(_leave_all)
