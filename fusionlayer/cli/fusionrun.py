"""``fusionrun``: starts a job with horovodrun's flags, by torchrun on each host."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__
from ..base import job_key
from ..base.errors import ConfigError, FusionLayerError, printable
from ..planning.fidelities import AUTO
from ..process.interfaces import addresses, reachable_names, with_port
from . import horovodrun
from .agents import Agent, run
from .arguments import Parser, check_file, check_folder, count, positive
from .forwarded import assigned, forwarded
from .hosts import Host, assign, parse_hosts, read_hostfile, remote_command
from .spawn import without_launcher

__all__ = ["Agent", "main", "make_parser", "plan"]

_DEFAULT_RESTARTS = 3

# Sockets that hold the ports of this process's jobs until it ends.
_held: list[socket.socket] = []

_EPILOG = """\
    fusionrun -np 4 python train.py
    fusionrun -np 8 -H node1:4,node2:4 --network-interface eth0 python train.py --epochs 3

Other hosts need ssh without a password, and the same folder, Python and packages. They get the variables of
fusionlayer, Horovod, torch, NCCL, CUDA and Python, PATH and LD_LIBRARY_PATH; -x names others. Flags of horovodrun that
are not listed change nothing, or are refused with the reason.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process by default; return the exit status."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        if options.check_build:
            from . import doctor  # needs torch, for which no start of a job waits

            return doctor.report(as_json=False)
        _check_names(options)
        agents = plan(options)
        here = [agent for agent in agents if agent.is_here]
        status, why = _missing(options.command) if here else (0, "")
        if status:
            print(f"fusionrun: {why}", file=sys.stderr)
            return status
        if options.verbose:
            for agent in agents:
                print(f"fusionrun: on {agent.host}: {shlex.join(agent.command)}", file=sys.stderr)
                if agent.sent:
                    print(f"fusionrun: variables for {agent.host}: {', '.join(agent.sent)}", file=sys.stderr)
        return run(agents, least=_nodes_needed(options, len(agents)))
    except FusionLayerError as error:
        print(f"fusionrun: {printable(str(error), lines=True)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _missing(command: Sequence[str]) -> tuple[int, str]:
    """Return a shell's status for an impossible command, and the reason; 0 if it can be started."""
    program = command[0]
    if shutil.which(program, path=_path(os.environ)) is None:
        if os.path.isdir(program):
            return 126, f"{program}: is a directory; name a program"
        if "/" in program and os.path.exists(program):
            return 126, f"{program}: permission denied; start a script by its interpreter: python {program}"
        meant = f"python {program}" if os.path.exists(program) else "python3" if program == "python" else ""
        return 127, f"{program}: not found{meant and f'; did you mean {meant}?'}"
    if Path(program).name.startswith("python") and command[1:2] and command[1].endswith(".py"):
        try:
            with open(command[1], "rb"):
                pass
        except OSError as error:
            return 2, f"{command[1]}: {error.strerror}"
    return 0, ""


def _path(environ: Mapping[str, str]) -> str:
    """Return the PATH of a job: the programs of this Python's environment come first, and its ``python`` is one."""
    return os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])


def _check_names(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for files and interfaces that the job could not use, before anything starts."""
    names = [name for _, name in socket.if_nameindex()]
    wanted = [part.lstrip("=") for part in (options.network_interface or "").split(",") if part[:1] not in ("", "^")]
    if wanted and not any(name.startswith(part) for name in names for part in wanted):
        raise ConfigError(f"--network-interface {options.network_interface}: this host has {', '.join(names)}")
    if options.output_filename:
        check_folder(options.output_filename, "--output-filename")
    if options.timeline_filename:
        check_file(f"{options.timeline_filename}.0", "--timeline-filename")
    if options.ssh_identity_file and not os.path.isfile(options.ssh_identity_file):
        raise ConfigError(f"--ssh-identity-file {options.ssh_identity_file}: no such file")
    if options.ssh_port is not None and options.ssh_port > 65535:
        raise ConfigError(f"--ssh-port {options.ssh_port}; expected a port from 1 to 65535")


def plan(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> list[Agent]:
    """Return the agents to start, one for each host."""
    settings = {**_settings(options), **_key(environ)}
    elastic = options.min_np is not None or options.max_np is not None
    hosts = _elastic_hosts(options) if elastic else assign(options.num_proc, _hosts(options))
    several = len(hosts) > 1
    address = _meeting_point(hosts, options.network_interface)
    port = _held_port() if hosts[0].is_here else 20000 + secrets.randbelow(12000)
    job = secrets.token_hex(4)
    given = assigned(options.forward)
    agents = []
    for rank, host in enumerate(hosts):
        where: list[str] = []
        if elastic:
            slots = hosts[0].slots
            nodes = f"{-(-(options.min_np or options.num_proc) // slots)}:{len(hosts)}"
            restarts = _DEFAULT_RESTARTS if options.reset_limit is None else options.reset_limit
            where += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", with_port(address, port)]
            where += ["--rdzv-id", job, "--max-restarts", str(restarts)]
            where += ["--rdzv-conf", f"join_timeout={options.start_timeout}"]
        else:
            where += ["--nnodes", str(len(hosts)), "--node-rank", str(rank)]
            where += ["--master-addr", address, "--master-port", str(port)]
            where += ["--rdzv-conf", f"timeout={options.start_timeout}"]
        if options.output_filename:
            where += ["--log-dir", options.output_filename, "--tee", "3"]
        command = [sys.executable, "-m", "fusionlayer.cli.agent", *where, "--nproc-per-node", str(host.slots)]
        # Without "--" torchrun takes options of the program that begin like its own for ambiguous ones: --max 5.
        command += ["--no-python", "--", *options.command]
        if host.is_here:
            own = without_launcher(environ)
            own.pop(job_key.FILE, None)
            agents.append(Agent(host.name, command, {**own, "PATH": _path(environ), **given, **settings}))
        else:
            variables = {**forwarded(environ, options.forward), "PATH": _path(environ), **given, **settings}
            login = (options.ssh_port, options.ssh_identity_file)
            ssh, opening = remote_command(host, command, variables, *login, new_hosts=options.accept_new_host_keys)
            agents.append(Agent(host.name, ssh, dict(environ), False, tuple(sorted(variables)), opening))
    if several and options.verbose:
        print(f"fusionrun: {len(hosts)} hosts meet at {with_port(address, port)}", file=sys.stderr)
    return agents


def _key(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the job key: the user's, else a new one."""
    given = job_key.find(environ)
    return {job_key.KEY: secrets.token_hex(32) if given is None else given.decode()}


def make_parser() -> Parser:
    """Return the parser of all flags, refused flags of horovodrun included."""
    parser = Parser(
        prog="fusionrun",
        usage="fusionrun -np N [-H host:slots,...] [FLAG ...] program [argument ...]",
        description="Start a training job on this host or several, by torchrun.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=positive, metavar="N", help="processes of the job")
    add("-v", "--version", action="version", version=f"fusionlayer {__version__}", help="print the version and exit")
    check = "run `fusionlayer doctor` and exit"
    add("-cb", "--check-build", action="store_true", help=check)
    add("--verbose", action="store_true", help="print commands and names of variables")
    add("--output-filename", metavar="FOLDER", help="folder for each rank's output")
    add(
        "--start-timeout",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="timeout for the hosts to meet (default 30)",
    )
    hosts = parser.add_argument_group("hosts").add_argument
    hosts("-H", "--hosts", metavar="NAME:SLOTS,...", help="hosts and their numbers of processes (default: this host)")
    hosts("-hostfile", "--hostfile", metavar="FILE", help="file of hosts, with lines 'name slots=4'")
    hosts("-p", "--ssh-port", type=positive, metavar="PORT", help="port of the ssh servers")
    hosts("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    hosts(
        "--accept-new-host-keys",
        action="store_true",
        help="let ssh accept unknown hosts (StrictHostKeyChecking=accept-new)",
    )
    hosts(
        *("-x", "--forward"),
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="environment variable to send to other hosts, or a pattern such as 'WANDB_*'",
    )
    hosts(
        *("--network-interface", "--network-interfaces"),
        metavar="NAME",
        action="append",
        help="network interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
    elastic = parser.add_argument_group("elastic jobs").add_argument
    least, most = ("--min-np", "--min-num-proc"), ("--max-np", "--max-num-proc")
    elastic(*least, type=positive, metavar="N", help="least number of processes (torchrun's --nnodes min:max)")
    elastic(*most, type=positive, metavar="N", help="largest number of processes")
    elastic("--elastic-timeout", type=positive, metavar="S", help="HOROVOD_ELASTIC_TIMEOUT")
    elastic(
        "--reset-limit", type=count, metavar="N", help=f"restarts before the job fails (default {_DEFAULT_RESTARTS})"
    )
    tuning = parser.add_argument_group("settings, by environment variables that the job reads").add_argument
    tuning("--fusion-threshold-mb", type=float, metavar="MB", help="HOROVOD_FUSION_THRESHOLD")
    tuning("--cache-capacity", type=positive, metavar="N", help="HOROVOD_CACHE_CAPACITY")
    tuning("--codec", metavar="NAME", help="FUSIONLAYER_CODEC, where the program names none")
    tuning("--plan", metavar="FILE", help="FUSIONLAYER_PLAN")
    tuning("--timeline-filename", metavar="FILE", help="FUSIONLAYER_TIMELINE")
    tuning(
        "--no-stall-check",
        action="store_true",
        default=None,
        help="HOROVOD_STALL_CHECK_DISABLE, FUSIONLAYER_STALL_WARNING=inf",
    )
    tuning("--stall-check", dest="no_stall_check", action="store_false", help="HOROVOD_STALL_CHECK_DISABLE=0")
    tuning(
        "--stall-check-warning-time-seconds",
        type=positive,
        metavar="S",
        help="HOROVOD_STALL_CHECK_TIME_SECONDS, FUSIONLAYER_STALL_WARNING",
    )
    tuning(
        "--stall-check-shutdown-time-seconds",
        type=positive,
        metavar="S",
        help="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, FUSIONLAYER_TIMEOUT",
    )
    tuning("--gloo-timeout-seconds", type=positive, metavar="S", help="FUSIONLAYER_TIMEOUT")
    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    tuning("--log-level", type=str.upper, choices=levels, metavar="LEVEL", help="HOROVOD_LOG_LEVEL")
    horovodrun.add_flags(parser)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = make_parser().parse_args(arguments)
    horovodrun.refuse(options)
    if options.network_interface is not None:
        options.network_interface = ",".join(options.network_interface)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.check_build:
        if options.num_proc is None:
            raise ConfigError("say how many processes: fusionrun -np N program")
        if not options.command:
            raise ConfigError("say what to run: fusionrun -np N python train.py")
    return options


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that flags stand for."""
    if options.codec is not None and options.codec != AUTO:
        from .. import codecs

        codecs.get(options.codec)
    if options.plan is not None:
        from ..base.plan import FusionPlan

        FusionPlan.from_yaml(options.plan)
    threshold = options.fusion_threshold_mb
    if threshold is not None and not threshold >= 0:
        raise ConfigError(f"--fusion-threshold-mb {threshold}; expected megabytes of at least 0")
    warning = "inf" if options.no_stall_check else options.stall_check_warning_time_seconds
    deadline = options.gloo_timeout_seconds or options.stall_check_shutdown_time_seconds
    settings = {
        "HOROVOD_FUSION_THRESHOLD": None if threshold is None else int(threshold * (1 << 20)),
        "HOROVOD_CACHE_CAPACITY": options.cache_capacity,
        "FUSIONLAYER_CODEC": options.codec,
        "FUSIONLAYER_PLAN": options.plan,
        "FUSIONLAYER_TIMELINE": options.timeline_filename,
        "HOROVOD_STALL_CHECK_DISABLE": _switch(options.no_stall_check),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": options.stall_check_warning_time_seconds,
        "FUSIONLAYER_STALL_WARNING": warning,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": options.stall_check_shutdown_time_seconds,
        "FUSIONLAYER_TIMEOUT": deadline,
        "HOROVOD_LOG_LEVEL": options.log_level,
        "HOROVOD_ELASTIC_TIMEOUT": options.elastic_timeout,
        "GLOO_SOCKET_IFNAME": options.network_interface,
        "NCCL_SOCKET_IFNAME": options.network_interface,
    }
    return {name: str(value) for name, value in settings.items() if value is not None}


def _switch(given: bool | None) -> str | None:
    """Return a flag as a variable; None if neither the flag nor its opposite was given."""
    return None if given is None else str(int(given))


def _hosts(options: argparse.Namespace) -> list[Host]:
    if options.hosts and options.hostfile:
        raise ConfigError("-H and --hostfile both name hosts; give one of them")
    if options.hosts:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile else [Host("localhost", options.num_proc)]


def _elastic_hosts(options: argparse.Namespace) -> list[Host]:
    """Return the hosts of an elastic job. All of its agents have the same number of processes."""
    least, most = options.min_np or options.num_proc, options.max_np or options.num_proc
    if not least <= options.num_proc <= most:
        raise ConfigError(f"--min-np {least}, -np {options.num_proc}, --max-np {most}; expected them in this order")
    if not (options.hosts or options.hostfile):
        # torchrun adds and removes whole agents. One agent for each process, so that processes come and go one by one.
        return [Host("localhost", 1)] * most
    hosts = _hosts(options)
    if len({host.slots for host in hosts}) > 1:
        raise ConfigError(
            "torchrun needs equally many slots on all hosts of an elastic job; given "
            + ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        )
    assign(options.num_proc, hosts)
    return hosts[: max(1, most // hosts[0].slots)]


def _nodes_needed(options: argparse.Namespace, agents: int) -> int:
    """Return how many agents must succeed for the job to succeed."""
    if options.min_np is None and options.max_np is None:
        return agents
    slots = 1 if not (options.hosts or options.hostfile) else _hosts(options)[0].slots
    least: int = options.min_np or options.num_proc
    return -(-least // slots)


def _meeting_point(hosts: Sequence[Host], interface: str | None) -> str:
    """Return an address of the first host that all hosts can use."""
    if not hosts[0].is_here:
        return hosts[0].address
    if all(host.is_here for host in hosts):
        return "127.0.0.1"
    chosen = (interface or "").split(",")[0]
    return addresses().get(chosen, reachable_names())[0]


def _held_port() -> int:
    """Return a port at which a child of this process can listen. Until then no other process gets it."""
    _held.append(socket.socket())
    _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does, so that both may have it
    _held[-1].bind(("", 0))
    return int(_held[-1].getsockname()[1])
