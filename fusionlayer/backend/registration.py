"""The name "fusionlayer" among torch's backends, and the policy of groups that are made by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import config
from ..errors import UsageError
from . import arguments
from .policy import CallPolicy

__all__ = ["register", "traffic", "use"]

_NAME = "fusionlayer"

_default: CallPolicy | None = None


def register() -> None:
    """Register the backend with torch, once; ``import fusionlayer`` does."""
    if dist.is_available() and not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def use(policy: CallPolicy | Mapping[str, Any] | str | Path | None) -> CallPolicy | None:
    """Give the groups that this process makes from now on a policy; None takes it back.

    It goes before that of the default group and that of the settings' ``backend``, and behind ``pg_options``.

    Args:
        policy: one, or what ``CallPolicy.of`` makes one of.

    Returns:
        The policy that was in use before.

    Raises:
        ConfigError: it cannot be used.
    """
    global _default
    before, _default = _default, None if policy is None else CallPolicy.of(policy)
    return before


def traffic(group: dist.ProcessGroup | None = None) -> Any:
    """Return what has travelled compressed so far: ``calls`` by operation, and ``bytes_sent`` by this rank.

    Args:
        group: process group of this backend; None means the default group.

    Raises:
        UsageError: a group of another backend.
    """
    from .group import CompressingGroup

    group = group or dist.group.WORLD
    if not isinstance(group, CompressingGroup):
        raise UsageError(f"traffic is counted in groups of the backend {_NAME!r}; this one is {type(group).__name__}")
    return group.traffic


def _create(options: Any, given: Any) -> dist.ProcessGroup:
    """Make a group; torch calls it with where the processes meet, and with what the program gave as ``pg_options``."""
    from .group import CompressingGroup

    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    native = arguments.nccl_options(given)
    policy = _settled(None if native is not None else given)
    return CompressingGroup(options.store, options.group_rank, ranks, options.timeout, policy, native)


def _settled(given: Any) -> CallPolicy:
    from .group import CompressingGroup

    if given is not None:
        return CallPolicy.of(given)
    if _default is not None:
        return _default
    if dist.is_initialized() and isinstance(dist.group.WORLD, CompressingGroup):
        return dist.group.WORLD.policy
    return CallPolicy.of(config.load().backend)
