"""Horovod's replicas: each trains in a process beside the worker, which is stopped whenever it is not its turn.

Horovod's thread talks to its peers every millisecond, work or no work. In the worker itself it would take cores and
network from every other method.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

import torch
import torch.distributed as dist

import fusionlayer as fl

from .replicas import Replica, Trainee, Turn
from .workloads import Workload, make_workload

__all__ = ["HorovodReplica", "main"]


class HorovodReplica(Replica):
    """Speaks with ``main``, running in a process of its own, in lines of JSON."""

    def __init__(self, method: str, workload: Workload) -> None:
        # Horovod looks up the name of the host where it should take its address; a host of the lab has none of its own.
        named = ["unshare", "--uts", "--"] if fl.local_size() < fl.size() else []
        command = [
            *named,
            sys.executable,
            "-m",
            "benchmarks.training.horovod_replica",
            method,
            workload.name,
            str(workload.seed),
            str(workload.rank),
        ]
        self._process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        address = [self._ask({"serve": fl.size(), "each": fl.local_size()}) if fl.rank() == 0 else None]
        dist.broadcast_object_list(address)
        self.note = f"{method}: Horovod {self._ask({'join': address[0]})} in processes of its own"
        dist.barrier()
        self.rest()

    def prepare(self, first: int, steps: int) -> None:  # noqa: D102 - described in Replica
        self._process.send_signal(signal.SIGCONT)
        self._ask({"prepare": [first, steps]})

    def run(self) -> Turn:  # noqa: D102 - described in Replica
        answer = self._ask({"run": None})
        return Turn(**{**answer, "losses": tuple(answer["losses"])})

    def rest(self) -> None:  # noqa: D102 - described in Replica
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def digest(self) -> str:  # noqa: D102 - described in Replica
        self._process.send_signal(signal.SIGCONT)
        return str(self._ask({"digest": None}))

    def close(self) -> None:  # noqa: D102 - described in Replica
        self._process.send_signal(signal.SIGCONT)
        dist.barrier()  # a peer that leaves early looks like a crash
        with suppress(RuntimeError):
            self._ask({"leave": None})
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"Horovod's process ended with status {self._process.wait()} at {question}")
        return json.loads(answer)


def _environment() -> dict[str, str]:
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    host, hosts = fl.rank() // fl.local_size(), fl.size() // fl.local_size()
    places = {
        "RANK": fl.rank(),
        "SIZE": fl.size(),
        "LOCAL_RANK": fl.local_rank(),
        "LOCAL_SIZE": fl.local_size(),
        "CROSS_RANK": host,
        "CROSS_SIZE": hosts,
        "HOSTNAME": f"host{host}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": device,
        "GLOO_TIMEOUT_SECONDS": 3600,  # a stopped process must not find that its peers were late
    }
    return {**os.environ, **{f"HOROVOD_{key}": str(value) for key, value in places.items()}}


class _Trainer:
    """The other side: each method answers the question of its name."""

    def __init__(self, method: str, workload: Workload) -> None:
        self._method = method
        self._workload = workload
        self._server: Any = None
        self._trainee: Trainee | None = None

    def serve(self, question: dict[str, Any]) -> list[Any]:
        """Return host and port of a new meeting point for all processes."""
        from horovod.runner.common.util.hosts import (  # type: ignore[import-not-found]
            get_host_assignments,
            parse_hosts,
        )
        from horovod.runner.http.http_server import RendezvousServer  # type: ignore[import-not-found]

        size, each = question["serve"], question["each"]
        hosts = ",".join(f"host{host}:{each}" for host in range(size // each))
        self._server = RendezvousServer()
        port = self._server.start()
        self._server.init(get_host_assignments(parse_hosts(hosts), size))
        return [os.environ.get("MASTER_ADDR", "127.0.0.1"), port]

    def join(self, question: dict[str, Any]) -> str:
        """Meet the others; return Horovod's version."""
        host, port = question["join"]
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = host
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        if os.environ["HOROVOD_CROSS_SIZE"] != "1":
            socket.sethostname(_address_towards(host))
        import horovod.torch as hvd  # type: ignore[import-not-found]

        hvd.init()
        model, optimizer = self._workload.begin()
        compression = hvd.Compression.fp16 if self._method.endswith("fp16") else hvd.Compression.none
        begun = optimizer.state_dict()  # Horovod makes an optimizer anew, without the state
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        optimizer.load_state_dict(begun)
        self._trainee = Trainee(self._workload, model, optimizer)
        return str(sys.modules["horovod"].__version__)

    def prepare(self, question: dict[str, Any]) -> None:
        """Get the data of a turn ready."""
        assert self._trainee is not None
        self._trainee.prepare(*question["prepare"])

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do the steps of the turn."""
        assert self._trainee is not None
        return asdict(self._trainee.run())

    def digest(self, question: dict[str, Any]) -> str:
        """Return a hash of all parameters."""
        assert self._trainee is not None
        return self._trainee.digest()

    def leave(self, question: dict[str, Any]) -> None:
        """Leave Horovod's job."""
        import horovod.torch as hvd

        hvd.shutdown()


def _address_towards(host: str) -> str:
    """Return this host's address on the network that ``host`` is in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address


def main(arguments: list[str]) -> None:
    """Answer questions until there are no more."""
    answers: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Horovod prints is no answer
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    method, model, seed, rank = arguments
    trainer = _Trainer(method, make_workload(model, int(seed), int(rank)))
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(trainer, next(iter(question)))(question)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
