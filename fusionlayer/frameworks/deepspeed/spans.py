"""Finds which parameters' gradients a tensor of DeepSpeed consists of, from its place in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GradientSpan:
    """Elements ``start`` to ``stop`` of a gradient, which lie in some tensor from element ``offset`` on."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def key(self) -> str:
        """A name for these elements, the same in every step."""
        return f"{self.name}[{self.start}:{self.stop}]"


class Spans:
    """The places of gradients: in memory of their own, or one after the other in a buffer."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[tuple[int, int, str]]] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Note where the gradient of ``name`` is: one dense range of a storage."""
        self._note(gradient, [(name, gradient.numel())])

    def add_run(self, buffer: Tensor, gradients: Iterable[tuple[str, int]]) -> None:
        """Note that ``buffer`` holds gradients of these names and numbers of elements, without gaps."""
        self._note(buffer, gradients)

    def parts(self, tensor: Tensor) -> Iterator[GradientSpan]:
        """Yield the gradients' spans in ``tensor``, in order; elements that were never noted are in no span."""
        known = self._by_storage.get(tensor.untyped_storage().data_ptr(), [])
        first = int(tensor.storage_offset())
        last = first + tensor.numel()
        for start, stop, name in known[max(0, bisect_right(known, (first,)) - 1) :]:
            if start >= last:
                return
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield GradientSpan(name, low - start, high - start, low - first)

    def _note(self, tensor: Tensor, gradients: Iterable[tuple[str, int]]) -> None:
        known = self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
        place = int(tensor.storage_offset())
        for name, numel in gradients:
            known.append((place, place + numel, name))
            place += numel
        known.sort()
