"""Seeds made from numbers alone, such as step, bucket, rank and phase: the same in every process."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """Return a 64-bit seed, mixed from ``numbers`` (any integers) in their order by the SplitMix64 finaliser."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
