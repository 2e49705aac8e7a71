"""Opens many connections to a publisher from a separate process; none of them is a follower's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["flood"]

# Holds `count` connections, replaces each that is closed, and sends the given bytes on each.
_FLOOD = """
import resource, selectors, socket, sys
port, count, says = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
selector = selectors.DefaultSelector()
selector.register(0, selectors.EVENT_READ)
def call():
    try:
        end = socket.socket()
    except OSError:
        return
    end.setblocking(False)
    end.connect_ex(("127.0.0.1", port))
    selector.register(end, selectors.EVENT_WRITE)
for _ in range(count):
    call()
print("flood", flush=True)
while True:
    for key, events in selector.select():
        end = key.fileobj
        if end == 0:
            sys.exit()
        try:
            if events & selectors.EVENT_WRITE:
                end.send(says)
                selector.modify(end, selectors.EVENT_READ)
            elif not end.recv(1 << 16):
                raise ConnectionError
        except OSError:
            selector.unregister(end)
            end.close()
            call()
"""


@contextmanager
def flood(port: int, count: int, says: bytes = b"") -> Iterator[None]:
    """Run a process that holds ``count`` connections to a port, and calls again where one was closed."""
    command = [sys.executable, "-c", _FLOOD, str(port), str(count), says.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "flood\n"
            yield
        finally:
            process.stdin.close()
            process.wait(180)
