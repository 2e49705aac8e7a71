"""An operation of this rank, from the call until its result is fetched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..collectives import Scaling
from ..transport import Transport
from .requests import Key, Signature

__all__ = ["DTYPES", "Operation", "Reduce", "again", "signature_of"]

Reduce = Callable[[Tensor, Transport, Scaling], None]
"""Replaces a contiguous tensor by its reduction over ranks, scaled; runs on the communication thread."""


@dataclass(eq=False, slots=True)
class Operation:
    """What one rank gives to an operation and gets from it.

    Attributes:
        handle: by which the caller knows it.
        key: by which the ranks know it; its name is shown in timelines.
        label: name, readable.
        signature: what the ranks agree on.
        tensors: what this rank gives.
        outputs: where results go; None where their size is known only later, and until then.
        reduce: in place of the reduction that the signature names.
        splits: rows of the tensor for each rank.
        deliver: turns results into what the caller gets.
        result: of the operation, a list of tensors for most.
        error: or why there is none.
        done: whether there is one or the other.
    """

    handle: int
    key: Key
    label: str
    signature: Signature
    tensors: Sequence[Tensor]
    outputs: Sequence[Tensor] | None = None
    reduce: Reduce | None = None
    splits: tuple[int, ...] = ()
    deliver: Callable[[Any], Any] | None = None
    result: Any = None
    error: Exception | None = None
    submitted: int = field(default_factory=time.perf_counter_ns)
    done: bool = False
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Note the end; the operation holds on to nothing that it was given."""
        self.error = error
        self.tensors = ()
        self.done = True

    def fetch(self) -> Any:
        """Return the result of an operation that has ended, to be used on the current stream, or raise its error."""
        if self.error is not None:
            raise again(self.error)
        if self.finished is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.finished)
            for x in self.result if isinstance(self.result, (list, tuple)) else ():
                if isinstance(x, Tensor):
                    x.record_stream(stream)
        return self.result if self.deliver is None else self.deliver(self.result)


DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


@lru_cache(maxsize=4096)
def signature_of(
    kind: str,
    process_set: int,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    device: torch.device | None,
    *how: Any,
) -> Signature:
    """Return the signature of what is asked for again and again; equal ones are one object."""
    where = "cpu" if device is None else device.type
    names = tuple(DTYPES[dtype] for dtype in dtypes)
    return Signature(kind, process_set, names, tuple(tuple(shape) for shape in shapes), where, *how)


def again(error: Exception) -> Exception:
    """Return an error like the one that was raised, for another thread to raise."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    copy.__cause__ = error
    return copy
