"""Gradients as they were submitted, with evidence of any later change."""

from __future__ import annotations

from torch import Tensor

from ..base.errors import UsageError

Snapshot = tuple[Tensor, int, int]
"""A gradient, its version, which each change of its values raises, and the address of its memory."""


def snapshot(gradient: Tensor) -> Snapshot:
    """Return the present gradient."""
    return gradient, gradient._version, gradient.data_ptr() if type(gradient) is Tensor else 0


def is_still(before: Snapshot, gradient: Tensor | None) -> bool:
    """Return whether ``gradient`` is the one of the snapshot, unchanged."""
    return gradient is before[0] and snapshot(gradient)[1:] == before[1:]


def changed_gradient(name: str | None) -> UsageError:
    """Return the error for a gradient that is not what was submitted."""
    return UsageError(
        f"gradient {name!r} was changed or replaced while it was being reduced: call synchronize() before you clip, "
        "scale, clear or replace gradients, then step() within skip_synchronize(); a hook that changes a parameter's "
        "gradient has to be registered before the optimizer is wrapped"
    )
