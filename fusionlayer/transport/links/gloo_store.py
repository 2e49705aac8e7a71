"""The store by which gloo connects. gloo takes what stands there for addresses, and crashes where it is none."""

from __future__ import annotations

import struct
from datetime import timedelta

import torch.distributed as dist

from ...base.errors import TransportError
from ...launch.stores import WrappedStore

__all__ = ["GlooStore"]

_LENGTH = struct.Struct("<Q")


class GlooStore(WrappedStore):
    """A store that refuses what no gloo has written: its parts have other lengths than in what this rank writes.

    A rank writes its host's name and its address, each behind a length, and a number for each rank. Where this rank's
    gloo writes something else, it is another version, and everything passes.

    Args:
        store: where the values are. Keep this object as long as gloo has it.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__(store)
        self._size = size
        self._own: int | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        data = value.encode() if isinstance(value, str) else value
        self._own = self._address_bytes(data)
        self._store.set(key, data)  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            TransportError: gloo has not written it.
        """
        value = self._store.get(key)
        if self._own is not None and self._address_bytes(value) != self._own:
            raise TransportError(f"{key!r} in the store is no address of gloo: another program has written it")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._store.wait(keys)

    def _address_bytes(self, value: bytes) -> int | None:
        """Return how many bytes an address takes in a value of gloo; None if the value has another form."""
        try:
            (name,) = _LENGTH.unpack_from(value)
            (address,) = _LENGTH.unpack_from(value, _LENGTH.size + name)
        except (struct.error, OverflowError):
            return None
        lengths = 2 * _LENGTH.size + name + address + self._size * _LENGTH.size
        return int(address) if lengths == len(value) else None
