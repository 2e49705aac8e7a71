"""Run workers on hosts that are joined by a network of a given speed, all on this machine and without root.

    python benchmarks/lab/link.py --hosts 2 --rate 100mbit -- python examples/train_gpt.py --codec int8

Each host is a network namespace with one link, ``eth0``, shaped both ways by tc; workers find each other as under
torchrun. ``--hosts 1`` gives one host with a loopback of its own, whose byte counter sees nothing but the workers.
The namespaces belong to the workers' processes and vanish with them; the machine's own network is not touched.
Linux, with unshare and nsenter (util-linux) and ip and tc (iproute2). What shaping can be trusted up to depends on the
machine: 1gbit is true with two cores, 10gbit is not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Network", "launch", "why_not"]


@dataclass(frozen=True)
class Network:
    """Hosts and the links between them.

    Attributes:
        hosts: number of hosts, 1 to 250.
        rate: of each host's link, both ways, such as "100mbit"; None: as fast as this machine can.
        isolated: hosts are network namespaces; False: one host, this machine as it is.
    """

    hosts: int = 2
    rate: str | None = None
    isolated: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250:
            raise ValueError(f"hosts={self.hosts}; expected 1 to 250")
        if self.rate is not None and not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]bit", self.rate):
            raise ValueError(f"rate={self.rate!r}; expected a number with kbit, mbit or gbit, such as 100mbit")
        if self.rate is not None and self.hosts == 1:
            raise ValueError(f"rate={self.rate!r} with one host; a link that can be shaped needs two")
        if not self.isolated and self.hosts > 1:
            raise ValueError(f"hosts={self.hosts} without namespaces; more than one host needs them")


@contextmanager
def launch(
    command: Sequence[str],
    network: Network,
    *,
    workers: int = 1,
    timeout: float = 600.0,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process that runs ``command`` on every host; whatever is left of it ends with the block.

    Its exit status is 0, that of the first worker that failed, or 124 after ``timeout``. Workers write to its stdout;
    what they write to stderr comes at their end, the first failure last. If this process dies, so do they.

    Args:
        command: program and arguments.
        network: where the workers run.
        workers: number of workers on each host.
        timeout: seconds until all are ended.
        stdout: as for ``subprocess.Popen``.
        stderr: as for ``subprocess.Popen``.
    """
    job = {"command": tuple(command), "workers": workers, "timeout": timeout, **asdict(network)}
    agent = [sys.executable, str(Path(__file__).with_name("agent.py")), json.dumps(job)]
    process = subprocess.Popen(
        [*_unshare(), *agent] if network.isolated else agent,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then closes the lifeline
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _unshare() -> list[str]:
    """Return the command whose child is process 1 of its own namespaces: when it ends, the kernel ends all others."""
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]


def why_not(network: Network) -> str | None:
    """Return why ``network`` cannot be made on this machine, in one line; None if it can."""
    if not network.isolated:
        return None
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            package = "util-linux" if program in ("unshare", "nsenter") else "iproute2"
            return f"the program {program} is missing (install {package})"
    with launch(["true"], network, timeout=20, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait()
    return None if process.returncode == 0 else (errors.strip() or "unshare failed").splitlines()[-1]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--workers", type=int, default=1, help="workers on each host (default 1)")
    parser.add_argument("--rate", help="of each link, both ways, such as 100mbit (default: not limited)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds until all workers are ended (default 600)"
    )
    parser.add_argument("command", nargs="+", help="what each worker runs, after --")
    options = parser.parse_args()
    try:
        network = Network(options.hosts, options.rate)
    except ValueError as error:
        parser.error(str(error))
    if reason := why_not(network):
        print(f"no network namespaces here: {reason}", file=sys.stderr)
        return 1
    with launch(options.command, network, workers=options.workers, timeout=options.timeout) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
