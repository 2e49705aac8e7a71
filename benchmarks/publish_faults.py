"""Followers of a publisher that are killed, come late or lose their link: is all that they show the publisher's?

    python -m benchmarks.publish_faults --out benchmarks/results

Five hosts on links of one rate: a publisher and four followers. One is left alone. One is killed in the middle of a
version, several times, and begins again. One comes when half of the versions are out. The link of one goes down and up
again, for less and for more than the time after which a follower connects anew. The publisher takes a step of a small
size on bf16 weights and publishes, so many times a second; a version that a follower shows is hashed from the tensors
that it really has, and compared with what the publisher wrote down.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import count
from benchmarks.faults.deeds import set_link
from benchmarks.lab import Network, launch
from fusionlayer.publishing.snapshot import Snapshot

__all__ = ["main", "summarize"]

ROLES = ("publisher", "left alone", "killed", "late", "link down")
KILLS, DOWNS = 3, (0.5, 4.0, 0.5, 4.0)
_TIMEOUT = 2.0
_PATIENCE = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("publish_faults", __doc__)
    parser.add_argument("--rate", default="100mbit", help="of links (100mbit)")
    parser.add_argument("--versions", type=count(), default=60, help="(60)")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds from version to version (0.5)")
    parser.add_argument("--numel", type=count(), default=4_000_000, help="weights (4,000,000)")
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--follow", metavar="NAME", help=argparse.SUPPRESS)
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    if options.follow:
        follow(options.worker, options.follow)
        return 0
    if options.worker:
        work(options)
        return 0
    environment = driver.begin(options)
    with tempfile.TemporaryDirectory() as name:
        again = [sys.executable, "-m", "benchmarks.publish_faults", *(arguments or sys.argv[1:]), "--worker", name]
        with launch(again, Network(len(ROLES), options.rate), stdout=sys.stderr.fileno()) as process:
            if process.wait():
                return 1
        folder = Path(name)
        rows = [_seen(folder, role) for role in ROLES[1:]]
    title = (
        f"Followers in trouble: {options.versions} versions of {options.numel / 1e6:g} M weights in bf16, "
        f"{options.interval:g} s apart, links of {options.rate}"
    )
    driver.finish(options, "publish-faults", title, environment, rows, summarize(rows))
    return int(any(row["wrong"] for row in rows))


def _seen(folder: Path, role: str) -> dict[str, Any]:
    """Return what a follower has shown, beside what was published."""
    published = dict(line.split() for line in (folder / "published").read_text().splitlines())
    shown = [line.split() for line in (folder / role).read_text().splitlines()]
    return {
        "role": role,
        "published": len(published),
        "shown": len(shown),
        "wrong": sum(published.get(version) != digest for version, digest in shown),
        "last": int(shown[-1][0]),
        "events": int((folder / f"{role} events").read_text()) if (folder / f"{role} events").exists() else 0,
    }


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each follower."""
    return [
        {
            "follower": row["role"],
            "times": row["events"] or "",
            "versions shown": f"{row['shown']} of {row['published']}",
            "with another digest than the publisher's": row["wrong"],
            "the last one shown": "yes" if row["last"] == row["published"] - 1 else "no",
        }
        for row in rows
    ]


# ---- the processes of one run ---------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be what the rank says."""
    torch.set_num_threads(1)
    role, folder = ROLES[int(os.environ["RANK"])], options.worker
    if role == "publisher":
        publish(options, folder)
        return
    _until((folder / "address").exists)
    if role == "late":
        _until(lambda: _published(folder) >= options.versions // 2)
    events = 0
    process = _start(folder, role)
    if role == "killed":
        for number in range(1, KILLS + 1):
            _until(lambda number=number: _published(folder) >= number * options.versions // (KILLS + 2))  # type: ignore[misc]
            time.sleep(0.05)  # a version is on its way
            process.send_signal(signal.SIGKILL)
            process.wait()
            events += 1
            process = _start(folder, role)
    if role == "link down":
        device = os.environ["GLOO_SOCKET_IFNAME"]
        for number, seconds in enumerate(DOWNS, 1):
            _until(lambda number=number: _published(folder) >= number * options.versions // (len(DOWNS) + 2))  # type: ignore[misc]
            set_link(device, False)
            time.sleep(seconds)
            set_link(device, True)
            events += 1
    (folder / f"{role} events").write_text(str(events))
    if process.wait(_PATIENCE):
        raise SystemExit(f"the follower {role!r} ended with status {process.returncode}")


def publish(options: argparse.Namespace, folder: Path) -> None:
    """Publish, and write down what."""
    main = 0.02 * torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    weights, draw = {"weight": main.bfloat16()}, torch.Generator().manual_seed(1)
    with fl.publish(weights, f"tcp://{os.environ['MASTER_ADDR']}:0", timeout=_TIMEOUT) as publisher:
        draft = folder / "draft"
        draft.write_text(publisher.address)
        draft.rename(folder / "address")
        for version in range(options.versions):
            if version == options.versions - 1:
                _until(lambda: all((folder / f"{role} events").exists() for role in ROLES[1:]))
                _until(lambda: publisher.followers == len(ROLES) - 1)
            begin = time.monotonic()
            main += 1e-4 * (2 * torch.rand(options.numel, generator=draw) - 1)
            weights["weight"].copy_(main)
            publisher.update(version=version)
            with open(folder / "published", "a") as file:
                file.write(f"{version} {publisher.digest}\n")
            time.sleep(max(0.0, begin + options.interval - time.monotonic()))
        publisher.flush(_PATIENCE)


def _published(folder: Path) -> int:
    file = folder / "published"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _until(holds: Any) -> None:
    end = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise SystemExit("nothing has come")
        time.sleep(0.01)


def _start(folder: Path, role: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.publish_faults", "--worker", str(folder), "--follow", role]
    return subprocess.Popen(command)


def follow(folder: Path, role: str) -> None:
    """Show what comes, and write down what that really is."""
    torch.set_num_threads(1)
    with (
        fl.subscribe((folder / "address").read_text(), timeout=_TIMEOUT) as follower,
        open(folder / role, "a", buffering=1) as file,
    ):
        for version in follower:
            found = Snapshot("0" * 16, version, follower.state_dict()).digest
            file.write(f"{version} {found}\n")


if __name__ == "__main__":
    driver.leave(main)
