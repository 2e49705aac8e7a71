"""Links that delay, lose and corrupt: what the hosts see of them, and what is said where they cannot be."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Network, launch
from benchmarks.lab.check import measure

from .labs import ROOT, needs_switch, netns, run, thorough
from .test_lab import NOT_SHAPED

TRANSFER = """
import os, random, socket, time
data = random.Random(1).randbytes(2_000_000)
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.1", 4000)) as server:
        got = server.accept()[0].makefile("rb").read()
    print("length", len(got), "wrong", sum(a != b for a, b in zip(got, data)))
else:
    end = time.monotonic() + 180
    while True:
        try:
            peer = socket.create_connection(("10.77.0.1", 4000), timeout=180)
            break
        except (ConnectionRefusedError, TimeoutError):
            assert time.monotonic() < end
            time.sleep(0.05)
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    names, values = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    print("again", dict(zip(names, values))["RetransSegs"])
"""


def transfer(network: Network) -> tuple[int, int, int]:
    """Return how many bytes of two million arrived, how many of them wrong, and how many segments were sent again."""
    status, output = run([sys.executable, "-c", TRANSFER], network)
    assert status == 0, output
    words = output.split()
    return tuple(int(words[words.index(key) + 1]) for key in ("length", "wrong", "again"))  # type: ignore[return-value]


@needs_switch
class TestLinks:
    pytestmark = [*netns, thorough]

    def test_delayed(self) -> None:
        seen = measure(Network(2, "20mbit", delay="5ms"), seconds=1)
        assert seen.round_trip[1] >= 0.010
        assert seen.after_idle[1] >= 0.010 + (65536 - 2 * 4608) * 8 / 20e6
        assert all(rate < NOT_SHAPED for rate in (seen.single, *seen.both))

    def test_lost_and_reordered_frames_are_as_many_as_asked(self) -> None:
        seen = measure(Network(2, "20mbit", delay="1ms", loss=0.05, reordering=0.1), seconds=1)
        # Of 2000 datagrams, give or take four standard deviations.
        assert 0.03 < seen.lost < 0.07
        assert 0.07 < seen.overtaken < 0.13

    def test_workers_end_with_the_switch(self) -> None:
        script = "test $RANK = 1 || kill -9 $(grep -l ^switch- /proc/[0-9]*/comm | cut -d/ -f3); sleep 600"
        with launch(
            ["sh", "-c", script], Network(2, delay="1ms"), timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait() == 1
        assert output.splitlines()[-1] == "the switch between the hosts has ended; the workers were ended too"


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_switch_builds_without_warnings(tmp_path: Path) -> None:
    source = ROOT / "benchmarks" / "lab" / "switch.c"
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "switch"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
