"""Rounds of `benchmarks.watching`: a job, a fault, and what the log of the first rank alive says of it."""

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
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.lab import Network, launch, why_not

__all__ = ["LIMIT", "RANKS", "Row", "play", "why_no_lab"]

RANKS = 3
WHO = 1
AT = 40
LIMIT = 10.0
_PATIENCE = 60.0
# Seconds that the processes of a healthy job may take to start and to end.
_STARTING = 300.0
_LAB = Network(RANKS, rate="1gbit")
# Faults in which no rank alone is wrong: what must be named is one of these sets.
_ALSO = {"waits_for_nobody": ((1,), (2,))}


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


# Faults that happen between two ranks, and in no line of the program.
_PLACELESS = ("slow_interface",)


def play(fault: str, backend: str, *, uneven: float = 0.0, seconds: float = 600.0, patience: float = _PATIENCE) -> Row:
    """Run one job; ``fault``: "" for none, in which case it trains so many ``seconds``."""
    if fault in _PLACELESS:
        return play_in_lab(fault, backend)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(RANKS)]
        status = Path(folder) / "status.json"
        processes = [
            _start(rank, store.port, fault, backend, uneven, seconds, logs[rank], status) for rank in range(RANKS)
        ]
        begun, struck, blamed = time.monotonic(), None, None
        try:
            while time.monotonic() - begun < (patience if fault else seconds + _STARTING):
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
    return _row(text, fault, backend, blamed or None)


def why_no_lab() -> str | None:
    """Return why faults of the network cannot be played here; None if they can."""
    return why_not(_LAB)


def play_in_lab(fault: str, backend: str) -> Row:
    """Run one job on hosts of their own, with links that a fault may change."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(WATCHED_WIDTH="512", FUSIONLAYER_STATUS=f"{folder}/status.json")
        command = [sys.executable, "-m", "benchmarks.watching.program", fault, str(WHO), "150", "0", "30", backend, "1"]
        with launch(command, _LAB, timeout=90.0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            text = process.stdout.read()
        os.environ.pop("WATCHED_WIDTH")
    return _row(text, fault, backend, None)


def _row(text: str, fault: str, backend: str, seen: float | None) -> Row:
    """Return what the logs of all ranks say; ``seen``: when the culprit was named, None: as the line itself says."""
    # Ranks that share a pipe may write between another's text and the end of its line.
    moments = [json.loads(each)["at"] for each in re.findall(r'{"fault"[^}]*}', text)]
    lines = list(dict.fromkeys(_lines(text)))
    good = [line for line in lines if _culprits(line) in _ALSO.get(fault, ((WHO,),))]
    if seen is None and good and moments:
        stamp = next(each for each in text.splitlines() if good[0] in each)
        hours = re.search(r"watch, (\d+):(\d+):(\d+): ", stamp)
        assert hours is not None
        day = time.localtime(min(moments))
        seen = time.mktime((*day[:3], *map(int, hours.groups()), *day[6:]))
    took = max(0.0, seen - min(moments)) if seen and moments else None
    place = any("program.py:" in line for line in good) or fault in _PLACELESS
    costs = [json.loads(each)["cost"] for each in re.findall(r'{"cost"[^}]*}', text)]
    others = tuple(line for line in lines if line not in good)
    cost = max(costs) if len(costs) == RANKS else None
    return Row(fault or "healthy", backend, took, place, (good or [""])[-1], others, cost)


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
    return any(_culprits(line) in wanted for line in _lines(text))


def _culprits(line: str) -> tuple[int, ...] | None:
    """Return the ranks that a line blames."""
    if line.startswith("ranks differ"):
        odd = re.match(r"ranks differ in call \d+: rank (\d+) in", line)
        return (int(odd[1]),) if odd else None
    if line.startswith("ranks wait for each other"):
        # The odd one comes first.
        return (int(re.findall(r"rank (\d+) ", line)[0]),)
    found = re.match(r"(?:links of )?ranks? (\d+(?:, \d+)*) (?!go(?:es)? )", line)
    return tuple(int(rank) for rank in found[1].split(", ")) if found else None
