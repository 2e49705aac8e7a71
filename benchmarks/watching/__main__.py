"""Faults in jobs that `fl.watch()` watches: whether rank 0's log names who it was, and where.

    python -m benchmarks.watching --out benchmarks/results
    python -m benchmarks.watching --only killed,slow_loader --backends gloo
    python -m benchmarks.watching --healthy 1800

Each round trains a program that knows only torch, `benchmarks.watching.program`, on three ranks, with gloo or with the
backend "fusionlayer", and does one thing to rank 1. A round is good if within ten seconds the log of rank 0, or of the
first rank alive, has a line that blames rank 1 and names the line of the program. `--healthy` trains so many seconds
with steps of uneven length and counts lines: each is a false alarm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of

from .program import FAULTS

__all__ = ["Row", "main", "play"]

RANKS = 3
WHO = 1
AT = 40
LIMIT = 10.0
_PATIENCE = 45.0
# Faults in which no rank alone is wrong: what must be named is one of these sets.
_ALSO = {"waits_for_nobody": ((1,), (2,), (1, 2), (0, 1, 2), (0, 1))}


@dataclass(frozen=True)
class Row:
    """What became of a fault.

    Attributes:
        fault: its name.
        backend: of the job.
        seconds: from the fault to the first line that blames the culprit; None: there was none.
        place: whether that line, or a later one, names a line of the program.
        line: it.
        others: lines that blame other ranks.
        cost: share of a core that the watching thread of a rank has taken, at most; None: the ranks did not end well.
    """

    fault: str
    backend: str
    seconds: float | None
    place: bool
    line: str
    others: tuple[str, ...]
    cost: float | None = None

    @property
    def is_good(self) -> bool:
        """Whether culprit and place were named in time; of a healthy job, whether nothing was said."""
        if self.fault == "healthy":
            return not self.others and self.cost is not None
        return self.seconds is not None and self.seconds <= LIMIT and self.place


def play(fault: str, backend: str, *, uneven: float = 0.0, seconds: float = 600.0, patience: float = _PATIENCE) -> Row:
    """Run one job."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(RANKS)]
        status = Path(folder) / "status.json"
        processes = [
            _start(rank, store.port, fault, backend, uneven, seconds, logs[rank], status) for rank in range(RANKS)
        ]
        begun, struck, blamed = time.monotonic(), None, None
        try:
            while time.monotonic() - begun < (patience if fault else seconds + patience):
                time.sleep(0.1)
                text = "".join(log.read_text(errors="replace") for log in logs)
                struck = struck or (fault and '"fault"' in text and time.time())
                blamed = blamed or (_blames(text, fault) and time.time())
                if all(process.poll() is not None for process in processes):
                    break
                if blamed and time.time() - blamed > 3.0:
                    break
                if struck and time.time() - struck > 2 * LIMIT:
                    break
        finally:
            _end(processes)
        text = "".join(log.read_text(errors="replace") for log in logs)
    moments = [json.loads(line)["at"] for line in text.splitlines() if line.startswith('{"fault"')]
    lines = list(dict.fromkeys(_lines(text)))
    good = [line for line in lines if _blames(line, fault)]
    took = max(0.0, blamed - min(moments)) if blamed and moments else None
    place = any("program.py:" in line for line in good)
    return Row(
        fault or "healthy", backend, took, place, (good or [""])[-1], tuple(li for li in lines if li not in good)
    )


def _start(
    rank: int, port: int, fault: str, backend: str, uneven: float, seconds: float, log: Path, status: Path
) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"},
        **{"GLOO_SOCKET_IFNAME": "lo", "FUSIONLAYER_STATUS": str(status), "PYTHONUNBUFFERED": "1"},
    }
    what = [fault or "none", str(WHO), str(AT), str(uneven), str(seconds), backend, "1"]
    with log.open("wb") as out:
        command = [sys.executable, "-m", "benchmarks.watching.program", *what]
        return subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def _lines(text: str) -> list[str]:
    return [
        re.sub(r"^.*fusionlayer watch, [\d:]+: ", "", li) for li in text.splitlines() if "fusionlayer watch, " in li
    ]


def _blames(text: str, fault: str) -> bool:
    wanted = _ALSO.get(fault, ((WHO,),))
    return any(_culprits(line) in wanted for line in _lines(text) or text.splitlines())


def _culprits(line: str) -> tuple[int, ...] | None:
    """Return the ranks that a line blames."""
    if line.startswith("ranks differ"):
        odd = re.match(r"ranks differ in call \d+: rank (\d+) in", line)
        return (int(odd[1]),) if odd else None
    if line.startswith("ranks wait for each other"):
        return tuple(int(rank) for rank in re.findall(r"rank (\d+) ", line))
    found = re.match(r"ranks? ([\d, ]+) (?!goes)", line)
    return tuple(int(rank) for rank in found[1].split(", ")) if found else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if over one fault was missed, or if there were false alarms."""
    parser = driver.make_parser("watching", __doc__)
    parser.add_argument("--only", type=comma_separated(one_of(tuple(FAULTS))), default=tuple(FAULTS), help="faults")
    parser.add_argument("--backends", type=comma_separated(str), default=("gloo", "fusionlayer"), help="of the jobs")
    parser.add_argument("--healthy", type=count(), default=0, help="seconds of healthy, uneven training instead")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    environment = driver.begin(options)
    rows = []
    for backend in options.backends:
        for fault in ("",) if options.healthy else options.only:
            row = play(fault, backend, uneven=0.4 if not fault else 0.0, seconds=float(options.healthy or 600))
            rows.append(row)
            mark = "good" if row.is_good else "BAD"
            print(f"{mark:5}{backend:12}{row.fault:22}{row.seconds or -1:6.1f} s  {row.line}", flush=True)
            for other in row.others:
                print(f"{'':48}{other}", flush=True)
    good = sum(row.is_good for row in rows)
    if options.healthy:
        title = f"Healthy, uneven training for {options.healthy} s on {RANKS} ranks: false alarms"
        shown = [
            {"backend": r.backend, "false alarms": len(r.others), "thread's share of a core": r.cost} for r in rows
        ]
    else:
        title = f"Faults on {RANKS} ranks: {good} of {len(rows)} named with rank and place within {LIMIT:g} s"
        shown = [
            {
                "backend": row.backend,
                "fault": row.fault,
                "named after (s)": row.seconds,
                "what rank 0's log says": row.line,
            }
            for row in rows
        ]
    theme = "watching-healthy" if options.healthy else "watching"
    driver.finish(options, theme, title, environment, [asdict(row) for row in rows], shown)
    return int(len(rows) - good > (0 if options.healthy else 1))


if __name__ == "__main__":
    driver.leave(main)
