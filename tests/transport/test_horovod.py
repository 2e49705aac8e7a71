"""The transport over a running Horovod, where it is installed for this torch."""

import os
import subprocess
import sys

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.transport.links.horovod import load_horovod
from tests.mpi import ROOT


def why_not() -> str:
    """Return why Horovod cannot be used here, nothing if it can."""
    done = subprocess.run([sys.executable, "-c", "import horovod.torch"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no Horovod for this torch: {done.stderr.strip().splitlines()[-1]}"


@pytest.mark.medium
def test_conformance() -> None:
    if why_not():
        pytest.skip(why_not())
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "3", "--gloo", sys.executable, "-m"]
        + ["tests.transport.horovod_worker"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "FUSIONLAYER_TRANSPORT": "horovod",
            "OMP_NUM_THREADS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split(":")[-1] for line in done.stdout.splitlines() if "conforms" in line)
    assert lines == [f"rank {rank} 3 {rank} 3 conforms" for rank in range(3)]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match="transport 'horovod' needs Horovod, built for this torch"):
        load_horovod()
