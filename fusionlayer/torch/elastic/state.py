"""The state of a training run that outlives lost and added workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from .. import mpi_ops as ops
from ..basics import is_initialized, size


class HostsUpdatedInterrupt(RuntimeError):
    """Workers will be added or removed. ``run`` catches it and lets training continue with the new workers.

    Attributes:
        skip_sync: all remaining ranks have the same state, so nothing needs to be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers are to be added or removed")
        self.skip_sync = skip_sync


class CommitStore(Protocol):
    """A place for commits that outlives the process."""

    def keep(self, number: int, shared: Any, own: Any) -> None:
        """Keep commit ``number``: the part that is the same on all ranks, and this rank's own."""


class State:
    """Base of states. Subclasses implement save, restore and synchronize.

    To outlive a restart of the process, they also say how to hand the last save out and take it in (``export``,
    ``adopt``).

    Args:
        bcast_object: gives all ranks the object of rank 0.
        get_rank: returns this rank.

    Attributes:
        commits: number of the last commit; equal on ranks that have committed the same.
        keeper: keeps commits outside this process; None outside ``run`` or without a torchrun agent.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._reset_callbacks: list[Callable[[], None]] = []
        self.commits = 0
        self.keeper: CommitStore | None = None

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call ``callbacks`` each time workers have been added or removed, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a job that has restarted. ``run`` calls it before it synchronizes the state."""
        self._host_messages = SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that workers will be added or removed. A signal handler may call it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state from which training continues after a failure; then call ``check_host_updates``.

        A commit copies all of the state. Commit as often as repeating the lost work would cost more.

        Raises:
            HostsUpdatedInterrupt: workers are to come or to go; for ``run`` to handle.
        """
        self.save()
        self.keep()
        self.check_host_updates()

    def keep(self) -> None:
        """Number the last saved state as a commit, and store it where it outlives this process."""
        self.commits += 1
        parts = self.export()
        if self.keeper is not None and parts is not None:
            self.keeper.keep(self.commits, *parts)

    def check_host_updates(self) -> None:
        """Ask all ranks whether any of them was notified that workers will be added or removed. All ranks call it
        together.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if any has.
        """
        told = False
        while True:
            try:
                self._host_messages.get_nowait()
                told = True
            except Empty:
                break
        if is_initialized() and size() > 1:
            any_told = ops.allreduce(torch.tensor([int(told)], device="cpu"), name="elastic.hosts_updated", op=ops.Max)
            told = bool(any_told)
        if told:
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Save the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a job that has begun again; for subclasses."""

    def export(self) -> tuple[Any, Any] | None:
        """Return the last saved state: the common part of all ranks, and this rank's own. Both are pickled.

        None: the state cannot be handed out.
        """
        return None

    def adopt(self, shared: Any, own: list[Any]) -> None:
        """Import the result of ``export`` as the last saved state, and restore it.

        Args:
            shared: the part that is the same on all ranks.
            own: the own parts of the ranks that this one replaces: usually one, none on a new worker, several if ranks
                are gone.
        """
        raise NotImplementedError


class ObjectState(State):
    """Objects by name, such as ``epoch=0``, which become attributes; they are pickled to be sent.

    Args:
        bcast_object: gives all ranks the object of rank 0.
        get_rank: returns this rank.
        kwargs: names and first values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Save copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the attributes that were saved last."""
        self._set_attributes()

    def sync(self) -> None:
        """Give every rank the attributes that rank 0 has saved."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def export(self) -> tuple[Any, Any] | None:
        """Return the attributes that were saved last; nothing is a rank's own."""
        return {"objects": self._saved_state}, {}

    def adopt(self, shared: Any, own: list[Any]) -> None:
        """Import the result of ``export``."""
        self._saved_state = {**self._saved_state, **shared["objects"]}
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))
