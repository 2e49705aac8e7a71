"""Lets Megatron-Core run without a GPU: what it asks of CUDA, the CPU does.

Megatron names CUDA as its device in many places. While ``on_cpu`` lasts, torch makes such tensors on the CPU, and
streams do nothing. Megatron's own code stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["on_cpu"]


class _Stream:
    """A stream of a device that does everything at once."""

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing."""

    def record_event(self) -> _Stream:
        """Return what can be waited for."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


class _CPUForCUDA(TorchFunctionMode):
    """Makes tensors on the CPU where a program asks for CUDA, and gives their types the names of CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple("cpu" if _is_cuda(each) else each for each in args)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")  # Megatron's optimizer compares these names
        return func(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it, Megatron-Core uses the CPU instead of a GPU, and compiles nothing; with a GPU nothing changes."""
    if torch.cuda.is_available():
        yield
        return
    stream = _Stream()
    instead = {
        "current_device": lambda: "cpu",
        "current_stream": lambda: stream,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
    }
    exchange = dist.all_to_all_single

    def exchange_rows(out: Tensor, x: Tensor, outgoing: Any = None, incoming: Any = None, **options: Any) -> Any:
        """Take tensors for numbers of rows: Megatron copies those of a GPU to the host, and leaves others."""
        names = ("output_split_sizes", "input_split_sizes")
        rows = [options.pop(name, given) for name, given in zip(names, (outgoing, incoming), strict=True)]
        return exchange(out, x, *(None if each is None else [int(n) for n in each] for each in rows), **options)

    torch.compiler.set_stance("force_eager")
    rows = mock.patch.object(dist, "all_to_all_single", exchange_rows)
    with mock.patch.multiple(torch.cuda, **instead), rows, _CPUForCUDA():
        yield


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
