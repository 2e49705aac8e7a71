"""How programs end that are ended in the middle of training: as they ask, at once, and without a trace."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.exits import CASES
from tests.packaging.project_tree import ROOT
from tests.tiers import exhaustive

STATUS = {"exit": 7, "error": 1, "interrupt": -signal.SIGINT, "terminate": -signal.SIGTERM}
FAST = ("exit in a hook", "interrupt while waiting", "terminate both")
OTHERS = tuple(case for case in CASES if case not in FAST)


@pytest.mark.medium
@pytest.mark.parametrize("cases", [FAST, pytest.param(OTHERS, marks=(exhaustive))], ids=["some cases", "other cases"])
def test_a_program_ends_as_it_asks_and_leaves_nothing(cases: tuple[str, ...], tmp_path: Path) -> None:
    for start in range(0, len(cases), 5):
        folder = tmp_path / str(start)
        folder.mkdir()
        chosen = list(dict.fromkeys(cases[start : start + 5]))
        done = subprocess.run(
            [sys.executable, "-m", "tests.integrations.exits", str(folder), *chosen],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        told = json.loads(done.stdout)
        assert told.pop("shared memory") == []
        for case, found in told.items():
            status = STATUS[case.split()[0]]
            assert found["codes"] == [status if "both" in case else 1, status], (case, found["errors"])
            assert (found["running"], found["files"]) == ([], []), case
            if "both" not in case:
                # A thread of torch's may log at any time, also behind the error that ends the program.
                last = [line for line in found["errors"][0].strip().splitlines() if "[c10d]" not in line][-1]
                assert "TransportError" in last and "rank 1 " in last.partition("rank 0: ")[2], (case, last)


# The program keeps the interpreter's lock from before the collective ends until it ends itself. So gloo's thread, which
# needs the lock to let go of the tensor, cannot have it before the exit.
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import fusionlayer

_, backend, how = sys.argv
if how == "forked" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
"""


@pytest.mark.medium
@pytest.mark.parametrize(("backend", "how"), [("fusionlayer", "alone"), ("gloo", "alone"), ("fusionlayer", "forked")])
def test_a_thread_of_gloo_that_still_holds_a_tensor_does_not_abort_the_exit(backend: str, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, backend, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
