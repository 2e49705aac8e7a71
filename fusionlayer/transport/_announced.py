"""Messages whose length another rank has announced. Memory is allocated as bytes come, not by the announced length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..base.errors import WireError

_STEP_BYTES = 16 << 20


def pass_on(data: bytes, move: Callable[[Tensor], object]) -> None:
    """Send ``data`` in the steps in which ``take_in`` receives it."""
    for start in range(0, len(data), _STEP_BYTES):
        move(torch.frombuffer(bytearray(data[start : start + _STEP_BYTES]), dtype=torch.uint8))


def take_in(nbytes: int, move: Callable[[Tensor], object]) -> bytearray:
    """Return ``nbytes`` that come in steps of 16 MiB."""
    if nbytes < 0:
        raise WireError(f"a message of {nbytes} bytes is announced, which makes no sense")
    data = bytearray()
    while len(data) < nbytes:
        piece = torch.empty(min(nbytes - len(data), _STEP_BYTES), dtype=torch.uint8, device="cpu")
        move(piece)
        data += piece.numpy().tobytes()
    return data
