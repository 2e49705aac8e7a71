"""Where a process stands in its job, and jobs started by real launchers."""

import atexit
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, combinations
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

import fusionlayer as fl
from fusionlayer import launch
from fusionlayer.base.errors import TransportError
from fusionlayer.launch import RankInfo, find_place, make_store
from fusionlayer.launch.slurm import meeting_point
from tests.harness import run_ranks
from tests.loops import looped
from tests.mpi import mpirun, needs_mpirun
from tests.ports import free_port
from tests.tiers import exhaustive, tiered

ROOT = Path(__file__).resolve().parents[2]

LAUNCHERS = {
    name: variables.split()
    for name, variables in {
        "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
        "horovodrun": "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
        "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpich": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
        "jsrun": "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE",
        "mvapich": "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE",
        "pals": "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE",
    }.items()
}


def environment(launcher: str, *values: object) -> dict[str, str]:
    """Return the launcher's variables with these values, a None left out."""
    named = zip(LAUNCHERS[launcher], values, strict=False)
    return {name: str(value) for name, value in named if value is not None}


# ---- find_place -----------------------------------------------------------------------------------------------------


@looped("launcher", LAUNCHERS)
def test_each_launcher_is_understood(launcher: str) -> None:
    assert find_place(environment(launcher, 5, 8, 1, 4)) == RankInfo(5, 8, 1, 4, launcher)
    assert find_place(environment(launcher, 1, 4)) == RankInfo(1, 4, 1, 4, launcher)


def test_nobody_launched_or_the_inner_launcher_wins() -> None:
    assert find_place({}) == RankInfo(0, 1, 0, 1, "single")
    assert find_place({"LOCAL_RANK": "3", "MASTER_ADDR": "x"}) == RankInfo()
    nested = {**environment("mpirun", 1, 2, 0, 1), **environment("torchrun", 5, 8, 1, 4)}
    assert find_place(nested) == RankInfo(5, 8, 1, 4, "torchrun")
    assert find_place({**environment("mpirun", 1, 2), "RANK": "0"}).launcher == "mpirun"


@looped(
    "environ, text",
    [
        (environment("torchrun", 0, "two"), "torchrun variables .*'WORLD_SIZE': 'two'.*expected whole numbers"),
        (environment("mpirun", "", 2), "expected whole numbers"),
        (environment("mpich", 0, 2, "first"), "expected whole numbers"),
        (environment("torchrun", 2, 2, 0, 1), "rank 2 of 2.*expected 0 <= rank < size"),
        (environment("mpirun", -1, 2, 0, 1), "rank -1 of 2"),
        (environment("horovodrun", 0, 2, 2, 2), "local rank 2 of 2"),
        (environment("torchrun", 0, 0), "rank 0 of 0"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not"),
        (
            {**environment("torchrun", 0, 1), **environment("mpirun", 1, 2)},
            "torchrun variables say 1 processes, mpirun variables 2.*unset RANK and WORLD_SIZE",
        ),
        ({"SLURM_NTASKS": "4"}, "4 tasks, and this process is none of them: start it by srun or torchrun"),
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script
            "4 tasks, and this process is none of them",
        ),
        ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}, "SLURM_PROCID=1 and no SLURM_NTASKS: a container or a wrapper"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, "PET_NNODES=2, .*start the script by torchrun"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8 and no RANK.*by torchrun"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "4"}, "srun variables say rank 4 of 4"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "x"}, "SLURM_PROCID='x'; expected a whole number, as srun sets it"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2x"}, "PER_NODE='2x'; expected numbers"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}, "PMIX_RANK=0 and no number of processes"),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "job"}, "PMIX_RANK=2 and no number of processes.*set RANK and"),
    ],
)
def test_variables_that_make_no_sense(environ: dict[str, str], text: str) -> None:
    with pytest.raises(fl.ConfigError, match=text):
        find_place(environ)


def srun(rank: int, size: int, **more: object) -> dict[str, str]:
    """Return variables of Slurm for a task; numbers of job and step as they are in real ones."""
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), **{f"SLURM_{k}": str(v) for k, v in more.items()}}


def test_tasks_of_srun() -> None:
    assert find_place(srun(1, 3)) == RankInfo(1, 3, 1, 3, "srun")
    uneven = {"STEP_NUM_TASKS": 7, "TASKS_PER_NODE": "9", "STEP_TASKS_PER_NODE": "2(x3),1"}
    assert find_place(srun(5, 9, LOCALID=1, NODEID=2, **uneven)) == RankInfo(5, 7, 1, 2, "srun")
    assert find_place(srun(6, 9, LOCALID=0, NODEID=3, **uneven)) == RankInfo(6, 7, 0, 1, "srun")
    assert find_place({**srun(0, 1), "PMIX_RANK": "0"}) == RankInfo()
    assert find_place(srun(0, 1)) == RankInfo(), "an interactive shell, or a batch script of one task"
    started = {**srun(1, 2, LOCALID=0), **environment("torchrun", 5, 8, 1, 4)}
    assert find_place(started) == RankInfo(5, 8, 1, 4, "torchrun"), "srun has started torchrun on each node"
    own = {**srun(1, 2, LOCALID=0, NODEID=1, STEP_NUM_TASKS=2, STEP_TASKS_PER_NODE="1(x2)"), "PMI_RANK": "1"}
    assert find_place({**own, "PMI_SIZE": "2"}) == RankInfo(1, 2, 0, 1, "srun"), "by srun --mpi=pmi2"
    hydra = {**own, **environment("mpich", 1, 2, 1, 2)}
    assert find_place(hydra) == RankInfo(1, 2, 1, 2, "mpich"), "srun has started mpiexec"
    batch = {**srun(0, 8, JOB_ID=7), **environment("torchrun", 0, 2, 0, 2)}
    assert find_place(batch) == RankInfo(0, 2, 0, 2, "torchrun"), "on a part of what the batch script has"


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


# All that tells a process of its job of four, on two hosts, and of these variables those that alone say that there are
# others. "{hosts}" is a file that names its hosts, and "+" a blank.
SEVERAL = {
    "a batch step of Slurm": (
        "SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NTASKS_PER_NODE=2 "
        "SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_CPUS_PER_NODE=8,8 SLURM_JOB_NODELIST=n[1-2] SLURM_NODELIST=n1,n2",
        "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
    ),
    "a batch step of Slurm on one node": (
        "SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NTASKS_PER_NODE=4",
        "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NNODES=1 SLURM_JOB_NODELIST=n1 "
        "SLURM_TASKS_PER_NODE=4 SLURM_JOB_CPUS_PER_NODE=8",
    ),
    "a task of srun": (
        "SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_LOCALID=1 SLURM_NODEID=1 "
        "SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NNODES=2",
        "SLURM_JOB_ID=77",
    ),
    "a script of PBS": ("PBS_NUM_NODES=2 PBS_NODEFILE={hosts}", "PBS_JOBID=7 PBS_NP=4 PBS_NODENUM=0 PBS_TASKNUM=1"),
    "a task of pbsdsh": ("PBS_NODENUM=1 PBS_VNODENUM=3 PBS_NODEFILE={hosts}", "PBS_JOBID=7 PBS_TASKNUM=4"),
    "a script of LSF": (
        "LSB_HOSTS=n1+n1+n2+n2 LSB_MCPU_HOSTS=n1+2+n2+2 LSB_DJOB_HOSTFILE={hosts}",
        "LSB_JOBID=7 LSB_DJOB_NUMPROC=4",
    ),
    "a task of jsrun": (
        "JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 "
        "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_RANK=3",
        "LSB_JOBID=7",
    ),
    "a task of flux run": (
        "FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 PMI_RANK=3 PMI_SIZE=4",
        "FLUX_JOB_ID=f1",
    ),
    "a rank of PALS": (
        "PALS_RANKID=3 PMI_RANK=3 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PBS_NODEFILE={hosts}",
        "PALS_APID=7 PBS_JOBID=7",
    ),
    "a rank of Hydra": ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "PMI_FD=9"),
    "a rank of MVAPICH": (
        "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
        "MV2_X=0",
    ),
    "a pod of Kubernetes": ("JOB_COMPLETION_INDEX=3", "HOSTNAME=job-3 KUBERNETES_SERVICE_HOST=10.0.0.1"),
    "PMIx": ("PMIX_RANK=3", "PMIX_NAMESPACE=job"),
}


@looped("what", SEVERAL)
def test_a_process_of_several_never_trains_alone_whatever_variables_are_left(what: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1\nn1\nn2\nn2\n")
    telling, silent = (
        {name: value.replace("+", " ").format(hosts=tmp_path / "hosts") for name, value in pairs(text).items()}
        for text in SEVERAL[what]
    )
    rank = int(telling.get("SLURM_PROCID", 3 if "SLURM" not in SEVERAL[what][0] else 0))
    for kept in chain.from_iterable(combinations(telling, n) for n in range(1, len(telling) + 1)):
        some = {name: telling[name] for name in kept}
        for environ in (some, {**silent, **some}):
            try:
                place = find_place(environ)
            except fl.ConfigError as error:
                named = any(name in str(error) for name in environ)
                assert named or "of Slurm has 4 tasks" in str(error) or "variables say rank" in str(error)
            else:
                assert (place.rank, place.size) == (rank, 4), environ
    assert find_place(silent) == RankInfo(), "one process may have it all"
    if "script" in what or "step" in what or "pod" in what:
        assert find_place({**silent, **telling, "RANK": "0", "WORLD_SIZE": "1"}).size == 1, "as the errors advise"


def test_flux_and_pals_tell_places() -> None:
    flux = pairs("FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 PMI_RANK=3 PMI_SIZE=4")
    assert find_place({**flux, "FLUX_JOB_NNODES": "2"}) == RankInfo(3, 4, 1, 2, "flux"), "until ranks count"
    on_one = {**flux, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"}
    assert find_place(on_one) == RankInfo(3, 4, 3, 4, "flux"), "they meet by a file"
    pals = pairs("PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4")
    assert find_place(pals) == RankInfo(5, 8, 1, 4, "pals")


def test_tasks_of_several_nodes_meet_on_that_of_rank_0() -> None:
    hosts = {"gpu[07-09,12],login": "gpu07", "a-3": "a-3", "n[1,3]": "n1", "r[1-2]c[03-08]": "r1c03", "x1,x2": "x1"}
    ports = set()
    for step, (nodes, first) in enumerate(hosts.items()):
        host, port = meeting_point(srun(0, 4, JOB_ID=4711, STEP_ID=step, STEP_NODELIST=nodes))
        assert host == first and 1024 < port < 32_768
        ports.add(port)
    assert len(ports) == len(hosts)
    for nodes in ("-oProxyCommand=x", "$(x)", "a b", "n/1"):
        with pytest.raises(fl.ConfigError, match="begins with no name of a host; set MASTER_ADDR"):
            meeting_point(srun(0, 4, JOB_ID=4711, STEP_NODELIST=nodes))
    with pytest.raises(fl.ConfigError, match="no SLURM_STEP_NODELIST or SLURM_JOB_ID.*set MASTER_ADDR and MASTER_PORT"):
        make_store(RankInfo(0, 4, 0, 2, "srun"), 1.0, srun(0, 4, JOB_ID=7))


def test_ranks_count_those_of_their_host_where_no_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hosts = HashStore(), iter("ababa")

    def rank_main(rank: int) -> RankInfo:
        return launch.settle(
            RankInfo(rank, 4, rank, 4, "torchrun"), store, 20.0, {"RANK": str(rank), "WORLD_SIZE": "4"}
        )

    monkeypatch.setattr(launch, "node_name", lambda: next(hosts))
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(rank_main, range(4))]
    sizes = {(place.local_rank, place.local_size) for place in found}
    assert sizes == {(0, 2), (1, 2)} and [place.rank for place in found] == [0, 1, 2, 3]
    told = RankInfo(1, 4, 1, 2, "torchrun")
    assert launch.settle(told, HashStore(), 20.0, environment("torchrun", 1, 4, 1, 2)) == told


def test_meeting_point_that_makes_no_sense() -> None:
    with pytest.raises(fl.ConfigError, match="several hosts .2 here. and no MASTER_ADDR and no MASTER_PORT.*mpirun -x"):
        make_store(RankInfo(0, 4, 0, 2, "mpirun"), 1.0, {})
    with pytest.raises(fl.ConfigError, match="several hosts .2 here. and no MASTER_PORT: start"):
        make_store(RankInfo(0, 4, 0, 2, "mpirun"), 1.0, {"MASTER_ADDR": "host0"})
    with pytest.raises(fl.ConfigError, match="MASTER_PORT='http'; expected a port"):
        make_store(RankInfo(0, 2, 0, 2), 1.0, {"MASTER_ADDR": "localhost", "MASTER_PORT": "http"})
    for port in ({}, {"HOROVOD_GLOO_RENDEZVOUS_PORT": "x"}):
        with pytest.raises(fl.ConfigError, match="HOROVOD_GLOO_RENDEZVOUS_PORT="):
            make_store(RankInfo(0, 2, 0, 2), 1.0, {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "localhost", **port})


# ---- real jobs ------------------------------------------------------------------------------------------------------

TRAIN = """
import torch
import fusionlayer as fl

fl.init()
fl.init()
torch.manual_seed(fl.rank())  # as without a seed: a model of its own on each rank
model = torch.nn.Linear(300, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fl.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
assert fl.all_gather(model.weight.detach().flatten()[None], "raw").unique(dim=0).shape[0] == 1
place = f"{fl.rank()} {fl.size()} {fl.local_rank()} {fl.local_size()}"
print(f"{place} {optimizer.fusion_plan is not None}\\n", end="", flush=True)  # one write, so that lines stay whole
"""

AGAIN = """
fl.shutdown()
fl.shutdown()
assert not fl.is_initialized()
fl.init()
x = fl.all_reduce(torch.tensor([float(fl.rank())]), "raw", op=fl.Sum)
assert x.item() == sum(range(fl.size()))
fl.shutdown()
"""

CONFIGURED = """
plan = optimizer.fusion_plan
assert len(plan.buckets) == 2, plan
assert {(b.codec, b.options["bits"], b.algorithm) for b in plan.buckets} == {("int", 4, "one_shot")}
transport = fl.context.transport()
assert transport._checked == {1 - fl.rank()} and transport.timeout == 33
other = torch.nn.Linear(3, 3)
second = fl.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), codec="raw", planner="horovod")
other(torch.randn(4, 3)).sum().backward()
second.step()
optimizer.close()
"""

UNINITIALIZED = """
import torch, fusionlayer as fl
leaf = torch.zeros(1, requires_grad=True)
for call in (fl.rank, fl.size, fl.local_rank, fl.local_size, lambda: fl.all_reduce(torch.zeros(1)),
             lambda: fl.DistributedOptimizer(torch.optim.SGD([leaf], lr=1.0))):
    try:
        call()
    except fl.UsageError as error:
        assert "call fusionlayer.init() first" in str(error)
    else:
        raise AssertionError(call)
assert not fl.is_initialized()
"""


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the environment without a trace of launchers, with the project to import and these variables."""
    traces = ("OMPI_", "PMI_", "PMIX_", "MPI_", "HOROVOD_", "FUSIONLAYER_", "MASTER_", "TORCHELASTIC_", "SLURM_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(traces) and name not in LAUNCHERS["torchrun"]
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def write(folder: Path, text: str) -> str:
    script = folder / "train.py"
    script.write_text(text)
    return str(script)


def finish(command: list[str], **variables: str) -> str:
    """Return what the command printed; it must succeed."""
    done = subprocess.run(command, env=clean_environment(**variables), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.medium
@pytest.mark.parametrize("started", tiered(["by the harness", "by torchrun"], lambda started: started != "by torchrun"))
def test_torchrun_with_configuration_and_timeline(tmp_path: Path, started: str) -> None:
    """In the fast tier ranks fork from the harness: tests/test_documents.py starts torchrun."""
    (tmp_path / "settings.yaml").write_text(
        "codec: int\ncodec_options: {bits: 4, rounding: stochastic}\nplanner: wfbp\nplanner_options: {}\n"
        "checksum: true\ntimeout: 77\nthreads: 1\n"
    )
    program = TRAIN + CONFIGURED
    settings = {
        "FUSIONLAYER_CONFIG": str(tmp_path / "settings.yaml"),
        "FUSIONLAYER_TIMEOUT": "33",
        "FUSIONLAYER_TIMELINE": str(tmp_path / "trace"),
    }
    if started == "by torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        printed = sorted(finish([*command, write(tmp_path, program)], **settings).splitlines())
    else:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables = [{**environment("torchrun", rank, 2), **meeting, **settings} for rank in range(2)]
        printed = run_ranks(run_script, 2, program, variables, backend=None)
    assert printed == ["0 2 0 2 True", "1 2 1 2 True"]
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.{rank}").read_text())
        names = [event["name"] for event in events]
        assert names.count("ONE_SHOT") == 4 and names.count("DENSE") == 1
        assert {"NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"} <= set(names)
        assert {event["pid"] for event in events} == {rank}


@exhaustive(guarded_by="tests/integrations/test_launch.py::test_tasks_that_srun_starts_train_together")
@pytest.mark.medium
@needs_mpirun
def test_mpirun_of_a_shell_that_starts_python(tmp_path: Path) -> None:
    """So the processes have no common parent."""
    script = write(tmp_path, TRAIN + AGAIN)
    root = {f"{mpi}_ALLOW_RUN_AS_ROOT{suffix}": "1" for mpi in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    program = ["sh", "-c", f"{sys.executable} {script}; exit $?"]
    printed = finish([mpirun() or "", "-n", "2", "--oversubscribe", *program], **root, TMPDIR=str(tmp_path))
    assert sorted(printed.splitlines()) == ["0 2 0 2 True", "1 2 1 2 True"]
    assert not list(tmp_path.glob("fusionlayer-*")), "the file by which they met was left behind"


@pytest.mark.medium
@pytest.mark.parametrize("nodes", tiered([1, 2], lambda nodes: nodes == 2))
def test_tasks_that_srun_starts_train_together(tmp_path: Path, nodes: int) -> None:
    """On one node they meet by a file, on several by the name of the first: here both are this host."""
    job = {"JOB_ID": os.getpid(), "STEP_ID": nodes, "STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)"}
    variables = [
        {
            **srun(rank, 2, **job, LOCALID=rank * (nodes == 1), NODEID=rank * (nodes == 2), STEP_NODELIST="localhost"),
            "TMPDIR": str(tmp_path),
        }
        for rank in range(2)
    ]
    printed = run_ranks(run_script, 2, TRAIN, variables, backend=None)
    assert printed == [f"{rank} 2 {rank if nodes == 1 else 0} {2 // nodes} True" for rank in range(2)]


RAY = """
import os, pathlib, sys, time, types

def broadcast(address):  # what rank 0 gives comes to all
    file = pathlib.Path(os.environ["TMPDIR"], "told")
    if address is not None:
        file.with_suffix(".draft").write_text(address)
        file.with_suffix(".draft").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()

def of(name, **values):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)

rank = int(os.environ["WORKER"])
numbers = {"world_rank": rank, "world_size": 2, "local_rank": 0, "local_world_size": 1}
context = types.SimpleNamespace(**{f"get_{name}": lambda n=n: n for name, n in numbers.items()})
of("ray"), of("ray.util", get_node_ip_address=lambda: "127.0.0.1")
of("ray.train", get_context=lambda: context), of("ray.train.collective", broadcast_from_rank_zero=broadcast)
"""


@pytest.mark.medium
def test_workers_that_ray_has_told_nothing_in_variables_meet_by_ray(tmp_path: Path) -> None:
    """A stand-in for Ray; tests/examples/test_ray.py has Ray itself."""
    variables = [{"WORKER": str(rank), "TMPDIR": str(tmp_path)} for rank in range(2)]
    printed = run_ranks(run_script, 2, RAY + TRAIN, variables, backend=None)
    assert printed == ["0 2 0 1 True", "1 2 0 1 True"]


@contextmanager
def key_value_server() -> Iterator[int]:
    """Serve PUT and GET of values under any path, 404 for what nobody has put, as horovodrun does; yields the port."""
    kept: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:  # noqa: N802
            kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:  # noqa: N802
            value = kept.get(self.path)
            self.send_response(404 if value is None else 200)
            self.send_header("Content-Length", str(len(value or b"")))
            self.end_headers()
            self.wfile.write(value or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_script(rank: int, world: int, script: str, variables: list[dict[str, str]]) -> str:
    """Run a script in this process as if a launcher had started it so; return what it printed."""
    kept = clean_environment(**variables[rank])
    os.environ.clear()
    os.environ.update(kept)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(script, "train.py", "exec"), {})
    atexit._run_exitfuncs()  # a process of multiprocessing ends without them
    return printed.getvalue().strip()


@pytest.mark.medium
def test_two_processes_meet_through_a_stand_in_for_horovodruns_key_value_server() -> None:
    with key_value_server() as port:
        shared = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_HOSTNAME": "localhost",
        }
        variables = [{**shared, **environment("horovodrun", rank, 2, rank, 2)} for rank in range(2)]
        printed = run_ranks(run_script, 2, TRAIN + AGAIN, variables, backend=None)
    assert printed == ["0 2 0 2 True", "1 2 1 2 True"]


@pytest.mark.medium
def test_processes_of_one_parent_meet_through_a_file(tmp_path: Path) -> None:
    variables = [{**environment("mpich", rank, 2), "TMPDIR": str(tmp_path)} for rank in range(2)]
    assert run_ranks(run_script, 2, TRAIN, variables, backend=None) == ["0 2 0 2 True", "1 2 1 2 True"]
    assert not list(tmp_path.glob("fusionlayer-*")), "the file by which they met was left behind"


@pytest.mark.medium
def test_one_process_needs_no_launcher() -> None:
    assert run_ranks(run_script, 1, UNINITIALIZED + TRAIN + AGAIN, [{}], backend=None) == ["0 1 0 1 False"]


@pytest.mark.medium
def test_group_that_exists_already_is_used_and_left() -> None:
    script = TRAIN + AGAIN + "torch.distributed.barrier()\n"
    environments = [environment("torchrun", 0, 2), environment("torchrun", None, 2, 1)]  # the second as Lightning's
    printed = run_ranks(run_script, 2, script, environments)
    assert printed == ["0 2 0 2 True", "1 2 1 2 True"]


def check_jobs_that_cannot_begin(rank: int, world: int, folder: str) -> None:
    short = {"FUSIONLAYER_TIMEOUT": "1"}
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    horovod = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"}
    tempfile.tempdir = folder
    kinds = fl.ConfigError, fl.TransportError
    for kind, ranks, variables, text in [
        (kinds[0], None, {"FUSIONLAYER_TIMEOUT": "soon"}, "FUSIONLAYER_TIMEOUT='soon'; expected a number of seconds"),
        (kinds[0], None, {"FUSIONLAYER_CONFIG": "/no/such/file"}, "FUSIONLAYER_CONFIG=/no/such/file"),
        (kinds[0], None, {"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        (
            kinds[1],
            (0,),
            {**environment("torchrun", 1, 2), **nowhere},
            "rank 1 found no store of rank 0 at 127.0.0.1:9",
        ),
        (kinds[1], (), {**environment("horovodrun", 1, 2), **horovod}, "server at 127.0.0.1:9 does not answer"),
        (kinds[1], (0,), environment("mpirun", 1, 3, 1, 3), "rank 0 did not publish its address within 1 s"),
        (
            kinds[1],
            (1, 2),
            environment("mpirun", 0, 3, 0, 3),
            "ranks [1, 2] did not come within 1 s; were they started",
        ),
    ]:
        kept = clean_environment(**{**short, **variables})
        os.environ.clear()
        os.environ.update(kept)
        with pytest.raises(kind) as error:
            fl.init()
        assert text in str(error.value)
        assert getattr(error.value, "ranks", None) == ranks
        assert not fl.is_initialized()


@pytest.mark.medium
def test_job_that_cannot_begin_says_why(tmp_path: Path) -> None:
    run_ranks(check_jobs_that_cannot_begin, 1, str(tmp_path), backend=None)


def test_ranks_with_other_sizes_name_the_numbers_and_where_they_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store, sizes = HashStore(), (2, 3)

    def meet(rank: int) -> TransportError:
        with pytest.raises(TransportError) as error:
            launch._await_all(store, RankInfo(rank, sizes[rank], launcher="torchrun"), 30.0, time.monotonic() + 30)
        return error.value

    with ThreadPoolExecutor(2) as threads:
        errors = [*threads.map(meet, range(2))]
    for error in errors:
        text = str(error)
        assert "WORLD_SIZE=" in text and "store at host0:29500, has" in text and "2" in text and "3" in text
        assert sorted(error.ranks) == [0, 1]


@pytest.mark.medium
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_a_foreign_program_where_ranks_meet_is_named(greeting: bytes) -> None:
    """It answers in another language, or takes the connection and says nothing."""
    ended = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            while not ended.is_set():
                connections.append(server.accept()[0])
                connections[-1].sendall(greeting)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(TransportError) as error:
            make_store(RankInfo(1, 2, launcher="torchrun"), 1.0, where)
        ended.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
    for connection in connections:
        connection.close()
    assert f"127.0.0.1:{port}" in str(error.value) and error.value.ranks == (0,)
    expected = "a program that is no store of torch listens there" if greeting else "has another program that port"
    assert expected in str(error.value)


# ---- a store that outlives the processes ----------------------------------------------------------------------------


def test_rank_0_has_come_while_it_waits_for_a_rank_that_does_not() -> None:
    store = HashStore()

    def greet(rank: int) -> bool:
        try:
            name = launch._greet(store, RankInfo(rank, 3, rank, 3, "torchrun"), 1.0)
        except TransportError as error:
            assert rank == 0 and error.ranks == (2,)
            return True
        return launch._meeting(PrefixStore(name, store)).check(["ranks/at/0"])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(greet, range(2))) == [True, True]


def test_rank_0_stays_until_the_others_know_why_ranks_cannot_meet() -> None:
    """It may keep the store. Who comes to it later than rank 0 has given up blames the same rank."""
    store = HashStore()
    told = threading.Event()

    def meet(rank: int) -> tuple[int, ...]:
        with pytest.raises(TransportError) as error:
            launch._await_all(store, RankInfo(rank, 3), 1.0, time.monotonic() + (1.0 if rank == 0 else 180))
        if rank == 0:
            assert launch._keys(store, RankInfo(0, 3)).read([2])[2].heard
            told.set()
        return error.value.ranks

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, (0, 2))) == [(1,), (1,)]
    assert told.is_set()


def test_ranks_that_were_restarted_do_not_meet_those_before_them() -> None:
    """The store of torchrun's agent has the keys of earlier processes, some of which were never answered."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.add("fusionlayer/hello", 2)  # the second was killed before it asked
    server.set("fusionlayer/hello/1", "fusionlayer/of a process that is gone")

    def greet(rank: int, world: int, timeout: float = 180) -> str:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return launch._greet(store, RankInfo(rank, world), timeout)

    names = []
    with ThreadPoolExecutor(3) as pool:
        for world in (3, 3, 2):
            first = pool.submit(greet, 0, world)
            if not names:  # rank 0 has answered the process that is gone before the others come
                server.wait(["fusionlayer/of a process that is gone"])
            others = [pool.submit(greet, rank, world) for rank in range(1, world)]
            found = {each.result() for each in (first, *others)}
            assert len(found) == 1
            names += found
    assert len(set(names)) == 3
    with pytest.raises(TransportError, match=r"ranks \[1, 2\] did not come within 0.2 s") as missing:
        greet(0, 3, 0.2)
    assert missing.value.ranks == (1, 2)
    with pytest.raises(TransportError, match="rank 0 did not come within 0.2 s"):
        greet(1, 2, 0.2)
