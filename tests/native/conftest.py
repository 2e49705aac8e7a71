"""Libraries that several modules of these tests compare."""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusionlayer.base import libraries
from tests.cores import all_cores
from tests.packaging.project_tree import build_script
from tests.tiers import long

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "fusionlayer/csrc"
HOST = Path(__file__).parent / "cuda_on_host"
COMPILE = (
    *("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(f"-I{HOST}", f"-I{CSRC / 'include'}", f"-I{CSRC / 'core'}", f"-I{CSRC}", '-DFL_CUDA_ARCHS="host"'),
)
# The long tier has it: every test of the kernels runs again with it. -O1 takes four times as long to compile.
SANITIZE = ("-O0", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")


@pytest.fixture(scope="session")
def host_kernels() -> Callable[[str], ctypes.CDLL]:
    """Return a function that gives csrc/cuda as a library for this CPU: "plain" or "sanitized".

    It is compiled when a source or a flag has changed, by the first worker that needs it: half a minute. The object
    cache of setup.py keeps it for other clones.
    """
    setup = build_script()

    @functools.cache
    def load(build: str) -> ctypes.CDLL:
        folder = ROOT / "build" / f"cuda_on_host_{build}"
        folder.mkdir(parents=True, exist_ok=True)
        library, made_of = folder / "libkernels.so", folder / "made_of"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # guards the folder while one worker compiles
            sanitize = SANITIZE if build == "sanitized" else ()
            wanted = digest_of_sources(sanitize)
            if not made_of.exists() or made_of.read_text() != wanted:
                made_of.unlink(missing_ok=True)
                if not setup.fetch_object(wanted, library):
                    with all_cores():
                        compile_kernels(folder, library, sanitize)
                    setup.store_object(wanted, library)
                made_of.write_text(wanted)
        loaded = ctypes.CDLL(str(library))
        libraries.declare(loaded)
        libraries.declare_cuda(loaded)
        for name in ("fl_build_info", "fl_last_error"):
            getattr(loaded, name).restype = ctypes.c_char_p
        return loaded

    return load


@pytest.fixture(params=["plain", pytest.param("sanitized", marks=long)])
def kernels(request: pytest.FixtureRequest, host_kernels: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the library of ``host_kernels``."""
    return host_kernels(request.param)


def digest_of_sources(sanitize: tuple[str, ...]) -> str:
    """Return a digest of all that the library is made of: the compiler, its flags, sources and headers."""
    version = subprocess.run([find_compiler(), "--version"], capture_output=True, check=True).stdout
    flags = [flag.replace(str(ROOT), "") for flag in (*COMPILE, *sanitize)]
    digest = hashlib.sha256(version + repr(flags).encode())
    sources = (path for folder in (CSRC, HOST) for path in folder.rglob("*") if path.is_file())
    for path in sorted(path for path in sources if not {"cpu", "sockets"} & {*path.relative_to(ROOT).parts}):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def find_compiler() -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: neither g++ nor c++ is on PATH"
    return compiler


def compile_kernels(folder: Path, library: Path, sanitize: tuple[str, ...]) -> None:
    compiler = find_compiler()
    sources = [HOST / "devices.cpp", *sorted(CSRC.rglob("*.cu"))]

    def compile_one(source: Path) -> None:
        output = str(folder / f"{source.stem}.o")
        command = [compiler, *COMPILE, *sanitize, "-x", "c++", "-c", str(source), "-o", output]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # more would only keep other tests waiting
        list(pool.map(compile_one, sources))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    subprocess.run([compiler, "-shared", *sanitize, "-o", str(library), *objects], check=True)


def sanitized(folder: Path, flags: tuple[str, ...], parts: Sequence[tuple[Path, str, tuple[str, ...]]]) -> Path:
    """Return a program of ``parts`` (source, name of its object, more flags) with the sanitizers of memory and values.

    Skip where the compiler has none.
    """
    command = [find_compiler(), *flags, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    if subprocess.run([*command, str(probe), "-o", str(folder / "probe")], capture_output=True).returncode:
        pytest.skip("the compiler has no sanitizers")

    def build(part: tuple[Path, str, tuple[str, ...]]) -> str:
        source, name, more = part
        target = str(folder / f"{name}.o")
        subprocess.run([*command, *more, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, parts))
    subprocess.run([*command, *objects, "-o", str(folder / "fuzz")], check=True)
    return folder / "fuzz"
