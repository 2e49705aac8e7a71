"""Ranks and sizes of Ray Train's workers. Used where its trainer has set no variables.

TorchTrainer makes torch's process group. Other trainers, DataParallelTrainer among them, set nothing: only Ray itself
knows which worker a process is.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from typing import Any

from ..base.errors import ConfigError, TransportError
from ..process.bounded import Overdue, bounded
from .meeting import Board


def find_worker() -> tuple[int, int, int, int] | None:
    """Return rank, size, local rank and local size of this worker; None where Ray Train knows of no other worker.

    Ray is asked only where the program has imported it.
    """
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = train.get_context()
            size = context.get_world_size()
        except (RuntimeError, DeprecationWarning):  # the program that starts workers, a trial of Ray Tune
            return None
    if not size or size == 1:  # Ray Train 1 says 1 outside of workers, too
        return None
    return context.get_world_rank(), size, context.get_local_rank(), context.get_local_world_size()


class RayBoard(Board):
    """The value that rank 0 broadcasts to the other workers of its trainer. Each worker must read it."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.host = str(importlib.import_module("ray.util").get_node_ip_address())

    def write(self, text: str) -> None:
        self._exchange(text)

    def look(self) -> str | None:
        return self._exchange(None)

    def _exchange(self, address: str | None) -> str:
        try:
            tell = importlib.import_module("ray.train.collective").broadcast_from_rank_zero
            end = time.monotonic() + self._timeout
            return str(bounded(lambda: tell(address), end, name="workers of Ray"))
        except Overdue:
            raise TransportError(
                f"not all workers of Ray have called fusionlayer.init() within {self._timeout:g} s; each of them must",
                [],
            ) from None
        except (ImportError, RuntimeError):  # Ray Train 1, which has no such call
            raise ConfigError(
                "this trainer of Ray gives its workers no address to meet at: give it backend_config=TorchConfig() of "
                "ray.train.torch, or take TorchTrainer"
            ) from None
