"""The store by which gloo connects. gloo takes its values for addresses, and crashes on any other value."""

from __future__ import annotations

import struct
from datetime import timedelta

import torch.distributed as dist

from ...base.errors import TransportError
from ...launch.stores import WrappedStore, await_count

_LENGTH = struct.Struct("<Q")


class GlooStore(WrappedStore):
    """A store that refuses foreign values: their parts have other lengths than those of this rank's values.

    A rank writes its host's name and its address, each after its length, and a number for each rank. If this rank's
    gloo writes another form, it is another version, and everything passes.

    gloo asks for one rank after the other. So all addresses are read at once when gloo asks for the first. The numbers,
    0, 1, ... for a new group, are left out: with them the bytes that all ranks read would grow with the third power of
    the number of ranks.

    Args:
        store: where the values are. Keep this object as long as gloo has it.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__(store)
        self._size = size
        self._own: int | None = None
        self._numbers = struct.pack(f"<{size}Q", *range(size))
        self._groups: set[str] = set()
        self._read: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        data = value.encode() if isinstance(value, str) else value
        group, _, rank = key.rpartition("/")
        if rank.isdecimal():
            self._groups.add(group)
        self._own = self._address_bytes(data)
        short = data.removesuffix(self._numbers) if self._own is not None else data
        self._store.set(key, short)  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        self.wait([key])
        value = self._read[key] if key in self._read else self._store.get(key)
        if self._own is None or self._address_bytes(value) == self._own:
            return value
        whole = value + self._numbers
        if self._address_bytes(whole) != self._own:
            raise TransportError(f"{key!r} in the store is no address of gloo: another program has written it")
        return whole

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, as ``get`` does."""
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; the request for one rank's address also reads all others."""
        for key in keys:
            group, _, rank = key.rpartition("/")
            if key in self._read:
                continue
            if not rank.isdecimal():
                self._store.wait([key])
                continue
            await_count(self._store, f"{group}/count", self._size)
            every = [f"{group}/{peer}" for peer in range(self._size)]
            self._read.update(zip(every, self._store.multi_get(every), strict=True))

    def detach(self) -> None:
        """Read the values that gloo may request later, as it does if it connects lazily, and release the store."""
        for group in self._groups:
            self.wait([f"{group}/0"])
        self._store = dist.HashStore()

    def _address_bytes(self, value: bytes) -> int | None:
        """Return how many bytes an address takes in a value of gloo; None if the value has another form."""
        try:
            (name,) = _LENGTH.unpack_from(value)
            (address,) = _LENGTH.unpack_from(value, _LENGTH.size + name)
        except (struct.error, OverflowError):
            return None
        lengths = 2 * _LENGTH.size + name + address + self._size * _LENGTH.size
        return int(address) if lengths == len(value) else None
