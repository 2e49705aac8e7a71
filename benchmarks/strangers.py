"""A training among 2,000 strangers that connect to its ports again and again.

    python -m benchmarks.strangers --out benchmarks/results

Each process may have 1,024 descriptors. In turns with strangers and without: one that trains a GPT and publishes each
step, whose follower takes every version; and two ranks that train over `sockets`. Measured are CPU time of the
processes, calls of ``open`` that failed, and whether the weights have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import count
from fusionlayer.transport.links import sockets

__all__ = ["flood", "main", "summarize"]

JOBS = {"publisher": 1, "sockets": 2}
"""Processes of each job."""
_SECRET = "0123456789abcdef"
_PATIENCE = 120.0
_LIMIT, _STRANGERS = 1024, 2000
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("strangers", __doc__)
    parser.add_argument("--turns", type=count(), default=3, help="with and without strangers (3)")
    parser.add_argument("--steps", type=count(), default=60, help="of each training (60)")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    if options.job:
        print(json.dumps(train(options)), flush=True)
        sys.stdin.read()  # until all processes of the job have answered
        return 0
    environment = driver.begin(options, 2)
    own = [sys.executable, "-m", "benchmarks.strangers", *(sys.argv[1:] if arguments is None else arguments)]
    rows = []
    for job in JOBS:
        for _ in range(options.turns):
            for strangers in (0, _STRANGERS):
                rows.append({"job": job, "strangers": strangers, **among(strangers, [*own, "--job", job], JOBS[job])})
    driver.finish(options, "strangers", "Trainings among strangers", environment, rows, summarize(rows))
    return 0


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each job with and without strangers, with medians and the ratio to none."""
    lines = []
    for job, strangers in dict.fromkeys((row["job"], row["strangers"]) for row in rows):
        found = [row for row in rows if (row["job"], row["strangers"]) == (job, strangers)]
        alone = [row for row in rows if (row["job"], row["strangers"]) == (job, 0)]
        cpu, seconds, refused = (
            statistics.median(row[key] for row in found) for key in ("cpu_seconds", "seconds", "refused")
        )
        lines.append(
            {
                "job": job,
                "strangers": strangers,
                "refused": int(refused),
                "seconds": f"{seconds:.1f}",
                "CPU, s": f"{cpu:.2f}",
                "times the CPU": f"{cpu / statistics.median(row['cpu_seconds'] for row in alone):.2f}",
                "failed open()": sum(row["failed"] for row in found),
                "same bits": str({row["digest"] for row in found} == {alone[0]["digest"]}).lower(),
            }
        )
    return lines


def among(strangers: int, command: Sequence[str], world: int) -> dict[str, Any]:
    """Run a job's processes among strangers; return what they have measured together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    environ = {**os.environ, **place, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, text=True, env={**environ, "RANK": str(i), "LOCAL_RANK": str(i)}
                )
            )
            for i in range(world)
        ]
        ports = [port for rank in ranks for port in json.loads(_line(rank))]
        for port in ports if strangers else ():
            stack.enter_context(flood(port, strangers // len(ports)))
        for rank in ranks:
            assert rank.stdin
            rank.stdin.write("go\n")
            rank.stdin.flush()
        found = [json.loads(_line(rank)) for rank in ranks]
        for rank in ranks:
            assert rank.stdin
            rank.stdin.close()
    (digest,) = {each["digest"] for each in found}
    sums = {key: sum(each[key] for each in found) for key in ("cpu_seconds", "failed", "refused")}
    return {**sums, "seconds": max(each["seconds"] for each in found), "digest": digest}


def _line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout
    return rank.stdout.readline()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train among strangers; return what was measured."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    torch.set_num_threads(1)
    model, step = make_step(int(os.environ["RANK"]))
    with (publishing if options.job == "publisher" else over_sockets)(model, step) as (ports, work, refused):
        work()
        print(json.dumps(ports()), flush=True)
        input()
        failed, begun, before = 0, time.monotonic(), time.process_time()
        for _ in range(options.steps):
            work()
            failed += not _can_open(_LIMIT // 4)
        measured = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - before}
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        return {**measured, "failed": failed, "refused": refused(), "digest": digest}


Job = tuple[Callable[[], list[int]], Callable[[], None], Callable[[], int]]
"""Functions: which ports it has, one step of its work, how many callers were refused."""


def make_step(rank: int) -> tuple[nn.Module, Callable[[torch.optim.Optimizer], None]]:
    """Return a model, and a function that trains it for a step with an optimizer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from gpt import GPT, Config, Corpus

    torch.manual_seed(0)
    model = GPT(Config(width=256, layers=4, heads=4, context=128, tied=False))
    corpus, generator = Corpus(), torch.Generator().manual_seed(rank)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(*corpus.sample(4, 128, generator)).backward()
        optimizer.step()

    return model, step


@contextmanager
def publishing(model: nn.Module, step: Callable[[torch.optim.Optimizer], None]) -> Iterator[Job]:
    """Publish each step to a follower in this process, which takes every version."""
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        fl.publish(model, "tcp://127.0.0.1:0", secret=_SECRET) as publisher,
        fl.subscribe(publisher.address, secret=_SECRET) as follower,
    ):

        def work() -> None:
            step(optimizer)
            publisher.step()
            while follower.digest != publisher.digest:
                follower.wait(_PATIENCE)

        yield lambda: [int(publisher.address.rpartition(":")[2])], work, lambda: publisher.refused


@contextmanager
def over_sockets(model: nn.Module, step: Callable[[torch.optim.Optimizer], None]) -> Iterator[Job]:
    """Train with another rank, over connections of our own."""
    fl.init(_PATIENCE, transport="sockets")
    optimizer = fl.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, codec="int8")
    keepers = [link._keeper for link in list(sockets._live) if link._keeper]
    try:
        yield (
            lambda: [port for keeper in keepers for place in keeper.addresses for _, port in place],
            lambda: step(optimizer),
            lambda: sum(keeper._reception._refusals.count for keeper in keepers),
        )
    finally:
        optimizer.close()


def _can_open(number: int) -> bool:
    with ExitStack() as stack:
        try:
            for _ in range(number):
                stack.enter_context(open(os.devnull))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    driver.leave(main)
