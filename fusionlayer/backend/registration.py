"""Makes the groups of the backend "fusionlayer", and chooses the policy of each new one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import _fusionlayer_autoload

from .. import context, health
from ..base import config
from ..base.errors import UsageError, kind_of
from ..transport.devices import refuse_torchcomms
from . import arguments
from .policy import CallPolicy

_NAME = "fusionlayer"

_default: CallPolicy | None = None


def register() -> None:
    """Register the backend with torch, once. ``import fusionlayer`` calls it; ``import torch`` does the same."""
    _fusionlayer_autoload.register()


def use(policy: CallPolicy | Mapping[str, Any] | str | Path | None) -> CallPolicy | None:
    """Set the policy of the groups that this process makes from now on; None removes it.

    It takes precedence over the default group's policy and over the settings' ``backend``. A policy in ``pg_options``
    takes precedence over it.

    Args:
        policy: a policy, or anything that ``CallPolicy.of`` accepts.

    Returns:
        The policy that was set before.

    Raises:
        ConfigError: the policy is invalid.
    """
    global _default
    before, _default = _default, None if policy is None else CallPolicy.of(policy)
    return before


def traffic(group: dist.ProcessGroup | None = None) -> Any:
    """Return counts of compressed traffic so far: ``calls`` by operation, and ``bytes_sent`` by this rank.

    Args:
        group: process group of this backend; None means the default group.

    Raises:
        UsageError: the group has another backend.
    """
    from .group import CompressingGroup

    group = group or dist.group.WORLD
    if not isinstance(group, CompressingGroup):
        raise UsageError(f"traffic is counted in groups of the backend {_NAME!r}; this one is {kind_of(group)}")
    return group.traffic


def create(options: Any, given: Any) -> dist.ProcessGroup:
    """Make a group; torch calls it with its own options, such as the store, and with the program's ``pg_options``."""
    from .group import CompressingGroup

    refuse_torchcomms()
    context.refuse_elastic(
        'a process group "fusionlayer"',
        "torch's groups have the same ranks for ever; leave init_process_group() out and wrap the optimizer in "
        "fusionlayer.DistributedOptimizer, or begin the job without elastic=True",
    )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    native = arguments.native_options(given)
    policy = _policy_of(None if native is not None else given)
    group = CompressingGroup(options.store, options.group_rank, ranks, options.timeout, policy, native)
    if not dist.is_initialized():
        group.is_default = True
        store = group.get_group_store()
        place = options.group_rank, len(ranks)
        group.watcher = health.begin(store, *place, config.load(), asked=False, name=group.token)
    return group


def create_alone(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device, **policy: Any
) -> dist.ProcessGroup:
    """Make a group without torch's record of it; ``torch.distributed._dist2`` calls it."""
    from .group import CompressingGroup

    return CompressingGroup(store, rank, range(size), timeout, _policy_of(policy or None), alone=True)


def _policy_of(given: Any) -> CallPolicy:
    """Return the policy of a new group; ``given`` is its ``pg_options``, or None."""
    from .group import CompressingGroup

    if given is not None:
        return CallPolicy.of(given)
    if _default is not None:
        return _default
    if dist.is_initialized() and isinstance(dist.group.WORLD, CompressingGroup):
        return dist.group.WORLD.policy
    settings = config.load()
    with config.blame(settings, "backend"):
        return CallPolicy.of(settings.backend)
