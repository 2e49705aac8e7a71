"""Chooses the codec for each call of one process group, as its policy says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs import Codec
from ..native.wire import DTYPE_CODES
from . import hints
from .policy import CallPolicy

_MOST_SIZES = 4096


@dataclass(frozen=True)
class CallChoice:
    """A codec, and the collective that the rule names for it; None if it names none."""

    codec: Codec
    algorithm: str | None


class CallChoices:
    """Finds the rule for a call. Equal calls get the same choice on all ranks of a group."""

    def __init__(
        self,
        policy: CallPolicy,
        names: Sequence[str],
        size: int,
        *,
        devices: frozenset[str],
    ) -> None:
        own = [rule for rule in policy.rules if size > 1 and rule.is_for(*names)]
        self._rules = [
            (rule, None if rule.passes else CallChoice(rule.make_codec().bare, rule.algorithm)) for rule in own
        ]
        self._threshold = policy.min_bytes
        self._size = size
        self._devices = devices
        self._known: dict[tuple[str, torch.dtype, str, int], CallChoice | None] = {}

    def of(self, op: str, tensors: Sequence[Tensor]) -> CallChoice | None:
        """Return the choice for a call whose total size is that of ``tensors``; None if the call passes."""
        if not self._fit(tensors):
            return None
        x = tensors[0]
        return self._of_size(op, x.dtype, x.device.type, sum(y.numel() for y in tensors) * x.element_size())

    def of_pairs(self, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[dict[int, Codec], list[Codec]] | None:
        """Return the codecs of an all_to_all; None if no part is compressed.

        Sizes do not decide whether all of it passes: they differ over ranks, and ranks must agree on that.
        """
        if not self._fit([*inputs, *outs]) or inputs[0].device.type not in self._devices:
            return None
        x = inputs[0]
        concerned = [choice for rule, choice in self._rules if choice and rule.concerns("all_to_all", x.dtype)]
        if not concerned:
            return None
        found: dict[int, Codec] = {}
        for nbytes in {y.numel() * y.element_size() for y in (*inputs, *outs)}:
            choice = self._of_size("all_to_all", x.dtype, x.device.type, nbytes * self._size)
            if choice is not None:
                found[nbytes] = choice.codec
        return found, list(dict.fromkeys(choice.codec for choice in concerned if choice.codec.zips))

    def _fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether any rule can apply to such tensors."""
        if not self._rules or not tensors or hints.current().plain:
            return False
        x = tensors[0]
        return x.dtype in DTYPE_CODES and all(
            y.dtype == x.dtype and y.device == x.device and y.layout is torch.strided for y in tensors
        )

    def _of_size(self, op: str, dtype: torch.dtype, device: str, nbytes: int) -> CallChoice | None:
        key = op, dtype, device, nbytes
        if key not in self._known:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[key] = self._look_up(*key)
        return self._known[key]

    def _look_up(self, op: str, dtype: torch.dtype, device: str, nbytes: int) -> CallChoice | None:
        for rule, choice in self._rules if nbytes else ():
            if rule.concerns(op, dtype) and rule.spans(nbytes, self._threshold):
                return choice if device in self._devices else None
        return None
