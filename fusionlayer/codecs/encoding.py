"""The arguments of an encode call that differ from call to call: random numbers and error feedback."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Encoding(NamedTuple):
    """The random numbers and the error feedback of values that are encoded.

    Attributes:
        seed: names a sequence of random numbers.
        offset: place of the first element in that sequence.
        residual: (n,) f32, added to the values first; it becomes the loss of encoding. None: no error feedback.
    """

    seed: int = 0
    offset: int = 0
    residual: Tensor | None = None

    def part(self, start: int, stop: int, offset: int) -> Encoding:
        """Return the ``Encoding`` of elements ``start`` to ``stop``, which begin ``offset`` numbers later."""
        return Encoding(
            self.seed, self.offset + offset, None if self.residual is None else piece(self.residual, start, stop)
        )


def piece(x: Tensor, start: int, stop: int) -> Tensor:
    """Return ``x[start:stop]``, or for all of it ``x`` itself, which is faster than slicing."""
    return x if stop - start == x.size(0) else x[start:stop]
