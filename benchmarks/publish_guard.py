"""What guards of a publisher cost: a secret's tags, and TLS. ``strangers`` measures what floods of strangers cost.

    python -m benchmarks.publish_guard --out benchmarks/results

Seconds from ``publisher.step()`` until a follower has a version of 1 or 64 MB that nothing compresses, over loopback
and between two emulated hosts; without a guard, with a secret, with TLS, and with both, in turns in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import count
from benchmarks.lab import Network, launch

__all__ = ["main", "summarize"]

GUARDS = ("none", "secret", "TLS", "both")
SIZES = (1_000_000, 64_000_000)
_SECRET = "0123456789abcdef"
_PATIENCE = 120.0
_WORD = struct.Struct("<d")
_MEASURED = ("seconds", "cpu_seconds", "follower_cpu_seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("publish_guard", __doc__)
    parser.add_argument("--turns", type=count(), default=7, help="of each guard and size (7)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    if options.folder:
        (publish if os.environ["RANK"] == "0" else follow)(options)
        return 0
    environment = driver.begin(options, 2)
    own = [sys.executable, "-m", "benchmarks.publish_guard", *(sys.argv[1:] if arguments is None else arguments)]
    rows = [row for link in ("loopback", "1gbit") for row in measured(link, own)]
    driver.finish(options, "publish-guard", "Guards of a publisher", environment, rows, summarize(rows))
    return 0


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each link, size and guard, with medians and ratios to no guard."""
    lines = []
    for link, size, guard in dict.fromkeys((row["link"], row["nbytes"], row["guard"]) for row in rows):
        found = [row for row in rows if (row["link"], row["nbytes"]) == (link, size)]
        seconds, cpu, theirs = ({g: _median(found, g, key) for g in GUARDS} for key in _MEASURED)
        lines.append(
            {
                "link": link,
                "version, MB": f"{size / 1e6:g}",
                "guard": guard,
                "seconds": f"{seconds[guard]:.4f}",
                "Gbit/s": f"{8e-9 * size / seconds[guard]:.2f}",
                "times as long": f"{seconds[guard] / seconds['none']:.2f}",
                "publisher, CPU s": f"{cpu[guard]:.4f}",
                "follower, CPU s": f"{theirs[guard]:.4f}",
                "times the CPU": f"{(cpu[guard] + theirs[guard]) / (cpu['none'] + theirs['none']):.2f}",
            }
        )
    return lines


def _median(rows: Sequence[Mapping[str, Any]], guard: str, key: str) -> float:
    return statistics.median(row[key] for row in rows if row["guard"] == guard)


# ---- versions over guarded connections ------------------------------------------------------------------------------


def measured(link: str, command: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each version that a follower has taken over a link."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_certificates(folder)
        words = [*command, "--folder", name]
        if link == "loopback":
            environ = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
            ranks = [subprocess.Popen(words, env={**environ, "RANK": str(rank)}) for rank in (0, 1)]
            codes = [process.wait() for process in ranks]
        else:
            with launch(words, Network(2, link), stdout=sys.stderr.fileno()) as process:
                codes = [process.wait()]
        if any(codes):
            raise SystemExit(1)
        return [{"link": link, **row} for row in json.loads((folder / "rows").read_text())]


def make_certificates(folder: Path) -> None:
    """Make a certificate of a publisher, which is its own authority."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=trainer", "-addext", "subjectAltName=DNS:trainer"]
    subprocess.run([*command, "-keyout", "key", "-out", "pem"], cwd=folder, check=True, capture_output=True)


def publish(options: argparse.Namespace) -> None:
    """Publish versions by each guard in turns, and write how long a follower waited for each."""
    torch.set_num_threads(1)
    host, rows = os.environ["MASTER_ADDR"], []
    server = fl.TLS(options.folder / "pem", options.folder / "key")
    with ExitStack() as stack, socket.create_server((host, 0)) as listener:
        publishers = {
            guard: stack.enter_context(
                fl.publish(
                    {},
                    f"tcp://{host}:0",
                    secret=_SECRET if guard in ("secret", "both") else None,
                    tls=server if guard in ("TLS", "both") else None,
                )
            )
            for guard in GUARDS
        }
        draft = options.folder / "draft"
        draft.write_text(json.dumps([listener.getsockname()[:2], {g: p.address for g, p in publishers.items()}]))
        draft.rename(options.folder / "places")
        end, _ = listener.accept()
        end.settimeout(_PATIENCE)
        words = end.makefile("rb")
        generator = torch.Generator().manual_seed(0)
        for size in SIZES:
            for turn in range(options.turns + 1):
                for guard, publisher in publishers.items():
                    state = {"w": torch.randint(256, (size,), generator=generator, dtype=torch.uint8)}
                    end.sendall(GUARDS.index(guard).to_bytes(1, "little"))
                    words.read(_WORD.size)
                    start, cpu = time.perf_counter(), time.process_time()
                    publisher.update(state)
                    (theirs,) = _WORD.unpack(words.read(_WORD.size))
                    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
                    if turn:  # the first one warms up
                        rows.append({"guard": guard, "nbytes": size, **took, "follower_cpu_seconds": theirs})
        end.close()
    (options.folder / "rows").write_text(json.dumps(rows))


def follow(options: argparse.Namespace) -> None:
    """Follow all publishers, and say when a version has come."""
    torch.set_num_threads(1)
    end = time.monotonic() + _PATIENCE
    while not (options.folder / "places").exists() and time.monotonic() < end:
        time.sleep(0.05)
    (host, port), addresses = json.loads((options.folder / "places").read_text())
    client = fl.TLS(authorities=options.folder / "pem", host="trainer")
    with ExitStack() as stack, socket.create_connection((host, port), _PATIENCE) as trainer:
        followers = {
            guard: stack.enter_context(
                fl.subscribe(
                    address,
                    secret=_SECRET if guard in ("secret", "both") else None,
                    tls=client if guard in ("TLS", "both") else None,
                )
            )
            for guard, address in addresses.items()
        }
        trainer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # it sends two words in a row
        while word := trainer.recv(1):
            trainer.sendall(_WORD.pack(0.0))
            cpu = time.process_time()
            followers[GUARDS[word[0]]].wait(_PATIENCE)
            trainer.sendall(_WORD.pack(time.process_time() - cpu))


if __name__ == "__main__":
    driver.leave(main)
