"""``fusionlayer doctor``: checks the installation, this machine and the environment variables."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__, codecs, context, launch
from ..base import config, libraries
from ..base.errors import FusionLayerError
from ..base.registry import Registry
from ..codecs import Codec
from ..codecs.base import registry as codecs_known
from ..collectives._base import gathers as gathers_known
from ..collectives._base import registry as collectives_known
from ..functional import Sum, all_reduce
from ..planning.profiler.machine import describe_machine
from ..process.interfaces import addresses
from ..scheduler.planners._base import registry as planners_known
from ..transport import local
from . import environment
from .parsers.doctor import COLUMNS
from .progress import ProgressLine
from .spawn import run_on_ranks, without_launcher
from .tables import Column, Table, print_text, show

_PACKAGES = ("numpy", "scipy", "PyYAML", "mpi4py", "deepspeed", "matplotlib", "rich")
_NEEDED = ("numpy", "scipy", "PyYAML")
_PROBE = ["-c", "from fusionlayer.cli.doctor import sum_over_ranks; sum_over_ranks()"]
_PATIENCE = 120.0
_ELEMENTS = 5000


@dataclass(frozen=True)
class CheckResult:
    """The state of one thing.

    Attributes:
        section: "versions", "core", "network", "codecs", "plugins", "transports" or "environment".
        name: the name of the thing.
        state: "ok", "none", "note" or "FAIL".
        detail: version, value, or defect and remedy.
    """

    section: str
    name: str
    state: str
    detail: str


def run(options: argparse.Namespace) -> int:
    """Print what ``options`` ask for; return the exit status."""
    return report(options.json, options.columns)


def report(as_json: bool, columns: Sequence[str] | None = None) -> int:
    """Print the findings; return the exit status."""
    with ProgressLine("doctor") as progress:
        findings = diagnose(progress.at)
    failed = [finding for finding in findings if finding.state == "FAIL"]
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        table = [
            Column(name, [getattr(finding, name) for finding in findings], text=True, wraps=name == "detail")
            for name in COLUMNS
        ]
        show([Table(f"fusionlayer {__version__}", table)], columns)
        print_text("all that is installed works" if not failed else f"{len(failed)} failed: " + _names(failed))
    return 1 if failed else 0


def diagnose(note: Callable[[float, str], object] = lambda done, what: None) -> list[CheckResult]:
    """Return the findings about this installation, machine and environment.

    ``note`` is called with the completed share of the work, and the next subject.
    """
    parts: dict[str, tuple[float, Callable[[], Iterator[CheckResult]]]] = {  # where each part begins, as measured once
        "versions": (0.0, _versions),
        "the core": (0.02, _core),
        "the network": (0.04, _network),
        "codecs": (0.06, _codecs),
        "plugins": (0.2, _plugins),
        "transports": (0.2, _transports),
        "the environment": (0.98, _environment),
    }
    findings: list[CheckResult] = []
    for name, (share, look) in parts.items():
        note(share, name)
        findings += look()
    return findings


def _names(findings: list[CheckResult]) -> str:
    return ", ".join(f"{finding.section} {finding.name}" for finding in findings)


def _tried(section: str, name: str, attempt: Callable[[], str]) -> CheckResult:
    """Return the finding of ``attempt``, or a finding with its error."""
    try:
        return CheckResult(section, name, "ok", attempt())
    except Exception as error:  # one failure of any kind must not hide the other findings
        lines = str(error).splitlines() or [""]
        return CheckResult(section, name, "FAIL", f"{type(error).__name__}: {lines[0]}")


def _versions() -> Iterator[CheckResult]:
    machine = describe_machine()
    yield CheckResult("versions", "fusionlayer", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    yield CheckResult("versions", "python", "ok", f"{platform.python_version()}, {sys.executable}")
    cores = len(os.sched_getaffinity(0))
    yield CheckResult("versions", "machine", "ok", f"{machine['hardware']}, {cores} cores, load {machine['load']}")
    yield CheckResult("versions", "torch", "ok", str(torch.__version__))
    for package in _PACKAGES:
        try:
            yield CheckResult("versions", package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield CheckResult("versions", package, "FAIL" if package in _NEEDED else "none", "not installed")


def _core() -> Iterator[CheckResult]:
    def cpu() -> str:
        info = libraries.build_info(__version__)
        return f"{info.isa} of {', '.join(info.isas)}; {info.compiler}"

    yield _tried("core", "cpu", cpu)
    if not libraries.library_path("cuda").exists():
        yield CheckResult("core", "cuda", "none", libraries.NO_CUDA_LIBRARY)
    else:
        yield _tried(
            "core", "cuda", lambda: ", ".join(f"{k} {v}" for k, v in libraries.build_info(__version__).cuda.items())
        )
    if not torch.cuda.is_available():
        yield CheckResult("core", "gpu", "none", f"torch sees no CUDA device (torch's CUDA: {torch.version.cuda})")
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)

        def gpu(device: torch.device = device) -> str:
            _round_trip(codecs.get("int8"), device)
            return torch.cuda.get_device_name(device)

        yield _tried("core", f"gpu {index}", gpu)
    nccl = dist.is_available() and dist.is_nccl_available()
    yield CheckResult("core", "nccl", "ok" if nccl else "none", "in torch" if nccl else "torch was built without it")


def _network() -> Iterator[CheckResult]:
    here = addresses()
    for name, given in here.items():
        speed = Path("/sys/class/net", name, "speed")
        try:
            rate = f", {int(speed.read_text())} Mbit/s"
        except (OSError, ValueError):
            rate = ""  # a virtual device has none
        yield CheckResult("network", name, "ok", ", ".join(given) + ("" if rate == ", -1 Mbit/s" else rate))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = os.environ.get(variable)
        prefixes = [part.lstrip("^=") for part in (chosen or "").split(",") if part]
        if prefixes and not any(name.startswith(prefix) for name in here for prefix in prefixes):
            yield CheckResult(
                "network", variable, "FAIL", f"{chosen!r} is no interface with an address; there are {[*here]}"
            )
    yield from _own_name()
    for program in ("torchrun", "mpirun", "ssh"):
        path = _program(program)
        yield CheckResult("network", program, "ok" if path else "none", path or "not found")


def _own_name() -> Iterator[CheckResult]:
    """Report the address of this host's name, which gloo gives to other hosts."""
    name = socket.gethostname()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "unknown"
    if address == "unknown" or address.startswith("127."):
        detail = f"{address}, which leads other hosts nowhere: for jobs on several hosts set GLOO_SOCKET_IFNAME"
        yield CheckResult("network", name, "note", detail)
    else:
        yield CheckResult("network", name, "ok", address)


def _program(name: str) -> str | None:
    """Return the path of a program: next to this Python, where virtual environments put it, or on PATH."""
    beside = Path(sys.prefix, "bin", name)
    return str(beside) if beside.exists() else shutil.which(name)


def _codecs() -> Iterator[CheckResult]:
    for name in codecs.names():

        def try_it(name: str = name) -> str:
            codec = codecs.get(name)
            bits, error = _round_trip(codec, torch.device("cpu"))
            loss = "lossless" if codec.lossless else f"error {error:.2g}"
            return f"{bits:.3g} bits an element, {loss}"

        yield _tried("codecs", name, try_it)


def _plugins() -> Iterator[CheckResult]:
    """Report plugins of other packages, and whether they work."""
    for registry in (codecs_known, collectives_known, gathers_known, planners_known):
        for name, package in registry.offered().items():

            def try_it(registry: Registry[Any] = registry, name: str = name, package: str = package) -> str:
                registry.get(name)
                return package

            yield _tried("plugins", f"{registry.kind} {name}", try_it)


def _round_trip(codec: Codec, device: torch.device) -> tuple[float, float]:
    """Return a codec's bits per element, and the share of the energy that it loses."""
    x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    payload = codec.compress(x, 1)
    back = codec.decompress(payload, x.shape)
    if codec.lossless and not torch.equal(back, x):
        raise FusionLayerError("what was decoded is not what was encoded")
    if not back.isfinite().all():
        raise FusionLayerError("finite values were decoded as something else")
    return 8 * payload.numel() / x.numel(), float((back - x).square().sum() / x.square().sum())


def _transports() -> Iterator[CheckResult]:
    yield _tried("transports", "local", _try_local)
    yield _tried("transports", "c10d", _try_c10d)
    mpirun = _program("mpirun")
    if find_spec("mpi4py") is None or mpirun is None:
        missing = "no mpi4py: pip install 'fusionlayer[mpi]'" if mpirun else "no mpirun: install Open MPI or MPICH"
        yield CheckResult("transports", "mpi", "none", missing)
    else:
        yield _tried("transports", "mpi", lambda: _try_mpi(mpirun))


def _try_local() -> str:
    def reduce(rank: int) -> float:
        return float(all_reduce(torch.full((_ELEMENTS,), rank + 1.0, device="cpu"), "int8", op=Sum).mean())

    first, second = local.run(reduce, 2)
    if first != second or abs(first - 3) > 0.03:
        raise FusionLayerError(f"the sum of 1 and 2 is {first} on one rank and {second} on the other")
    return "2 threads"


def _try_c10d() -> str:
    with tempfile.TemporaryFile("w+") as out:
        run_on_ranks(_PROBE, 2, _PATIENCE, {"FUSIONLAYER_TRANSPORT": "c10d"}, out)
        out.seek(0)
        return f"gloo, {out.read().strip()}"


def _try_mpi(mpirun: str) -> str:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    root = {f"{mpi}_ALLOW_RUN_AS_ROOT{suffix}": "1" for mpi in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    oversubscribe = ["--oversubscribe"] if any("Open MPI" in line for line in version) else []
    done = _finish([mpirun, "-n", "2", *oversubscribe, sys.executable, *_PROBE], "mpi", **root)
    return f"{version[0] if version else mpirun}: {done}"


def sum_over_ranks() -> None:
    """Sum with and without a codec, in a process of its own, as a library may abort; rank 0 prints the transport."""
    context.init(timeout=60)
    rank, size = context.rank(), context.size()
    for codec in ("raw", "int8"):
        x = torch.full((5000,), float(rank + 1), device="cpu")
        all_reduce(x, codec=codec, op=Sum)
        torch.testing.assert_close(x, torch.full((5000,), size * (size + 1) / 2, device="cpu"), rtol=0.01, atol=0)
    if rank == 0:
        print(f"{size} processes, {type(context.transport()).__name__}", flush=True)
    context.shutdown()


def _finish(command: list[str], transport: str, **variables: str) -> str:
    """Return the last line that a launcher's processes have printed."""
    environ = {**without_launcher(), "FUSIONLAYER_TRANSPORT": transport, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if done.returncode:
        why = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
        raise FusionLayerError(why[0] if why else f"{command[0]} ended with status {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def _environment() -> Iterator[CheckResult]:
    yield _tried("environment", "settings", _read_settings)
    yield _tried("environment", "launcher", _read_place)
    for variable in environment.report():
        detail = f"{variable.value} ({variable.meaning})" if variable.meaning else variable.value
        yield CheckResult("environment", variable.name, "ok" if variable.used else "note", detail)


def _read_settings() -> str:
    chosen, default = config.flat(config.load()), config.flat(config.Config())
    differ = [f"{name}={value}" for name, value in chosen.items() if value != default[name]]
    return ", ".join(differ) or "the defaults"


def _read_place() -> str:
    place = launch.find_place()
    return f"{place.launcher}: rank {place.rank} of {place.size}, {place.local_rank} of {place.local_size} here"
