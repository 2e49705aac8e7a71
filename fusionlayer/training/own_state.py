"""The part of a saved state that belongs to one rank: error feedback, codec state, local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError


def has_own(saved: Mapping[str, Any]) -> bool:
    """Return whether ``saved`` holds values that differ over ranks, and not only a step."""
    memory = any(saved.get(key) for key in ("residuals", "packed", "tensors", "numbers"))
    return memory or bool(saved.get("local", {}).get("anchors"))


def check_place(saved: Mapping[str, Any], rank: int, size: int, what: str) -> None:
    """Raise ``ConfigError`` if ``saved`` holds values of another rank than ``rank`` of ``size``."""
    if "rank" in saved and has_own(saved) and (saved["rank"], saved["size"]) != (rank, size):
        raise ConfigError(
            f"{what}: got the state of rank {saved['rank']} of {saved['size']}, this is rank {rank} of {size}; error "
            "feedback and local steps belong to one rank: save state_dict() on every rank and load the same rank's, "
            "or call fl.checkpoint.save_ranks and load_ranks, which also load onto another number of ranks. To go on "
            'without them, drop all keys but "step" and "sent" from fusionlayer\'s state'
        )
