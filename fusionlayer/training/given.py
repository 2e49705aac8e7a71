"""Gradients as they were handed over to be reduced, by which it shows if somebody has changed them since."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Given"]


class Given(NamedTuple):
    """A gradient with its version, which each change of its values raises, and the place of its memory."""

    gradient: Tensor
    version: int
    place: int

    @classmethod
    def of(cls, gradient: Tensor) -> Given:
        """Return a gradient as it is now."""
        return cls(gradient, gradient._version, gradient.data_ptr() if type(gradient) is Tensor else 0)

    def is_still(self, gradient: Tensor | None) -> bool:
        """Return whether ``gradient`` is this one, unchanged."""
        return gradient is self.gradient and Given.of(gradient)[1:] == self[1:]

    def is_next_of(self, gradient: Tensor | None) -> bool:
        """Return whether ``gradient`` is this one, changed once since."""
        return gradient is self.gradient and gradient._version == self.version + 1
