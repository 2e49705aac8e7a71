"""Calls that pass to gloo: its errors, in the words of the program that made the call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..base.errors import ConfigError, FusionLayerError, TransportError
from ..process.outages import first_line
from .work import WrappedWork

_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_LATE = re.compile(r"[Tt]imed out waiting (\d+) ?ms")
_LOST = re.compile(r"connection (was )?(closed|reset)|broken pipe|caused pair closure|socket closed", re.IGNORECASE)
_SIZES = re.compile(r"op\.preamble\.length|op\.nbytes|preamble")
_PLACE = re.compile(r"^(\[rank\d+\]:)?\[[^]]*\.(cc|cpp|h|hpp):\d+\] *|ProcessGroup\w+::\w+: *")


class _GlooRefusal(ConfigError, RuntimeError):
    """A call that gloo refuses; torch raises a ``RuntimeError`` for it."""


def explained(call: str, error: RuntimeError, given: Any) -> RuntimeError:
    """Return the error that the program gets instead of gloo's; gloo's own if it is of another kind."""
    if isinstance(error, FusionLayerError):
        return error
    name, text = _NAMES.get(call, call), first_line(error)
    tensors = list(_each(given))
    what = f"{name} of {', '.join(str(tuple(x.shape)) for x in tensors[:4])}" if tensors else name
    if "Invalid scalar type" in text:
        return _GlooRefusal(
            f"{name} got a {tensors[0].dtype} tensor, which gloo cannot send; expected floats of 16 to 64 bits, int8, "
            "uint8, int32, int64 or bool: convert it, or where nothing is summed send x.view(torch.uint8)"
        )
    if late := _LATE.search(text):
        return TransportError(
            f"{what}: other ranks have not made this call within {int(late[1]) / 1000:g} s, the group's time-out; all "
            "ranks make the same calls in the same order: find the rank that does not, or raise timeout="
        )
    if _LOST.search(text):
        return TransportError(
            f"{what}: another rank has closed its connection, as a rank does that has failed or ended; its own error "
            "says why"
        )
    if _SIZES.search(text):
        return TransportError(
            f"{what}: another rank has sent a message of another size; all ranks make the same calls in the same "
            "order, with tensors of the same shape and type"
        )
    text = _PLACE.sub("", text).removeprefix("Check failed: ").rstrip(". ")
    return _GlooRefusal(f"{what}: {text}; correct the arguments of this call")


class PassedWork(WrappedWork):
    """The work of a call that gloo makes: ``wait`` raises errors in words of the caller."""

    def __init__(self, work: dist.Work, call: str, given: Any) -> None:
        super().__init__(work)
        self._call, self._given = call, given

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the call."""
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            raise explained(self._call, error, self._given) from None

    def get_future(self) -> Future[list[Tensor]]:
        """Return the future of gloo's own work."""
        future: Future[list[Tensor]] = self._work.get_future()
        return future

    def result(self) -> list[Tensor]:
        """Return the tensors that the call writes."""
        return self._work.result()


def _each(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Sequence):
        for each in given:
            yield from _each(each)
