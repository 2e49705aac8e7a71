"""Parts of tensors: the box of a shard, the parts that a follower takes, and those that a loader reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..base.errors import WireError
from .snapshot import Box, Shard, Snapshot

__all__ = ["Boxes", "Reads", "boxes_of", "cut", "fits", "join", "spread", "text_of", "within"]

Boxes = tuple[tuple[str, Box], ...]
"""Boxes by the names of their tensors, in the order of names; tensors that are missing are whole."""

_MOST_SIZE = 1 << 48


def within(x: Tensor, box: Box) -> Tensor:
    """Return the view of ``x`` that is in a box."""
    return x[tuple(slice(start, start + length) for start, length in box)]


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box lies within a tensor of this shape."""
    return len(box) == len(shape) and all(start + length <= n for (start, length), n in zip(box, shape, strict=True))


def cut(version: Snapshot, boxes: Boxes) -> Snapshot:
    """Return a version with only what lies in ``boxes``; where one does not fit its tensor, that stays whole."""
    asked = dict(boxes)
    made: dict[tuple[int, Box], Tensor] = {}
    tensors, shards = dict(version.tensors), dict(version.shards)
    for name, x in version.tensors.items():
        box, shard = asked.get(name), version.shards.get(name)
        if box is None or not fits(box, shard.shape if shard else x.shape):
            continue
        mine = box
        if shard:
            both = _common(box, shard.box)
            mine = _moved(both, shard.box)
            shards[name] = Shard(_moved(both, box), tuple(n for _, n in box))
        if (id(x), mine) not in made:
            made[id(x), mine] = within(x, mine).clone(memory_format=torch.contiguous_format)
        tensors[name] = made[id(x), mine]
    return Snapshot(version.run, version.version, tensors, shards, version.places)


def _common(a: Box, b: Box) -> Box:
    """Return the box that two boxes have in common, without elements where they are apart."""
    starts = [max(m, n) for (m, _), (n, _) in zip(a, b, strict=True)]
    ends = [min(sum(m), sum(n)) for m, n in zip(a, b, strict=True)]
    return tuple((start, max(0, end - start)) for start, end in zip(starts, ends, strict=True))


def _moved(box: Box, origin: Box) -> Box:
    """Return a box as it is counted from the start of another one; one without elements is anywhere."""
    if not all(n for _, n in box):
        return ((0, 0),) * len(box)
    return tuple((start - a, n) for (start, n), (a, _) in zip(box, origin, strict=True))


def join(parts: Sequence[Snapshot]) -> tuple[Snapshot, list[Snapshot]]:
    """Return the version of which ranks have published ``parts``, rank 0 first; and these parts as views of it.

    Raises:
        WireError: they are not all of it.
    """
    first = parts[0]
    made: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    views: list[dict[str, Tensor]] = [{} for _ in parts]
    for name, x in first.tensors.items():
        shard = first.shards.get(name)
        whole = made.get(id(x))
        if whole is None:
            whole = made[id(x)] = torch.empty(shard.shape, dtype=x.dtype, device="cpu") if shard else x
        tensors[name] = whole
        left = whole.numel() if shard else 0
        for part, seen in zip(parts, views, strict=True):
            its = part.shards.get(name)
            if shard is None or its is None or name not in part.tensors:
                continue
            piece = part.tensors[name]
            if its.shape != shard.shape or piece.dtype != x.dtype or not fits(its.box, its.shape):
                raise WireError(f"ranks have published parts of {name!r} that do not fit each other")
            view = within(whole, its.box).copy_(piece)
            left -= piece.numel()
            if view.is_contiguous():
                seen[name] = view
        if left:
            raise WireError(f"ranks have published {left} elements too few or too many of {name!r}")
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()[:32]
    version = Snapshot(first.run, first.version, tensors)
    version.__dict__["digest"] = digest
    return version, [_as_views(part, seen) for part, seen in zip(parts, views, strict=True)]


def _as_views(part: Snapshot, views: Mapping[str, Tensor]) -> Snapshot:
    """Return a part whose tensors are views of the joined ones, where they can be, so that they take no memory."""
    made = Snapshot(part.run, part.version, {**part.tensors, **views}, part.shards, part.places)
    made.__dict__.update({name: part.__dict__[name] for name in ("digests", "digest") if name in part.__dict__})
    return made


def spread(x: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape with ``x`` in a box; what is around it has no meaning, and takes no memory."""
    if x.shape == torch.Size(shape):
        return x
    whole = torch.empty(shape, dtype=x.dtype, device="cpu")
    within(whole, box).copy_(x)
    return whole


def text_of(boxes: Boxes) -> bytes:
    """Return ``boxes`` as a message."""
    return json.dumps(boxes, separators=(",", ":")).encode()


def boxes_of(message: Any) -> Boxes:
    """Return the boxes of a message, or of what JSON has made of it.

    Raises:
        WireError: there are none.
    """
    try:
        given = json.loads(message) if isinstance(message, (bytes, bytearray)) else message
        found = tuple((name, tuple((start, length) for start, length in box)) for name, box in given)
        numbers = [n for _, box in found for pair in box for n in pair]
        if all(isinstance(name, str) for name, _ in found) and all(
            type(n) is int and 0 <= n <= _MOST_SIZE for n in numbers
        ):
            return found
    except (TypeError, ValueError, RecursionError):
        pass
    raise WireError(f"parts of tensors are described as {message!r:.100}, which makes no sense")


class Reads(TorchDispatchMode):
    """Records, while it is entered, which box of each tensor any operation reads; views read nothing.

    Args:
        tensors: contiguous, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[str, Box] = {}
        self._shapes = {name: x.shape for name, x in tensors.items()}
        self._names: dict[int, list[tuple[str, Tensor]]] = {}
        for name, x in tensors.items():
            if x.numel():
                self._names.setdefault(x.untyped_storage().data_ptr(), []).append((name, x))

    def boxes(self) -> dict[str, Box]:
        """Return the smallest box of what was read, empty where nothing was, of each tensor that was not read whole."""
        found = {name: self._found.get(name, ((0, 0),) * len(shape)) for name, shape in self._shapes.items()}
        return {name: box for name, box in found.items() if box != tuple((0, n) for n in self._shapes[name])}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and x.device.type == "cpu" and x.numel():
                    for name, whole in self._names.get(x.untyped_storage().data_ptr(), ()):
                        self._add(name, _box(x, whole))
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, box: Box) -> None:
        before = self._found.get(name, box)
        starts = [min(a, b) for (a, _), (b, _) in zip(before, box, strict=True)]
        ends = [max(a + m, b + n) for (a, m), (b, n) in zip(before, box, strict=True)]
        self._found[name] = tuple((start, end - start) for start, end in zip(starts, ends, strict=True))


def _box(view: Tensor, whole: Tensor) -> Box:
    """Return the box of ``whole`` that a view of it covers; all of it where that is no box."""
    everything = tuple((0, n) for n in whole.shape)
    if view.dtype != whole.dtype:
        return everything
    left = int(view.storage_offset()) - int(whole.storage_offset())
    lengths = {stride: n for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1}
    box = []
    for n, stride in _dimensions(whole):
        start, left = divmod(left, stride) if n > 1 else (0, left)
        box.append((start, lengths.pop(stride, 1) if n > 1 else 1))
    found = tuple(box)
    return found if not lengths and not left and fits(found, whole.shape) else everything


def _dimensions(x: Tensor) -> Iterator[tuple[int, int]]:
    return zip(x.shape, x.stride(), strict=True)
