"""An operation of this rank, from the call until its result has been fetched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base.errors import again
from ..collectives import Scaling
from ..transport import Transport
from .requests import Key, Signature

Reduce = Callable[[Tensor, Transport, Scaling], None]
"""Replaces a contiguous tensor by its scaled reduction over ranks. The communication thread calls it."""


@dataclass(eq=False, slots=True)
class Operation:
    """One rank's input to an operation, and its result.

    Attributes:
        handle: the caller's number for it.
        key: the common part of all ranks' requests for it.
        label: readable name, shown in timelines.
        signature: the part that must be equal on all ranks.
        tensors: this rank's input.
        outputs: tensors for the results; None until they are made, if the caller gave none.
        reduce: used instead of the reduction that the signature names.
        splits: rows of the tensor for each rank.
        deliver: makes the caller's result.
        check: raises an error if the caller must not get the result; called once, when the caller sees the end.
        result: the result, for most operations a list of tensors.
        error: the error, if the operation failed.
        submitted: time of the call, in nanoseconds of ``perf_counter_ns``.
        done: whether the operation has ended, with a result or an error.
        ready: CUDA event after which the tensors may be read.
        finished: CUDA event after which the results may be read.
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
    check: Callable[[], object] | None = None
    result: Any = None
    error: Exception | None = None
    submitted: int = field(default_factory=time.perf_counter_ns)
    done: bool = False
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Mark the operation as ended, and drop its input tensors so that their memory can be freed."""
        self.error = error
        self.tensors = ()
        self.done = True

    def check_once(self) -> None:
        """Call ``check``, if the operation has not failed. Later calls do nothing: the caller may use the result."""
        check, self.check = self.check, None
        if check is not None and self.error is None:
            check()

    def fetch(self) -> Any:
        """Return the result of an ended operation for use on the current stream, or raise its error."""
        if self.error is not None:
            raise again(self.error)
        self.check_once()
        if self.finished is not None:
            stream = torch.cuda.current_stream(self.finished.device)
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
    """Return the signature of an operation. It is cached, so that equal signatures are mostly one object."""
    where = "cpu" if device is None else device.type
    names = tuple(DTYPES[dtype] for dtype in dtypes)
    return Signature(kind, process_set, names, tuple(tuple(shape) for shape in shapes), where, *how)
