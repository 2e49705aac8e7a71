"""``Layout``: where the tensors of a group lie in the parts of all ranks; states that another number of ranks saved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError

_KEY = re.compile(r"rank (\d+) of (\d+)")


@dataclass(frozen=True)
class Layout:
    """Tensors in one flat tensor that is cut into a part of ``chunk`` elements for each rank.

    Attributes:
        numels: elements of each tensor.
        size: number of ranks.
        align: ``chunk`` is a multiple of it.
        whole: each tensor lies in one part, so one rank owns it. Tensors go, the largest first, to the rank that owns
            the fewest elements. False: parts are equally full, and a tensor may continue in the next one.
    """

    numels: tuple[int, ...]
    size: int
    align: int
    whole: bool = False

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """For each tensor, its owner and its position in the owner's part; not ``whole``: rank 0 and the position in
        all."""
        if not self.whole:
            return [(0, start) for start in accumulate(self.numels[:-1], initial=0)]
        loads, places = [0] * self.size, [(0, 0)] * len(self.numels)
        for i in sorted(range(len(self.numels)), key=lambda i: -self.numels[i]):
            owner = loads.index(min(loads))
            places[i] = owner, loads[owner]
            loads[owner] += self.numels[i]
        return places

    @cached_property
    def chunk(self) -> int:
        """The elements of a part."""
        ends = [start + n for (_, start), n in zip(self._places, self.numels, strict=True)]
        parts = self.align if self.whole else self.size * self.align
        return max(1, -(-max(ends) // parts)) * self.align

    @cached_property
    def slices(self) -> list[slice]:
        """The place of each tensor in the flat tensor."""
        starts = [owner * self.chunk + start for owner, start in self._places]
        return [slice(start, start + n) for start, n in zip(starts, self.numels, strict=True)]

    def filled(self, rank: int) -> int:
        """Return where the last element of a tensor ends in the part of ``rank``; padding follows."""
        first, stop = rank * self.chunk, (rank + 1) * self.chunk
        return max(0, max(min(int(place.stop), stop) for place in self.slices if place.start < stop) - first)

    def owned(self, rank: int) -> dict[int, slice]:
        """Return the tensors that lie in the part of ``rank`` as a whole, by number, with their places in the part."""
        first = rank * self.chunk
        inside = {i: slice(place.start - first, place.stop - first) for i, place in enumerate(self.slices)}
        return {i: place for i, place in inside.items() if place.start >= 0 and place.stop <= self.chunk}

    def moved(self, flat: Tensor, to: Layout) -> Tensor:
        """Return the values of ``flat``, which lie by this layout, by the layout ``to`` of the same tensors."""
        out = flat.new_zeros(to.size * to.chunk)
        for source, place in zip(self.slices, to.slices, strict=True):
            out[place] = flat[source]
        return out


def state_for(saved: Mapping[str, Any], rank: int, layouts: Sequence[Layout]) -> dict[str, Any]:
    """Return the state of ``rank``: its own, or its part of the states of all ranks of a job of another size.

    Error feedback is redistributed: its sum over all ranks stays the same.

    Raises:
        ConfigError: ``saved`` has neither.
    """
    size = layouts[0].size
    if (key := f"rank {rank} of {size}") in saved:
        own: dict[str, Any] = saved[key]
        return own
    places = sorted((int(found[2]), int(found[1])) for each in saved if (found := _KEY.fullmatch(str(each))))
    if not places or places != [(len(places), each) for each in range(len(places))]:
        raise ConfigError(
            f"got the state of {', '.join(map(str, saved)) or 'no rank'}; this is {key}: load what the same rank has "
            "saved, or of a job of another size what all its ranks have saved, in one mapping"
        )
    states = [saved[f"rank {each} of {len(places)}"] for each in range(len(places))]
    return _resharded(states, rank, layouts)


def _resharded(states: Sequence[Mapping[str, Any]], rank: int, layouts: Sequence[Layout]) -> dict[str, Any]:
    first = states[0]
    groups = first["optimizer"]["state"]
    inner: dict[int, dict[str, Any]] = {}
    weights, residuals = [], []
    for i, new in enumerate(layouts):
        old = replace(new, size=len(states))

        def part(of_ranks: list[Tensor], new: Layout = new, old: Layout = old) -> Tensor:
            if {len(each) for each in of_ranks} != {old.chunk}:
                raise ConfigError(
                    f"got the state of parts of {[len(each) for each in of_ranks]} elements, expected {old.chunk}: of "
                    "the same model and codecs"
                )
            return old.moved(torch.cat(of_ranks), new)[rank * new.chunk : (rank + 1) * new.chunk]

        weights.append(part([each["weights"][i] for each in states]))
        inner[i] = {
            key: part([each["optimizer"]["state"][i][key] for each in states])
            if isinstance(kept, Tensor) and kept.shape == first["weights"][i].shape
            else kept
            for key, kept in groups.get(i, {}).items()
        }
        owed = [each["residuals"][i] for each in states[rank :: new.size] if each.get("residuals")]
        # Gradients are summed and then divided by the number of ranks.
        residuals.append(old.moved(torch.stack(owed).sum(0) * (new.size / old.size), new) if owed else None)
    optimizer = {**first["optimizer"], "state": {i: state for i, state in inner.items() if state}}
    return {"step": first["step"], "weights": weights, "optimizer": optimizer, "residuals": residuals}
