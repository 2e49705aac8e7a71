"""CUDA graphs: refused captures, and queries of events while another thread captures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..base.errors import UsageError

DRIVER = "libcuda.so.1"
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def refuse_capture(what: str) -> None:
    """Raise ``UsageError`` if the current stream is captured into a CUDA graph; ``what`` names the call that would be
    part of it.

    A graph repeats what the host did once. An exchange has a number, a seed and a time-out that change each time, and
    its agreements are sent on the host.
    """
    try:
        is_captured = torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return  # the device has failed, and the next call reports it
    if is_captured:
        raise UsageError(
            f"{what} while a CUDA graph is captured, and a graph cannot hold messages between ranks; capture forward "
            "and backward with torch.cuda.make_graphed_callables(), or take this call out of the capture"
        )


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread ask for the state of events without harm to a capture of another thread.

    By default a capture fails if any thread of the process makes such a call.
    """
    exchange = ctypes.CDLL(DRIVER).cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
