"""A cluster of Slurm on this machine: the controller and the daemons of a few nodes, all with files in one folder."""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusionlayer.cli.spawn import without_launcher
from tests.ports import free_port

from .places import ROOT, needs_namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "sbatch", "scontrol", "sinfo", "srun")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
NODES = "node[01-03,07]"

needs_slurm = [
    needs_namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons start tasks as another user: needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster; ``folder`` has its files and is where commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = without_launcher() | {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": path,
            "PYTHONPATH": str(ROOT),
        }

    def run(self, *command: str, seconds: float = 180, **variables: str) -> subprocess.CompletedProcess[str]:
        """Return how a command has ended."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ | variables,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def batch(self, *arguments: str) -> str:
        """Return the number of a batch job, which must succeed."""
        done = self.run("sbatch", "--parsable", *arguments)
        assert done.returncode == 0, done.stderr + self.logs()
        job, end = done.stdout.strip(), time.monotonic() + 180
        while " JobState=COMPLETED " not in (told := self.run("scontrol", "show", "job", job, "--oneliner").stdout):
            outputs = "".join(out.read_text() for out in self.folder.glob(f"*-{job}.out"))
            assert re.search(r" JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING) ", told), told + outputs + self.logs()
            assert time.monotonic() < end, told + outputs + self.logs()
            time.sleep(0.2)
        return job

    def environments(self, *options: str) -> list[Mapping[str, str]]:
        """Return the variables of each task that srun starts, by rank."""
        folder = self.folder / "tasks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        done = self.run("srun", *options, "sh", "-c", f"env -0 > {folder}/$SLURM_PROCID")
        assert done.returncode == 0, done.stderr + self.logs()
        return [read_variables(folder / str(rank)) for rank in range(len([*folder.iterdir()]))]

    def logs(self) -> str:
        """Return the ends of what the daemons have logged."""
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


def read_variables(file: Path) -> Mapping[str, str]:
    """Return what ``env -0`` has written."""
    return dict(line.split("=", 1) for line in file.read_text().split("\0") if line)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start Slurm with four nodes, whose names lead to this host within their tasks; end it with the block."""
    nodes = ["node01", "node02", "node03", "node07"]
    ports = [free_port() for _ in range(5)]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, host=platform.node(), controller=ports[0], nodes=NODES, ports=",".join(map(str, ports[1:]))
        )
    )
    (folder / "state").mkdir()
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(nodes)}\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    made = Cluster(folder)
    daemons = [["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files], ["slurmctld", "-D"]]
    named = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
    daemons += [["unshare", "--mount", "sh", "-c", named, "sh", "slurmd", "-D", "-N", node] for node in nodes]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with open(folder / f"{command[0]}.out", "ab") as out:
                running.append(subprocess.Popen(command, env=made.environ, stdout=out, stderr=out, cwd=folder))
            if command[0] == "munged":
                _await(lambda: (folder / "munge.sock").exists(), made, running)
        _await(lambda: made.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "4", made, running)
        yield made
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(180)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(is_so: Callable[[], bool], made: Cluster, running: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 180
    while not is_so():
        ended = [process.args for process in running if process.poll() is not None]
        assert not ended and time.monotonic() < end, f"ended: {ended}\n{made.logs()}"
        time.sleep(0.1)
