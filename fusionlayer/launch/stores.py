"""Stores of torch with seals, with waits that end, and with a choice of addresses."""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base import job_key
from ..base.errors import ConfigError, TransportError
from ..process import outages
from ..process.interfaces import allowed_address, family_of, is_loopback

_TOKEN = "fusionlayer/token"
_POLL = 0.01
_BACKLOG = 1024


class WrappedStore(dist.Store):
    """A store whose values are another store's; subclasses implement writing and reading.

    torch sees only the methods written here, and C++ does not keep the Python part of a store: keep it as long as a
    library has it.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there are such keys."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether there are such keys."""
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key; return the sum."""
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        """Return whether several keys are read or written by one request."""
        return bool(self._store.has_extended_api())  # type: ignore[attr-defined]  # which torch's stubs lack


class SealedStore(WrappedStore):
    """A store whose values carry a proof of the job key, where there is one (see ``job_key``).

    Counters are unsealed: the store itself adds to them.

    Args:
        store: where the values are.
        place: a prefix of each key in the proof, so that values of another place are invalid.
    """

    def __init__(self, store: dist.Store, place: str) -> None:
        super().__init__(store)
        self._place = place

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._store.set(key, job_key.seal(f"{self._place}/{key}", value))  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it.

        Raises:
            TransportError: no process with the job key has written it.
        """
        return job_key.unseal(f"{self._place}/{key}", self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, as ``get`` does, by one request."""
        values = self._store.multi_get([*keys])
        return [job_key.unseal(f"{self._place}/{key}", value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write keys, by one request."""
        sealed: Any = [job_key.seal(f"{self._place}/{key}", value) for key, value in zip(keys, values, strict=True)]
        self._store.multi_set([*keys], sealed)  # type: ignore[attr-defined]  # which torch's stubs lack

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key, unless it is there; return its value. ``expected`` is empty.

        Raises:
            TransportError: no process with the job key has written it.
        """
        where = f"{self._place}/{key}"
        wanted: Any = job_key.seal(where, desired)
        return job_key.unseal(where, self._store.compare_set(key, "", wanted))


class EndingStore(SealedStore):
    """A store whose waits end at a deadline: gloo waits for keys in C++, where nothing else can interrupt the wait.

    Args:
        store: where the values are.
        place: see ``SealedStore``.
        deadline: a time of the monotonic clock.
        in_vain: once it is set, waits end too.

    Attributes:
        written: the keys that this end has written.
        awaited: the keys that it has waited for.
    """

    def __init__(self, store: dist.Store, place: str, deadline: float, in_vain: threading.Event | None = None) -> None:
        super().__init__(store, place)
        self._deadline = deadline
        self._in_vain = in_vain or threading.Event()
        self.written: set[str] = set()
        self.awaited: set[str] = set()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key, and note its name."""
        self.written.add(key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, like ``SealedStore``, once ``wait`` has returned."""
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, like ``SealedStore``, once ``wait`` has returned."""
        self.wait([*keys])
        return super().multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait in the store's server until there are such keys, or until the deadline, whatever ``timeout`` says.

        Nothing else interrupts this wait, so a caller that may give up makes it on a thread of its own, with its own
        client.

        Raises:
            RuntimeError: there are none by then, or no caller wants them any more.
        """
        self.awaited.update(keys)
        left = self._deadline - time.monotonic()
        if self._in_vain.is_set() or left <= 0:
            why = "connections are not wanted any more" if self._in_vain.is_set() else "the time is over"
            raise RuntimeError(f"waiting for {', '.join(keys)} in the store: {why}")
        self._store.wait(keys, timedelta(seconds=left))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key; return the sum, and note the key."""
        self.written.add(key)
        return super().add(key, amount)


def await_count(store: dist.Store, name: str, size: int) -> None:
    """Return once all ranks have called it, after a number of requests that does not grow with the ranks."""
    if store.add(name, 1) == size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def gather(store: dist.Store, name: str, rank: int, size: int, value: str | bytes) -> list[bytes]:
    """Return the values of all ranks, which call it together. It takes four requests, and the last rank one more."""
    store.set(f"{name}/{rank}", value)  # type: ignore[arg-type]  # it takes bytes
    await_count(store, f"{name}/count", size)
    return store.multi_get([f"{name}/{peer}" for peer in range(size)])


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this host; on all of them, IPv6 too, if ``address`` is empty."""
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # the kernel has IPv6, and no interface has
            place, family = ("", port), socket.AF_INET6
            return socket.create_server(place, family=family, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server((address, port), family=family_of(address), backlog=_BACKLOG)


def serve(address: str, patience: float, port: int = 0, size: int | None = None) -> dist.TCPStore:
    """Open a store in this process; torch's own would listen on all addresses of the host.

    Args:
        address: on which it listens; empty: on all.
        patience: seconds that a request may take.
        port: 0: one of the system's choice.
        size: number of processes that will use it, for torch.
    """
    own = listen(address, port)
    return dist.TCPStore(
        address or "127.0.0.1",
        own.getsockname()[1],
        size,
        True,
        timedelta(seconds=patience),
        wait_for_workers=False,
        master_listen_fd=own.detach(),
    )


def mark(store: dist.TCPStore) -> str:
    """Write a random token into a store of this process, and return it: ``dial`` finds the store by it."""
    token = secrets.token_hex(8)
    store.set(_TOKEN, token)
    return token


def dial(name: str, port: int, token: str, patience: float, knock: float) -> dist.TCPStore | None:
    """Return a client of another process's store; None if nothing answers there, or another program does.

    Args:
        name: the name of the host. It may lead to different hosts, depending on where it is used.
        port: the port of the store.
        token: which the store has; empty: any.
        patience: seconds that a request may take.
        knock: seconds that the host may take to accept a connection.
    """
    with suppress(OSError, RuntimeError, ValueError, OverflowError):
        socket.create_connection((name, port), knock).close()
        store = dist.TCPStore(name, port, None, False, timedelta(seconds=patience), wait_for_workers=False)
        if store.check([_TOKEN]) and (not token or store.get(_TOKEN) == token.encode()):
            return store
    return None


def open_store(host: str, port: int, rank: int, size: int, timeout: float, *, serve_it: bool) -> dist.TCPStore:
    """Return the store by which a job's ranks meet, at a known place.

    Args:
        host: the host of the rank that keeps it.
        port: there.
        rank: this rank, for messages.
        size: number of ranks.
        timeout: seconds until somebody must listen there, and that requests may take later.
        serve_it: keep it in this process. Its server listens on all addresses of this host, unless ``host`` is one of
            this host alone, or of an interface that ``interfaces.restrict`` allows.

    Raises:
        TransportError: it cannot be opened, or reached.
    """
    what = "cannot open a store" if serve_it else "found no store of rank 0"
    _await_host(host, port, rank, what, time.monotonic() + timeout, serve_it=serve_it)
    address = host if is_loopback(host) else allowed_address(host)
    try:
        if serve_it and address:
            return serve("127.0.0.1" if address == "localhost" else address, timeout, port, size)
        return dist.TCPStore(host, port, size, serve_it, timedelta(seconds=timeout), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        cause = outages.explain(error, host, port)
        if serve_it and not cause.here:
            cause = outages.explain(error)  # of course nothing listens there now
        if not serve_it and re.search("Ping failed|closed|reset|validat", cause.text):
            text = (
                f"a program that is no store of torch listens there ({cause.text}); end it, or give all ranks another"
            )
            cause = cause._replace(text=f"{text} MASTER_PORT")
        ranks = [rank if cause.here else 0]
        raise TransportError(f"rank {rank} {what} at {host}:{port}: {cause.text}", ranks) from error


def _await_host(host: str, port: int, rank: int, what: str, deadline: float, *, serve_it: bool) -> None:
    """Return when the host's name is known and, unless this process is to serve there, somebody listens.

    torch would try again after pauses that are longer than our time-out.
    """
    while True:
        try:
            if serve_it:
                socket.getaddrinfo(host, port)
            else:
                socket.create_connection((host, port), max(deadline - time.monotonic(), 0.001)).close()
            return
        except UnicodeError:
            raise ConfigError(f"{host!r} is no name of a host; set MASTER_ADDR to one") from None
        except OSError as error:
            if time.monotonic() > deadline:
                cause = outages.explain(error, host, port)
                ranks = [rank if cause.here else 0]
                raise TransportError(f"rank {rank} {what} at {host}:{port}: {cause.text}", ranks) from None
        time.sleep(5 * _POLL)
