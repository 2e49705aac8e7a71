"""What changes from one call that encodes to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Encoding"]


class Encoding(NamedTuple):
    """The random numbers and the error feedback of values that are encoded.

    Attributes:
        seed: names a sequence of random numbers.
        offset: number of the first element in it.
        residual: (n,) f32, added to the values first; it becomes what encoding lost. None: no error feedback.
    """

    seed: int = 0
    offset: int = 0
    residual: Tensor | None = None

    def part(self, start: int, stop: int, offset: int) -> Encoding:
        """Return that of the elements from ``start`` to ``stop``, which begin ``offset`` numbers later."""
        return Encoding(
            self.seed, self.offset + offset, None if self.residual is None else piece(self.residual, start, stop)
        )


def piece(x: Tensor, start: int, stop: int) -> Tensor:
    """Return ``x[start:stop]``; slicing takes longer than to see that it is all of ``x``."""
    return x if stop - start == x.size(0) else x[start:stop]
