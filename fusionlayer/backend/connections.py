"""Opens the connections of a group's compressed calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..base import config
from ..transport import Transport
from ..transport.c10d import C10dTransport
from ..transport.links.socket_options import chosen


def connect(
    ranks: Sequence[int],
    name: str,
    timeout: timedelta,
    settings: config.Config,
    nccl: bool,
    alone: tuple[dist.Store, int] | None,
) -> Transport:
    """Return the transport of a group's compressed calls. The thread that runs a call calls it."""
    rank = dist.get_rank() if alone is None else alone[1]
    each = settings.ranks_per_node
    return C10dTransport.among(
        ranks if alone is None else range(len(ranks)),
        name,
        timeout.total_seconds(),
        stall_warning=settings.stall_warning,
        node=None if each is None else f"node {rank // each}",
        checksum=settings.checksum,
        sockets=chosen(settings),
        peer_bytes=settings.peer_memory_mb << 20,
        nccl=nccl,
        place=alone,
    )
