"""A relay between publisher and followers that sends weights of its own."""

import socket
import struct
import threading
import zlib
from contextlib import suppress

from torch import Tensor

from fusionlayer.publishing.update import make
from tests.publishing.states import snapshot


class FalseRelay:
    """Passes on the greeting of a publisher and a follower, then sends weights of its own in the publisher's name."""

    def __init__(self, port: int, weights: dict[str, Tensor]) -> None:
        self._port = port
        update = make(snapshot(0, weights))
        prefix = struct.pack("<4sQ", b"DATA", update.nbytes)
        self._forged = prefix + struct.pack("<I", zlib.crc32(prefix)) + b"".join(update.parts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port), 5)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                before, found, _ = data.partition(b"DATA")
                sink.sendall(before + self._forged if found else data)
                if found:
                    return
            sink.shutdown(socket.SHUT_RDWR)
