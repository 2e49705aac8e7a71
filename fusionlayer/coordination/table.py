"""The operations of a rank that are in flight, or whose results have not been fetched yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .operation import Operation
from .requests import Item, Key


class OperationTable:
    """The operations of one session.

    Callers' threads add operations and wait for them. The thread that gets a response takes and finishes them: the
    communication thread, and on rank 0 also the threads of the coordinator.
    """

    def __init__(self) -> None:
        # Guards the end of operations, and is notified then. The session also uses it for announced steps. Never
        # taken together with the session's lock. Accesses without it are single operations on a dictionary or set.
        self.changed = threading.Condition()
        self._unfetched: dict[int, Operation] = {}
        self._running: dict[int, Operation] = {}
        self._asked: set[Key] = set()
        self._handles = 0

    @property
    def unfetched(self) -> int:
        """Number of operations whose results have not been fetched."""
        return len(self._unfetched)

    @property
    def running(self) -> int:
        """Number of operations that no response has taken."""
        return len(self._running)

    def has(self, key: Key) -> bool:
        """Return whether an operation with that key is in flight."""
        return key in self._asked

    def add(self, key: Key, *what: Any, **how: Any) -> Operation:
        """Return a new operation with the next handle. Calls must exclude each other: the session's lock is held."""
        self._handles += 1
        operation = Operation(self._handles, key, *what, **how)
        self._unfetched[operation.handle] = self._running[operation.handle] = operation
        self._asked.add(key)
        return operation

    def get(self, handle: int) -> Operation | None:
        """Return an operation whose result has not been fetched; None if there is none with this handle."""
        return self._unfetched.get(handle)

    def ends_within(self, operation: Operation, seconds: float) -> bool:
        """Wait this long for an operation; return whether it has ended."""
        with self.changed:
            return self.changed.wait_for(lambda: operation.done, seconds)

    def wait(self, operation: Operation) -> None:
        """Wait until an operation has ended. It counts as fetched from then on."""
        if not operation.done:
            with self.changed:
                while not operation.done:
                    self.changed.wait()
        self._unfetched.pop(operation.handle, None)

    def take(self, items: Sequence[Item]) -> list[Operation | None]:
        """Remove and return the running operations of a response; None where this rank has none.

        Each is returned once, so only one thread finishes it.
        """
        return [None if item.handle is None else self._running.pop(item.handle, None) for item in items]

    def finish(self, operations: Sequence[Operation | None], error: Exception | None = None) -> None:
        """Mark operations as ended and wake the threads that wait for them. Results must be in place before."""
        with self.changed:
            for operation in operations:
                if operation is not None:
                    self._asked.discard(operation.key)
                    operation.finish(error)
            self.changed.notify_all()

    def fail_all(self, error: Exception | None) -> None:
        """Make all running operations fail that no response has taken. No operation may be added any more."""
        self.finish([self._running.pop(handle, None) for handle in list(self._running)], error)
