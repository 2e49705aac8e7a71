"""A proxy between followers and a publisher, which cuts links, flips bits, and passes nothing on for a while."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Gateway:
    """Listens at ``address`` and passes on what comes, to and from the publisher at ``port``.

    Attributes:
        open: cleared, nothing is passed on to followers.
        flips: how many bits of what followers are sent are still to be flipped, one in each piece behind the greeting.
        passed: bytes that followers were sent.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.open = threading.Event()
        self.open.set()
        self.flips = 0
        self.passed = 0
        self._links: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Close all links that there are; followers may connect again."""
        with self._lock:
            for end in self._links:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._links.clear()

    def hear(self, data: bytes) -> None:
        """Take what followers are sent, for those who look at it."""

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.open.set()
        self.cut()
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.port), 5)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._links += [near, far]
                for ends in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._pass_on, args=ends, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, to_follower: bool) -> None:
        begun = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if to_follower:
                    self.open.wait()
                    begun += len(data)
                    if self.flips and begun > 100 and len(data) > 50:
                        self.flips -= 1
                        data[len(data) // 2] ^= 4
                    self.passed += len(data)
                    self.hear(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
