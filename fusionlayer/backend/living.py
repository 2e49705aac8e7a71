"""Gives another policy to groups that exist already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.errors import UsageError
from .policy import CallPolicy
from .registration import use


def adopt(policy: CallPolicy | Mapping[str, Any] | str | Path | None) -> None:
    """Set the policy of all groups of this process, present and future; all ranks call it together.

    Calls that were made before keep their codecs.

    Raises:
        ConfigError: the policy is invalid.
        PlanMismatch: ranks have different policies.
        UsageError: the default group is not of this backend.
    """
    from .group import CompressingGroup

    world = dist.group.WORLD
    if not isinstance(world, CompressingGroup):
        raise UsageError("backend.adopt needs a default group of the backend 'fusionlayer'; start it first")
    parsed = CallPolicy.of(policy)
    world.agree(parsed)
    use(parsed)
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, CompressingGroup):
            group.take(parsed)
