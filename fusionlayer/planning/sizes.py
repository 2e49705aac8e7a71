"""How much a profile measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Which sizes are measured, and how often.

    Attributes:
        elements: sizes of tensors that are encoded, and of buckets that are packed.
        nbytes: sizes of transfers.
        steps: number of measured steps of the model; a quarter as many precede them.
        repeats: calls for each size; their median counts.
    """

    elements: tuple[int, ...] = tuple(4**exponent for exponent in range(5, 12))
    nbytes: tuple[int, ...] = tuple(4**exponent for exponent in range(5, 12))
    steps: int = 20
    repeats: int = 11
