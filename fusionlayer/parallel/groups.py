"""Turns the groups of ranks that users give into process groups and transports."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import ConfigError
from ..transport import Transport


def resolve(group: object, what: str, axis: str) -> dist.ProcessGroup | Transport | None:
    """Return a group in a form that ``context.transport`` takes."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"{what} got a mesh with the dimensions {group.mesh_dim_names or group.ndim}; give it the one of "
                f"{what}: mesh[{axis!r}]"
            )
        return group.get_group()
    if group is None or isinstance(group, (dist.ProcessGroup, Transport)):
        return group
    raise ConfigError(
        f"{what} got {group!r} as group; expected a process group this process is in, a one-dimensional DeviceMesh, a "
        "transport, or None for all ranks"
    )
