"""Error feedback: what codecs lost of each parameter's gradient, to be sent with the next one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..plan import Bucket

__all__ = ["Memory"]


class Memory:
    """One f32 residual for each parameter, keyed by its name, never by its bucket: plans may change.

    For any sequence of steps, what was sent plus the residuals of all ranks is what was given, up to f32 rounding.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    def flat(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Return the residual of a whole bucket, (numel,) f32, and let its names refer into it from now on.

        Residuals that the names had before are carried over.
        """
        flat = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for slot in bucket.slots:
            view = flat[slot.offset : slot.offset + slot.numel]
            if slot.name in self._residuals:
                view.copy_(self._residuals[slot.name])
            self._residuals[slot.name] = view
        return flat

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of every residual, (numel,) f32 each, by parameter name."""
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over residuals that ``state_dict`` returned; parameters it does not name start from zero."""
        for name, residual in self._residuals.items():
            if name not in state:
                residual.zero_()
        for name, saved in state.items():
            if name in self._residuals:
                self._residuals[name].copy_(saved.reshape(-1))
            else:
                self._residuals[name] = saved.detach().to(torch.float32, copy=True).reshape(-1)
