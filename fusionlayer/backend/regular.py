"""Contiguous copies of tensors with irregular memory: codecs, gloo and NCCL read and write elements in memory order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import UsageError
from .passing import explained


class Copies:
    """The contiguous copies of one call's arguments.

    A tensor is irregular if it is strided or lazily conjugated or negated. Other tensors, sparse ones included, are
    passed on unchanged. Arguments are tensors and lists of tensors, nested in any way.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._inputs: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._outputs or self._inputs)

    def read(self, given: Any) -> Any:
        """Return ``given`` for a call that only reads it."""
        return self._each(given, self._copy)

    def write(self, given: Any) -> Any:
        """Return ``given`` for a call that overwrites it; ``restore`` copies the results back."""
        return self._each(given, lambda x: self._output(x, torch.empty_like))

    def update(self, given: Any) -> Any:
        """Return ``given`` for a call that reads and overwrites it; otherwise like ``write``."""
        return self._each(given, lambda x: self._output(x, torch.clone))

    def restore(self) -> None:
        """Copy results to where the caller wants them. The call must have ended."""
        # Unlike no_grad, inference mode also allows writes to tensors that were made in inference mode.
        with torch.inference_mode():
            for x, copy in self._outputs:
                x.copy_(copy)
        self._outputs.clear()
        self._inputs.clear()

    def _each(self, given: Any, irregular: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(given, Tensor):
            return [self._each(each, irregular) for each in given]
        return given if _is_regular(given) else irregular(given)

    def _copy(self, x: Tensor) -> Tensor:
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        self._inputs.append(copy)  # native backends do not keep a tensor alive while it is being sent
        return copy.resolve_conj().resolve_neg()

    def _output(self, x: Tensor, like: Callable[..., Tensor]) -> Tensor:
        if _overlaps(x):
            raise UsageError(
                f"{self._what}: an output of shape {tuple(x.shape)} and strides {x.stride()} has elements that share "
                "memory, so it cannot hold a result; pass a tensor with memory for every element, such as x.clone()"
            )
        copy = like(x.detach().resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        self._outputs.append((x, copy))
        return copy


Method = Callable[..., dist.Work]


def eager(method: Method) -> Method:
    """Keep the compiler out of a method of a group: DDP calls it within a compiled forward, and it cannot be traced.

    torch's own decorator imports the compiler, which takes seconds. Without the compiler no caller is compiled.
    """
    disabled = torch._disable_dynamo(method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> dist.Work:
        return (disabled if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return call


def in_place(method: Method) -> Method:
    """Give a method of a group, which overwrites its first argument, contiguous tensors."""

    @wraps(method)
    def call(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        copies = Copies(method.__name__)
        try:
            made = method(group, copies.update(tensors), *args, **kwargs)
        except RuntimeError as error:
            raise explained(method.__name__, error, tensors) from None
        work: dist.Work = group.passed(made, method.__name__, tensors)
        return group.after(work, copies, tensors) if copies else work

    return call


def into(method: Method) -> Method:
    """Give a method of a group, which reads its second argument and fills its first, contiguous tensors."""

    @wraps(method)
    def call(group: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        copies = Copies(method.__name__)
        try:
            made = method(group, copies.write(outputs), copies.read(inputs), *args, **kwargs)
        except RuntimeError as error:
            raise explained(method.__name__, error, [inputs, outputs]) from None
        work: dist.Work = group.passed(made, method.__name__, inputs)
        return group.after(work, copies, outputs) if copies else work

    return call


def _is_regular(x: Tensor) -> bool:
    return x.layout is not torch.strided or (x.is_contiguous() and not x.is_conj() and not x.is_neg())


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements share memory."""
    dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    span = 1  # elements from the first to the last one, in the dimensions so far
    for stride, size in dims:
        if not stride:
            return True
        if stride < span:
            break
        span += (size - 1) * stride
    else:
        return False
    # Dimensions interlock, as few views do: count the places.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places.unsqueeze(1) + torch.arange(size, device="cpu") * stride).flatten()
    return len(places.unique()) < len(places)
