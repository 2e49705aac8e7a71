"""``fusionrun``: the jobs that it starts, on this host and on one that a stand-in for ssh pretends to reach."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fusionlayer import config
from fusionlayer.cli import agent, doctor, fusionrun
from fusionlayer.cli.fusionrun import Agent, main
from fusionlayer.cli.hosts import Host, assign, parse_hosts, read_hostfile, remote_command
from fusionlayer.errors import ConfigError, TransportError
from fusionlayer.last_error import leave_to_launcher
from tests.loops import looped
from tests.mpi import ROOT
from tests.tiers import exhaustive

# Takes nothing of this host's environment along, as the real one.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do echo "$1 $2" >> "$(dirname "$0")/options"; shift 2; done
echo "host $1" >> "$(dirname "$0")/options"; shift
exec env -i HOME=/nowhere PATH=/usr/bin:/bin TMPDIR="$(dirname "$0")" sh -c "$*"
"""

TRAIN = """
import os, sys, torch, fusionlayer as fl
fl.init()
x = torch.full((300,), float(fl.rank()))
fl.all_reduce(x, codec="int8", op=fl.Sum)
assert abs(x.mean().item() - 3) < 0.1, x
settings = fl.context.settings()
told = [fl.rank(), fl.size(), fl.local_rank(), fl.local_size(), settings.timeout, settings.stall_warning]
told += [os.environ["HOROVOD_FUSION_THRESHOLD"], os.environ["MINE"], os.environ["HOME"] == "/nowhere", *sys.argv[1:]]
print(*told, flush=True)
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for ssh on PATH; return the file with the options that it was given."""
    program = tmp_path / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "options"


def commands(*arguments: str) -> list[list[str]]:
    """Return what would be started."""
    return [each.command for each in fusionrun.plan(fusionrun._parse([*arguments, "python", "train.py"]))]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.medium
@exhaustive(guarded_by="tests/cli/test_fusionrun.py::test_agents_of_torchrun")
def test_a_job_on_two_hosts(ssh: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    flags = ["-np", "3", "-H", "localhost:2,elsewhere:4", "-p", "2222", "--network-interface", "lo"]
    flags += ["--fusion-threshold-mb", "2", "--stall-check-warning-time-seconds", "7", "--gloo-timeout-seconds", "100"]
    flags += ["--start-timeout", "120", "--output-filename", str(tmp_path / "logs"), "--verbose"]
    done = subprocess.run(
        [sys.executable, "-c", "from fusionlayer.cli.fusionrun import main; raise SystemExit(main())", *flags]
        + [sys.executable, str(script), "--epochs", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MINE": "it's mine"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split("]:")[-1] for line in done.stdout.splitlines() if "--epochs" in line)
    same = "100.0 7.0 2097152 it's mine"
    assert lines == [
        f"0 3 0 2 {same} False --epochs 3",
        f"1 3 1 2 {same} False --epochs 3",
        f"2 3 0 1 {same} True --epochs 3",
    ]
    assert ssh.read_text().splitlines()[-2:] == ["-p 2222", "host elsewhere"]
    assert len(list((tmp_path / "logs").rglob("stdout.log"))) == 3
    assert "on elsewhere: ssh " in done.stderr


def shell(text: str) -> Agent:
    return Agent(f"host of {text}", ["sh", "-c", text], dict(os.environ))


@pytest.mark.short
def test_the_end_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert fusionrun._run([shell("true"), shell("true")], 2) == 0
    assert fusionrun._run([shell("exec sleep 1000"), shell("exit 7")], 2) == 7  # and waits for no other
    assert "the processes on host of exit 7 ended with status 7" in capsys.readouterr().err
    assert fusionrun._run([shell("sleep 0.3"), shell("exit 7")], 1) == 0, "elastic: one is enough"
    assert fusionrun._run([shell("exit 3"), shell("kill -9 $$")], 1) in (1, 3)
    with pytest.raises(ConfigError, match="cannot run nosuchprogram: No such file"):
        fusionrun._run([shell("exec sleep 60"), Agent("x", ["nosuchprogram"], {})], 2)


def failure(folder: Path, rank: int, exit_code: int, error: BaseException | None) -> ProcessFailure:
    """Return what torchrun knows of a rank that has ended, with the error that it has left, if any."""
    file = folder / f"{rank}.json"
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            patch.setattr(sys, "excepthook", lambda *_: None)
            for _ in range(2):
                leave_to_launcher()
            sys.excepthook(type(error), error, None)
    return ProcessFailure(rank, 1234 + rank, exit_code, str(file))


@pytest.mark.short
@looped(
    "failures, status, words",
    [
        ([(0, 3, None)], 3, "fusionrun: rank 0 on .* ended with exit code 3; what it has printed says why"),
        ([(2, -9, None)], 137, "fusionrun: rank 2 on .* was ended by SIGKILL"),
        (
            [(0, 1, TransportError("rank 1 is gone")), (1, 1, ValueError("boom"))],
            1,
            "ValueError: boom\nfusionrun: rank 1 on .* ended with exit code 1\n$",
        ),
        ([(0, 1, TransportError("rank 1 is gone")), (1, 7, None)], 7, "rank 1 on .* ended with exit code 7"),
        ([(0, 1, TransportError("rank 5 is gone"))], 1, "TransportError: rank 5 is gone\nfusionrun: rank 0"),
    ],
)
def test_an_agent_tells_the_error_of_the_rank_that_failed_first(
    failures: list[tuple[int, int, BaseException | None]], status: int, words: str, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder, pytest.MonkeyPatch.context() as patch:
        ended = {rank: failure(Path(folder), rank, *how) for rank, *how in failures}

        def run(arguments: object) -> None:
            raise ChildFailedError("train.py", ended)

        patch.setattr(agent.run, "main", run)
        patch.setenv(agent.REPORT, f"{folder}/report")
        assert agent.main([]) == status
        assert re.search(words, Path(folder, "report").read_text())


@pytest.mark.short
def test_the_report_of_an_agent_is_the_last_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    first = f"echo its error > ${agent.REPORT}; exit 9"
    other = "trap 'echo other errors >&2; exit 3' TERM; while :; do sleep 0.1; done"
    assert fusionrun._run([shell(other), shell(first)], 2) == 9
    assert capfd.readouterr().err == "other errors\nits error\n"


@pytest.mark.medium
@pytest.mark.timeout(150)
@exhaustive(guarded_by="tests/cli/test_fusionrun.py::test_an_agent_tells_the_error_of_the_rank_that_failed_first")
def test_a_failing_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, fusionlayer as fl\nfl.init()\nif fl.rank() == 1: raise ValueError('boom')\n")
    done = subprocess.run(
        [sys.executable, "-c", "from fusionlayer.cli.fusionrun import main; raise SystemExit(main())", "-np", "2"]
        + [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 1
    assert re.search("ValueError: boom\nfusionrun: rank 1 on .* ended with exit code 1\n$", done.stderr), done.stderr


@pytest.mark.short
def test_a_program_elsewhere_ends_with_the_connection(
    ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUOTED", "a 'b' $c\nd")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.chdir(tmp_path)
    show = "import os; print(os.getcwd(), repr(os.environ['QUOTED']), 'RANK' in os.environ, os.environ['X'])"
    command = remote_command(Host("me@there", 1), [sys.executable, "-c", show], {"X": "1"}, 99, "key")
    held_open, other_end = os.pipe()
    done = subprocess.run(command, stdin=held_open, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path} {os.environ['QUOTED']!r} False 1\n", done.stderr
    assert ssh.read_text().splitlines()[-3:] == ["-p 99", "-i key", "host me@there"]
    failing = remote_command(Host("there", 1), ["sh", "-c", "exit 9"], {})
    assert subprocess.run(failing, stdin=held_open).returncode == 9
    os.close(other_end)
    os.close(held_open)
    note = tmp_path / "pid"
    endless = remote_command(
        Host("there", 1), ["sh", "-c", f"echo $$ > {note}.new; mv {note}.new {note}; exec sleep 300"], {}
    )
    with subprocess.Popen(endless, stdin=subprocess.PIPE) as process:
        while not note.exists():
            time.sleep(0.01)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(180) != 0
    assert not Path(f"/proc/{note.read_text().strip()}").exists()


@pytest.mark.short
def test_hosts(tmp_path: Path) -> None:
    assert parse_hosts("a:2, b ,[::1]:3") == [Host("a", 2), Host("b", 1), Host("[::1]", 3)]
    file = tmp_path / "hosts"
    file.write_text("# nodes\nnode1 slots=2\n\nnode2:3  # big\nnode3\n")
    assert read_hostfile(file) == [Host("node1", 2), Host("node2", 3), Host("node3", 1)]
    assert assign(3, read_hostfile(file)) == [Host("node1", 2), Host("node2", 1)]
    assert Host(socket.gethostname(), 1).is_here and Host("127.0.0.1", 1).is_here and not Host("node1", 1).is_here
    for wrong in ("a:b", ":2", "a:0", ","):
        with pytest.raises(ConfigError, match="expected name:slots"):
            parse_hosts(wrong)
    with pytest.raises(ConfigError, match="-np 5, but the hosts have 3 slots: a:2, b:1; give more"):
        assign(5, parse_hosts("a:2,b"))
    for text, words in (("a slots=2 x", "line 1: 'a slots=2 x'; expected 'name slots=4'"), ("#", "names no host")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_hostfile(file)
    with pytest.raises(ConfigError, match="hostfile /no/such: No such file"):
        read_hostfile("/no/such")


@pytest.mark.short
def test_agents_of_torchrun(ssh: Path) -> None:
    (here,) = commands("-np", "4")
    assert here[:3] == [sys.executable, "-m", "fusionlayer.cli.agent"]
    assert (option(here, "--nnodes"), option(here, "--nproc-per-node")) == ("1", "4")
    assert here[-4:] == ["--no-python", "--", "python", "train.py"], "or torchrun would read options of train.py"
    assert option(here, "--master-addr") == "127.0.0.1"
    port = int(option(here, "--master-port"))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    socket.create_server(("127.0.0.1", port)).close()  # rank 0 can listen there
    first, second = commands("-np", "3", "-H", "far1:2,far2:2")
    assert first[0] == second[0] == "ssh" and (first[-2], second[-2]) == ("far1", "far2")
    assert "--node-rank 0 --master-addr far1 " in first[-1] and "--nproc-per-node 2 " in first[-1]
    assert "--node-rank 1 --master-addr far1 " in second[-1] and "--nproc-per-node 1 " in second[-1]
    elastic = commands("-np", "2", "--min-np", "1", "--max-np", "3", "--reset-limit", "5")
    assert len(elastic) == 3, "one agent for each process"
    assert {(option(c, "--nnodes"), option(c, "--nproc-per-node"), option(c, "--max-restarts")) for c in elastic} == {
        ("1:3", "1", "5")
    }
    assert {option(c, "--rdzv-backend") for c in elastic} == {"c10d"}
    assert len({option(c, "--rdzv-endpoint") for c in elastic}) == len({option(c, "--rdzv-id") for c in elastic}) == 1
    spread = commands("-np", "4", "--min-np", "2", "-H", "far1:2,far2:2,far3:2")
    assert len(spread) == 2 and "--nnodes 1:2" in spread[0][-1]


@pytest.mark.short
def test_python_is_that_of_the_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (only,) = fusionrun.plan(fusionrun._parse(["-np", "2", "python", "train.py"]))
    assert only.environment["PATH"] == f"{Path(sys.executable).parent}:{tmp_path}"
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))
    assert fusionrun._missing(["python", "train.py"]) == (127, "python: not found; did you mean python3?")
    (folder / "python").symlink_to("/bin/sh")
    assert fusionrun._missing(["python", "-c", ""]) == (0, "")


@pytest.mark.short
def test_flags_are_variables_that_the_job_reads() -> None:
    flags = "--fusion-threshold-mb 0.5 --cache-capacity 9 --no-autotune --timeline-filename t.json"
    flags += " --codec int4 --no-stall-check"
    flags += " --stall-check-shutdown-time-seconds 50 --log-level debug --network-interfaces eth7,eth8"
    (only,) = fusionrun.plan(fusionrun._parse(["-np", "2", *flags.split(), "--gloo", "true"]), {})
    told = only.environment
    assert told == {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "HOROVOD_FUSION_THRESHOLD": "524288",
        "HOROVOD_CACHE_CAPACITY": "9",
        "FUSIONLAYER_CODEC": "int4",
        "FUSIONLAYER_TIMELINE": "t.json",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "FUSIONLAYER_STALL_WARNING": "inf",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "50",
        "FUSIONLAYER_TIMEOUT": "50",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "GLOO_SOCKET_IFNAME": "eth7,eth8",
        "NCCL_SOCKET_IFNAME": "eth7,eth8",
    }
    settings = config.load(told)
    assert (settings.timeline, settings.timeout, settings.stall_warning) == ("t.json", 50, float("inf"))
    assert settings.codec == "int4"


# Each flag of horovodrun, with values where it takes some.
HOROVODRUN = """
-v --version -np=2 --num-proc=2 -cb --check-build --disable-cache --start-timeout=9 --network-interface=lo
--network-interfaces=lo --output-filename=out --verbose --config-file=x.yaml -p=22 --ssh-port=22 -i=key
--ssh-identity-file=key --fusion-threshold-mb=1 --cycle-time-ms=1 --cache-capacity=9 --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
--no-torus-allreduce --autotune --no-autotune --autotune-log-file=a.csv --autotune-warmup-samples=1
--autotune-steps-per-sample=1 --autotune-bayes-opt-max-samples=1 --autotune-gaussian-process-noise=0.1
--min-np=1 --min-num-proc=1 --max-np=3 --max-num-proc=3 --slots-per-host=1 --elastic-timeout=9 --reset-limit=1
--blacklist-cooldown-range=1=2 --timeline-filename=t.json --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds=9 --stall-check-shutdown-time-seconds=9
--mpi-threads-disable --no-mpi-threads-disable --mpi-args=x --tcp --binding-args=x --num-nccl-streams=1
--thread-affinity=1 --gloo-timeout-seconds=9 --log-level=INFO --log-with-timestamp --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H=localhost:2
--hosts=localhost:2 -hostfile=hosts --hostfile=hosts --host-discovery-script=x.sh --gloo --mpi --jsrun
"""


@pytest.mark.short
def test_every_flag_of_horovodrun_is_taken_or_refused_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    refused = set()
    flags = HOROVODRUN.split()
    for text in flags:
        flag, *values = text.split("=")
        try:
            options = fusionrun._parse(["-np", "2", flag, *values, "train", "--mpi"])
        except SystemExit as ended:
            assert flag in ("-v", "--version") and ended.code == 0, capsys.readouterr().err
        except ConfigError as error:
            assert str(error).startswith(f"{flag} means nothing here: ")
            refused.add(flag)
        else:
            assert options.command == ["train", "--mpi"]
    assert len(flags) == 71 and len(refused) == 27
    (only,) = fusionrun.plan(fusionrun._parse(["-np", "2", "--stall-check", "--elastic-timeout", "9", "true"]), {})
    assert only.environment == {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_ELASTIC_TIMEOUT": "9",
    }


@pytest.mark.short
@looped(
    "flags, words",
    [
        ("python x.py", "say how many processes"),
        ("-np 2", "say what to run"),
        ("-np 2 --cycle-time-ms 5 true", "--cycle-time-ms means nothing here: messages leave when"),
        ("-np 2 --mpi true", "start with 'mpirun -n N"),
        ("-np 2 --host-discovery-script x.sh true", "torchrun is told of hosts by whoever starts an agent"),
        ("-np 2 --config-file x.yaml true", "the file that FUSIONLAYER_CONFIG names"),
        ("-np 2 --blacklist-cooldown-range 1 2 true", "none is excluded; leave it out"),
        ("-np 2 -H a:2 --hostfile b true", "both name hosts"),
        ("-np 2 --min-np 3 true", "--min-np 3, -np 2, --max-np 2; expected them in this order"),
        ("-np 2 --min-np 1 -H a:1,b:2 true", "equally many slots on all hosts of an elastic job; given a:1, b:2"),
        ("-np 2 --fusion-threshold-mb -1 true", "expected megabytes of at least 0"),
        ("-np 9 -H a:2 true", "-np 9, but the hosts have 2 slots"),
    ],
)
def test_what_cannot_be_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.short
def test_check_build_is_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda _: [doctor.Finding("core", "cpu", "FAIL", "broken")])
    assert main(["--check-build"]) == 1
    assert "core     cpu   FAIL   broken" in capsys.readouterr().out
