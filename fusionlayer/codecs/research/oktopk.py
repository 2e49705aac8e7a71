"""``oktopk``: the largest elements, by a threshold that serves many sums, for the collective of the same name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...base.errors import ConfigError
from ..base import Codec
from ..capabilities import PartsCodec
from ..sparse.sparsifier import ThresholdSparsifier
from ..state import Part

BALANCE = 2.0
"""Times their mean number of sums that a rank may have before sums are dealt out evenly."""


@dataclass(frozen=True)
class OkTopk(PartsCodec, ThresholdSparsifier, name="oktopk"):
    """Ok-Topk: the elements that reach a threshold, which serves many sums (Li, Hoefler, PPoPP 2022).

    Its default collective ``oktopk`` searches three things only now and then: this rank's threshold and that of sums,
    each that of the k largest, and the regions that ranks sum. They are kept for each bucket, and checkpoints have
    them. In other collectives the codec is ``topk`` with a threshold that serves many gradients.

    A threshold that finds less than k / 4 elements or more than k * slack is found again at once.

    Attributes:
        slack: most elements that a rank sends, in multiples of k. Only elements found by a threshold are sent.
        reuse: number of sums that use one threshold (the paper's tau').
        tau: number of sums that use the same regions.
        balance: if a rank has more than this many times the mean number of selected sums, ranks distribute them evenly
            before they send them to all. Up to 2, no rank sends more than the paper's 6 k (size - 1) / size words.
        parts: the tensors of the bucket, with their kept state; None: nothing is kept.
    """

    collective: ClassVar[str | None] = "oktopk"

    slack: float = 2.0
    reuse: int = 32
    tau: int = 64
    balance: float = BALANCE
    parts: tuple[Part, ...] | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.tau) is not int or self.tau < 1:
            raise ConfigError(f"oktopk codec: tau={self.tau!r}; expected at least 1 sum")
        if isinstance(self.balance, bool) or not isinstance(self.balance, int | float):
            raise ConfigError(f"oktopk codec: balance={self.balance!r}; expected a factor of at least 1")
        if not 1 <= self.balance < math.inf:
            raise ConfigError(f"oktopk codec: balance={self.balance!r}; expected a factor of at least 1")

    def for_parts(self, parts: Sequence[Part]) -> Codec:
        return replace(self, parts=tuple(parts))
