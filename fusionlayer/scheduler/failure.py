"""Errors of the communication threads with the step, bucket and tensors that they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base.errors import FusionLayerError, TransportError
from ..base.plan import Bucket, TensorInfo
from ..transport import Transport

__all__ = ["located", "tensors_that_differ"]

_SHOWN = 3
_MOST_LIST_BYTES = 64 << 20


@contextmanager
def located(step: int, index: int, bucket: Bucket, transport: Transport) -> Iterator[None]:
    """Raise every error of the ``with`` block again, with step, bucket and tensors in its message.

    The new message has all of the old one, so a traceback shows the new error alone.
    """
    try:
        yield
    except FusionLayerError as error:
        names = bucket.names
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        message = f"step {step}, bucket {index} ({shown}): {error}"
        if isinstance(error, TransportError):
            sequence = transport.sequence if error.sequence is None else error.sequence
            raise TransportError(message, error.ranks, index, names, sequence) from None
        told = type(error)(message)
        vars(told).update(vars(error))
        raise told from None


def tensors_that_differ(tensors: Iterable[TensorInfo], transport: Transport) -> str:
    """Return a clause that names the tensors which not all ranks have, or have with the same size and type.

    All ranks call it together, after their digests have been found to differ. It is empty if all tensors are equal, or
    if a rank cannot tell its own.
    """
    mine = json.dumps([(t.name, t.numel, t.dtype) for t in tensors]).encode()
    try:
        length = torch.tensor([len(mine)], device="cpu")
        transport.all_reduce_max(length)
        if int(length) > _MOST_LIST_BYTES:
            return ""
        padded = torch.frombuffer(bytearray(mine.ljust(int(length))), dtype=torch.uint8)
        every = torch.empty(transport.size, padded.numel(), dtype=torch.uint8, device="cpu")
        transport.all_gather(padded, every)
        lists: list[set[Any]] = [{tuple(tensor) for tensor in json.loads(bytes(row.tolist()))} for row in every]
    except (FusionLayerError, ValueError):
        return ""  # a rank of another version, perhaps; that the digests differ is known
    differ = sorted({tensor[0] for tensor in set.union(*lists) - set.intersection(*lists)})
    if not differ:
        return ""
    shown = []
    for name in differ[:_SHOWN]:
        have = [rank for rank, tensors in enumerate(lists) if any(name == other for other, *_ in tensors)]
        where = f"only on ranks {have}" if len(have) < len(lists) else "of several sizes or types"
        shown.append(f"{name!r} {where}")
    more = f" and {len(differ) - _SHOWN} more" if differ[_SHOWN:] else ""
    return (
        f"; tensors that differ: {', '.join(shown)}{more}; freeze, unfreeze and add parameters on all ranks in one step"
    )
