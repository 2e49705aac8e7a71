"""The facts that ranks compare before they connect: their nodes, and settings that must be equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ..base.errors import PlanMismatch, TransportError
from ..launch.stores import gather

# Actions for facts that no setting decides.
_REMEDIES = {"sees_cuda": "make GPUs visible to every rank or to none: CUDA_VISIBLE_DEVICES, and the driver, decide"}


def gather_settings(
    store: dist.Store, rank: int, size: int, node: str, settings: Mapping[str, object]
) -> tuple[list[str], list[dict[str, object]]]:
    """Return node and settings of every rank, in rank order. All ranks call it together."""
    nodes, every = [], []
    for peer, text in enumerate(gather(store, "settings", rank, size, json.dumps([node, settings]))):
        try:
            name, theirs = json.loads(text)
            every.append({key: theirs[key] for key in settings})
            nodes.append(str(name))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise TransportError(
                f"what stands in the store as the settings of rank {peer} makes no sense: {text[:80]!r}; another "
                "program or version has written it",
                [peer],
            ) from None
    return nodes, every


def check_equal(rank: int, every: Sequence[Mapping[str, object]]) -> None:
    """Raise ``PlanMismatch`` if settings differ over ranks; all ranks do, since all know the same."""
    for name in every[0]:
        values = [settings[name] for settings in every]
        differ = [peer for peer, value in enumerate(values) if value != values[0]]
        if differ:
            shown = ", ".join(f"rank {peer}: {json.dumps(value)}" for peer, value in enumerate(values))
            raise PlanMismatch(
                f"setting {name} differs over ranks (this is rank {rank}): {differ} differ from rank 0 "
                f"({shown}); {_REMEDIES.get(name, 'give every rank the same setting')}",
                ranks=differ,
            )
