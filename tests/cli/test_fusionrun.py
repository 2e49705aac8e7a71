"""``fusionrun``: the jobs that it starts, on this host and on one that a stand-in for ssh pretends to reach."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fusionlayer.base import config
from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.cli import agent, agents, forwarded, fusionrun
from fusionlayer.cli.agents import Agent
from fusionlayer.cli.fusionrun import main
from fusionlayer.cli.hosts import Host, assign, parse_hosts, read_hostfile, remote_command
from fusionlayer.launch.last_error import leave_to_launcher
from fusionlayer.process.interfaces import addresses
from tests.loops import looped
from tests.mpi import ROOT
from tests.tiers import exhaustive

# Takes nothing of this host's environment along, as the real one.
SSH = """#!/bin/sh
echo "ssh $*" >> "$(dirname "$0")/lists"
while [ "$1" != -- ]; do echo "$1 $2" >> "$(dirname "$0")/options"; shift 2; done
shift
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
assert ("HF_TOKEN" in os.environ) == (os.environ["HOME"] != "/nowhere")
told += [os.environ["HOROVOD_FUSION_THRESHOLD"], os.environ["MINE"], os.environ["HOME"] == "/nowhere", *sys.argv[1:]]
print(*told, flush=True)
"""

SECRETS = {"AWS_SECRET_ACCESS_KEY": "s3cr3t-1", "WANDB_API_KEY": "s3cr3t-2", "HF_TOKEN": "s3cr3t-3"}


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
    flags += ["-x", "MINE", "--start-timeout", "120", "--output-filename", str(tmp_path / "logs"), "--verbose"]
    done = subprocess.run(
        [sys.executable, "-c", "from fusionlayer.cli.fusionrun import main; raise SystemExit(main())", *flags]
        + [sys.executable, str(script), "--epochs", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MINE": "it's mine", **SECRETS},
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
    assert "on elsewhere: ssh " in done.stderr and "it's mine" not in done.stderr


def shell(text: str) -> Agent:
    return Agent(f"host of {text}", ["sh", "-c", text], dict(os.environ))


def test_the_end_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert agents.run([shell("true"), shell("true")], 2) == 0
    assert agents.run([shell("exec sleep 1000"), shell("exit 7")], 2) == 7  # and waits for no other
    assert "the processes on host of exit 7 ended with status 7" in capsys.readouterr().err
    assert agents.run([shell("sleep 0.3"), shell("exit 7")], 1) == 0, "elastic: one is enough"
    assert agents.run([shell("exit 3"), shell("kill -9 $$")], 1) in (1, 3)
    with pytest.raises(ConfigError, match="cannot run nosuchprogram: No such file"):
        agents.run([shell("exec sleep 60"), Agent("x", ["nosuchprogram"], {})], 2)


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


def test_the_report_of_an_agent_is_the_last_that_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = f"until test -e {tmp_path}/up; do sleep 0.1; done; echo its error > ${agent.REPORT}; exit 9"
    other = f"trap 'echo other errors >&2; exit 3' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    assert agents.run([shell(other), shell(first)], 2) == 9
    assert capfd.readouterr().err == "other errors\nits error\n"


def test_a_program_elsewhere_ends_with_the_connection(
    ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wild = {"QUOTED": "a 'b' $c\nd\\\n`e`\xe9 \n", "EMPTY": "", "LONG": "x" * 100_000}

    def on(host: str, *command: str, **options: Any) -> Agent:
        ssh, opening = remote_command(Host(host, 1), command, wild, **options)
        return Agent(host, ssh, dict(os.environ), False, tuple(wild), opening)

    show = "import os, sys; values = {name: os.environ.get(name) for name in sys.argv[1:]}\n"
    show += "print(os.getcwd(), values, file=open('out', 'w'))"
    names = [*wild, "line", "variables"]
    there = on("me@there", sys.executable, "-c", show, *names, port=99, identity="key")
    assert agents.run([there], 1) == 0
    expected = {**wild, "line": None, "variables": None}
    assert Path("out").read_text() == f"{tmp_path} {expected}\n"
    assert ssh.read_text().splitlines()[-4:] == ["-o BatchMode=yes", "-p 99", "-i key", "host me@there"]
    assert agents.run([on("there", "sh", "-c", "exit 9")], 1) == 9
    note = tmp_path / "pid"
    endless = on("there", "sh", "-c", f"echo $$ > {note}.new; mv {note}.new {note}; exec sleep 300")
    with agents._start(endless, os.environ) as process:
        while not note.exists():
            time.sleep(0.01)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(180) != 0
    assert not Path(f"/proc/{note.read_text().strip()}").exists()
    gone = on("there", "touch", str(tmp_path / "made"))
    cut = subprocess.run(gone.command, input=gone.opening[: len(gone.opening) // 2])
    assert cut.returncode == 1 and not (tmp_path / "made").exists(), "it began without all variables"


def test_no_variable_stands_where_every_user_can_read_it(
    ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In no list of processes, on neither host, nor in what is printed."""
    variables = {**SECRETS, "NCCL_DEBUG": "s3cr3t-4", "FUSIONLAYER_JOB_KEY": "s3cr3t-5" * 4, "NCCL_API_TOKEN": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SSH_AUTH_SOCK", "mine")
    # Each process that is started there writes down what a list of processes shows of all that are its ancestors.
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\npid=$$\nwhile [ $pid -gt 1 ]; do tr '\\0' ' ' < /proc/$pid/cmdline; echo\n"
        f"pid=$(sed 's/.*) . //; s/ .*//' /proc/$pid/stat); done >> {tmp_path}/lists; env > {tmp_path}/env\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["-np", "1", "-H", "there:1", "-x", "HF_TOKEN", "-x", "WANDB_*", "-x", "MINE=1", "--verbose", "x"]) == 0
    got = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert got["HF_TOKEN"] == SECRETS["HF_TOKEN"] and got["WANDB_API_KEY"] == SECRETS["WANDB_API_KEY"]
    assert got["NCCL_DEBUG"] == "s3cr3t-4" and got["MINE"] == "1" and got["FUSIONLAYER_JOB_KEY"] == "s3cr3t-5" * 4
    assert not got.keys() & {"AWS_SECRET_ACCESS_KEY", "NCCL_API_TOKEN", "SSH_AUTH_SOCK"}
    printed = "".join(capfd.readouterr())
    assert "variables for there: CUDA" in printed or "FUSIONLAYER_JOB_KEY" in printed
    lists = (tmp_path / "lists").read_text()
    assert "fusionlayer.cli.agent" in lists and "s3cr3t" not in lists + printed
    assert "s3cr3t" not in ssh.read_text()


def test_which_variables_go_along() -> None:
    environ = {"NCCL_DEBUG": "1", "RANK": "3", "HOME": "/me", "MINE": "2", "MY_TOKEN": "3", "FUSIONLAYER_JOB_KEY": "k"}
    environ |= {"PYTHONPATH": "4", "HOROVOD_A": "5", "bad-name": "6", "TORCH_TOKEN": "7", "BASH_FUNC_x%%": "() { :; }"}
    usual = {"NCCL_DEBUG": "1", "PYTHONPATH": "4", "HOROVOD_A": "5"}
    assert forwarded.forwarded(environ) == usual
    assert forwarded.forwarded(environ, ["MY_TOKEN", "X=y=z"]) == {**usual, "MY_TOKEN": "3", "X": "y=z"}
    assert forwarded.forwarded(environ, ["*"]) == {**usual, "MINE": "2", "MY_TOKEN": "3", "TORCH_TOKEN": "7"}
    for asked in ("", "A-B", "=1", "A-B=1", "$(x)"):
        with pytest.raises(ConfigError, match="expected NAME, NAME=value or a pattern"):
            forwarded.forwarded(environ, [asked])
    with pytest.raises(ConfigError, match="-x ABSENT: this variable is not set"):
        forwarded.forwarded(environ, ["ABSENT"])
    with pytest.raises(ConfigError, match="the variables for there take"):
        agents._start(Agent("there", ["true"], {}, False, (), b"x" * (1 << 21)), {})


def test_the_keys_of_hosts_are_checked_as_ssh_is_configured(ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (usual,) = commands("-np", "1", "-H", "there:1")
    assert "StrictHostKeyChecking" not in " ".join(usual) and usual[-3:-1] == ["--", "there"]
    (asked,) = commands("-np", "1", "-H", "there:1", "--accept-new-host-keys")
    assert asked[asked.index("StrictHostKeyChecking=accept-new") - 1] == "-o"
    unknown = Agent("there", ["sh", "-c", "exit 255"], dict(os.environ), is_here=False)
    assert agents.run([unknown], 1) == 255
    assert "ssh to there failed" in capsys.readouterr().err


def test_each_job_has_a_key_that_its_processes_alone_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key(environ: dict[str, str]) -> str:
        (here,) = fusionrun.plan(fusionrun._parse(["-np", "2", "true"]), environ)
        assert "FUSIONLAYER_JOB_KEY_FILE" not in here.environment
        return here.environment["FUSIONLAYER_JOB_KEY"]

    made = {key({}) for _ in range(3)}
    assert len(made) == 3 and min(map(len, made)) == 64
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert key({"FUSIONLAYER_JOB_KEY_FILE": str(file)}) == "0123456789abcdef"
    assert key({"FUSIONLAYER_JOB_KEY": "a key of the user"}) == "a key of the user"


def test_hosts(tmp_path: Path) -> None:
    assert parse_hosts("a:2, b ,[::1]:3") == [Host("a", 2), Host("b", 1), Host("::1", 3)]
    file = tmp_path / "hosts"
    file.write_text("# nodes\nnode1 slots=2\n\nnode2:3  # big\nnode3\nfd00::2 slots=4\n[fd00::3]:5\nme@fd00::4\n")
    assert read_hostfile(file) == [
        *(Host("node1", 2), Host("node2", 3), Host("node3", 1)),
        *(Host("fd00::2", 4), Host("fd00::3", 5), Host("me@fd00::4", 1)),
    ]
    assert assign(3, read_hostfile(file)) == [Host("node1", 2), Host("node2", 1)]
    assert Host(socket.gethostname(), 1).is_here and Host("127.0.0.1", 1).is_here and not Host("node1", 1).is_here
    assert Host("::1", 1).is_here == any("::1" in found for found in addresses().values())
    for wrong in ("a:b", ":2", "a:0", ",", "fd00::1", "[::1]:x", "a:" + "9" * 5000, "a:\u0663", "a:-1"):
        with pytest.raises(ConfigError, match="expected name:slots"):
            parse_hosts(wrong)
    for wrong in ("-oProxyCommand=x", "-v:2", "me@-v", "-l@host", "a b", "a;b", "$(b)", "[a]:2", "[-v::1]", "a/b"):
        with pytest.raises(ConfigError, match="is no name of a host"):
            parse_hosts(wrong)
        file = tmp_path / "wrong"
        file.write_text(f"# hosts\n{wrong}\n")
        with pytest.raises(ConfigError, match="line 2: "):
            read_hostfile(file)
    given = "me@n1.example.org:2,d\\me@n_2,x@[FD00:0::2]:3,[fe80::1%eth0]"
    assert parse_hosts(given) == [
        *(Host("me@n1.example.org", 2), Host("d\\me@n_2", 1), Host("x@fd00::2", 3), Host("fe80::1%eth0", 1))
    ]
    assert Host("x@fd00::2", 1).address == "fd00::2"
    with pytest.raises(ConfigError, match="-np 5, but the hosts have 3 slots: a:2, b:1; give more"):
        assign(5, parse_hosts("a:2,b"))
    for text, words in (("a slots=2 x", "line 1: 'a slots=2 x'; expected 'name slots=4'"), ("#", "names no host")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_hostfile(file)
    with pytest.raises(ConfigError, match="hostfile /no/such: No such file"):
        read_hostfile("/no/such")


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
    distant = commands("-np", "2", "-H", "[fd00::dead],[fd00::beef]")[0]
    assert distant[-2] == "fd00::dead" and "--master-addr fd00::dead " in distant[-1]
    distant = commands("-np", "2", "-H", "[fd00::dead],[fd00::beef]", "--min-np", "1")[0]
    assert "--rdzv-endpoint [fd00::dead]:" in distant[-1].replace("'", "").replace('"', "")
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


def test_flags_are_variables_that_the_job_reads() -> None:
    flags = "--fusion-threshold-mb 0.5 --cache-capacity 9 --no-autotune --timeline-filename t.json"
    flags += " --codec int4 --no-stall-check"
    flags += " --stall-check-shutdown-time-seconds 50 --log-level debug --network-interfaces eth7,eth8"
    (only,) = fusionrun.plan(fusionrun._parse(["-np", "2", *flags.split(), "--gloo", "true"]), {})
    told = only.environment
    assert len(told.pop("FUSIONLAYER_JOB_KEY")) == 64
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
    assert only.environment.pop("FUSIONLAYER_JOB_KEY")
    assert only.environment == {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_ELASTIC_TIMEOUT": "9",
    }


@looped(
    "flags, words",
    [
        ("python x.py", "say how many processes"),
        ("-np 2", "say what to run"),
        ("-np 2 --cycle-time-ms 5 true", "--cycle-time-ms means nothing here: messages leave when"),
        ("-np 2 --mpi true", "start with 'mpirun -n N"),
        ("-np 2 --host-discovery-script x.sh true", "hosts join when an agent of torchrun starts on them"),
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
