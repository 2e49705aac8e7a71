"""Measures the link from the first host of a lab to another; runs in both, and the first prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]

MESSAGE = 65536
"""Bytes of the message that is sent over an idle link."""

_PORT = 29400
_CHUNK = bytes(1 << 18)
_SMALL, _FULL = 64, 1472
"""Bytes of datagrams: of those that are counted one by one, and of those that fill a frame."""

_FRAME = 42
"""Bytes of headers that a datagram has on Ethernet."""

_MOST_PER_SECOND = 20000
"""Datagrams, so that a process keeps up."""

_WARM_UP = 0.5
"""Seconds of a stream that are not counted: TCP finds its speed, and queues fill."""


def _receive(peer: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(size))
    while size:
        count = peer.recv_into(buffer, size)
        if not count:
            raise ConnectionError("the other host has closed the connection")
        size -= count


def _send_for(peer: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        peer.sendall(_CHUNK)
    peer.shutdown(socket.SHUT_WR)


def _goodput(peer: socket.socket) -> float:
    """Return how many bits arrived per second, from the end of the warm-up to the end of the stream."""
    buffer = bytearray(len(_CHUNK))
    counted = 0
    begin = last = None
    start = time.monotonic()
    while size := peer.recv_into(buffer):
        last = time.monotonic()
        if begin is not None:
            counted += size
        elif last - start >= _WARM_UP:
            begin = last
    if begin is None or last is None or last <= begin:
        raise ConnectionError("the stream ended before it could be measured")
    return counted * 8 / (last - begin)


def _send_numbered(socket_: socket.socket, address: tuple[str, int], count: int, per_second: float) -> None:
    """Send ``count`` numbered datagrams evenly, then some without number that tell the end."""
    begin = time.monotonic()
    for number in range(count):
        if (early := begin + number / per_second - time.monotonic()) > 0.001:
            time.sleep(early)
        socket_.sendto(number.to_bytes(8, "big") + bytes(_SMALL - 8), address)
    time.sleep(0.2)
    for _ in range(20):
        socket_.sendto(b"end", address)


def _count_numbered(socket_: socket.socket) -> tuple[int, int]:
    """Return how many datagrams came, and how many of them after one that was sent later."""
    came = overtaken = 0
    highest = -1
    while len(datagram := socket_.recv(_FULL)) == _SMALL:
        number = int.from_bytes(datagram[:8], "big")
        came += 1
        overtaken += number < highest
        highest = max(highest, number)
    return came, overtaken


def _send_full(socket_: socket.socket, address: tuple[str, int], seconds: float) -> None:
    """Send datagrams that fill a frame as fast as the link takes them, then some that tell the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            socket_.sendto(_CHUNK[:_FULL], address)
    time.sleep(0.5)
    for _ in range(20):
        socket_.sendto(b"end", address)


def _rate_of_full(socket_: socket.socket) -> float:
    """Return how many bits of datagrams came per second."""
    buffer = bytearray(_FULL)
    counted = 0
    begin = last = 0.0
    while (size := socket_.recv_into(buffer)) == _FULL or not begin:  # what tells the end of others may come late
        last = time.monotonic()
        if begin:
            counted += size
        elif size == _FULL:
            begin = last
    if last <= begin:
        raise ConnectionError("the datagrams did not come")
    return counted * 8 / (last - begin)


def _datagrams(address: str) -> socket.socket:
    """Return a socket whose queue is as long as this user may make it."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 1 << 24)
    listening.bind((address, _PORT))
    listening.settimeout(120)
    return listening


def _busy_seconds() -> float:
    """Return how long the processes of this lab have been at work, in sum, and this machine's kernel in interrupts."""
    ticks = sum(map(int, Path("/proc/stat").read_text().split()[6:8]))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _answer(listener: socket.socket, datagrams: socket.socket) -> None:
    """Play the second host's part."""
    first, _ = listener.accept()
    first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while size := int.from_bytes(first.recv(4, socket.MSG_WAITALL), "big"):
        _receive(first, size)
        first.sendall(b"!")
    first.sendall(json.dumps(_count_numbered(datagrams)).encode() + b"\n")
    datagrams.close()
    with _datagrams(listener.getsockname()[0]) as datagrams:
        first.sendall(b"again\n")
        first.sendall(json.dumps(_rate_of_full(datagrams)).encode() + b"\n")
    for both in (False, True):
        stream, _ = listener.accept()
        seconds = float(int.from_bytes(first.recv(4, socket.MSG_WAITALL), "big")) / 1000
        sender = threading.Thread(target=_send_for, args=(stream, seconds))
        if both:
            sender.start()
        first.sendall(json.dumps(_goodput(stream)).encode() + b"\n")
        if both:
            sender.join()
        stream.close()


def _connect(address: str) -> socket.socket:
    end = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=120)
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _ask(address: str, seconds: float, rate: float | None, count: int) -> dict[str, object]:
    """Play the first host's part; return what was seen.

    Args:
        address: of the other host.
        seconds: for which streams last.
        rate: of the link, in bits per second; None: not limited.
        count: datagrams of which is counted how many are lost.
    """
    second = _connect(address)
    second.settimeout(None)
    second.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    congestion = second.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    def exchange(size: int, idle: float) -> float:
        time.sleep(idle)
        begin = time.perf_counter()
        second.sendall(size.to_bytes(4, "big") + bytes(size))
        _receive(second, 1)
        return time.perf_counter() - begin

    round_trips = [exchange(1, 0.0) for _ in range(50)]
    after_idle = [exchange(MESSAGE, 0.1) for _ in range(11)]
    second.sendall(bytes(4))
    answers = second.makefile("r")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        most = _MOST_PER_SECOND if rate is None else min(_MOST_PER_SECOND, rate / 16 / (_SMALL + _FRAME))
        _send_numbered(datagrams, (address, _PORT), count, most)
        came, overtaken = json.loads(answers.readline())
        answers.readline()
        _send_full(datagrams, (address, _PORT), seconds)
        full = float(json.loads(answers.readline()))
    goodput: list[list[float]] = []
    cpu: list[float] = []
    for both in (False, True):
        stream = _connect(address)
        stream.settimeout(None)
        second.sendall(int(seconds * 1000).to_bytes(4, "big"))
        here: list[float] = []
        receiver = threading.Thread(target=lambda stream=stream, here=here: here.append(_goodput(stream)))
        if both:
            receiver.start()
        before, begin = _busy_seconds(), time.monotonic()
        _send_for(stream, seconds)
        there = float(json.loads(answers.readline()))
        if both:
            receiver.join()
        busy = _busy_seconds() - before
        goodput.append([there, *here])
        cpu.append(busy / (sum(goodput[-1]) / 8e6 * (time.monotonic() - begin)))
        stream.close()
    return {
        "congestion": congestion,
        "round_trip": {"min": min(round_trips), "median": statistics.median(round_trips)},
        "after_idle": {"min": min(after_idle), "median": statistics.median(after_idle)},
        "lost": 1 - came / count,
        "overtaken": overtaken / max(1, came),
        "datagrams": full,
        "single": goodput[0],
        "both": goodput[1],
        "cpu_seconds_per_megabyte": {"single": cpu[0], "both": cpu[1]},
    }


def main() -> None:
    """Measure as the first host, answer as the one that is asked about, do nothing as any other."""
    asked = json.loads(os.environ["LAB_PROBE"])
    rank = int(os.environ["RANK"])
    if rank == asked["peer"]:
        with socket.create_server((asked["address"], _PORT)) as listener:
            _answer(listener, _datagrams(asked["address"]))
    elif rank == 0:
        print(json.dumps(_ask(asked["address"], asked["seconds"], asked["rate"], asked["count"])), flush=True)


if __name__ == "__main__":
    main()
