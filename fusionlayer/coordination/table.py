"""The operations of a rank that are under way, and those whose results nobody has fetched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .operation import Operation
from .requests import Item, Key

__all__ = ["OperationTable"]


class OperationTable:
    """Callers add operations and wait for them; whichever thread gets a response takes and finishes them."""

    def __init__(self) -> None:
        # Guards how operations end, and is notified then; the session has it guard, and notify of, told steps as well.
        # Never taken together with the session's lock. What is not under it is one access to a dictionary or set.
        self.changed = threading.Condition()
        self._unfetched: dict[int, Operation] = {}
        self._running: dict[int, Operation] = {}
        self._asked: set[Key] = set()
        self._handles = 0

    @property
    def unfetched(self) -> int:
        """Number of operations whose results have not been fetched."""
        return len(self._unfetched)

    def has(self, key: Key) -> bool:
        """Return whether an operation of that name is under way."""
        return key in self._asked

    def add(self, key: Key, *what: Any, **how: Any) -> Operation:
        """Return a new operation of the next handle; callers exclude each other."""
        self._handles += 1
        operation = Operation(self._handles, key, *what, **how)
        self._unfetched[operation.handle] = self._running[operation.handle] = operation
        self._asked.add(key)
        return operation

    def get(self, handle: int) -> Operation | None:
        """Return an operation whose result has not been fetched."""
        return self._unfetched.get(handle)

    def wait(self, operation: Operation) -> None:
        """Wait until an operation has ended; it counts as fetched then."""
        if not operation.done:
            with self.changed:
                while not operation.done:
                    self.changed.wait()
        self._unfetched.pop(operation.handle, None)

    def take(self, items: Sequence[Item]) -> list[Operation | None]:
        """Return the operations that a response is about; None where this rank has none."""
        return [None if item.handle is None else self._running.pop(item.handle, None) for item in items]

    def finish(self, operations: Sequence[Operation | None], error: Exception | None = None) -> None:
        """Let operations end, and their waiters go on."""
        with self.changed:
            for operation in operations:
                if operation is not None:
                    self._asked.discard(operation.key)
                    operation.finish(error)
            self.changed.notify_all()

    def fail_all(self, error: Exception | None) -> None:
        """Let everything fail that nobody has taken; nothing is added any more."""
        self.finish([self._running.pop(handle, None) for handle in list(self._running)], error)
