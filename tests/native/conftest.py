"""Libraries that several modules of these tests compare."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionlayer import native
from tests.cores import all_cores
from tests.tiers import exhaustive

CSRC = Path(native.__file__).parent / "csrc"
HOST = Path(__file__).parent / "cuda_on_host"
COMPILE = (
    *("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(f"-I{HOST}", f"-I{CSRC / 'include'}", f"-I{CSRC / 'core'}", '-DFL_CUDA_ARCHS="host"'),
)
# Most of the compiler's time, so the exhaustive tier has it: every test of the kernels runs again with it.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Return a function that gives csrc/cuda as a library for this CPU: "plain" or "sanitized".

    The workers of pytest-xdist compile it once for all.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    @functools.cache
    def load(build: str) -> ctypes.CDLL:
        folder = shared / f"cuda_on_host_{build}"
        folder.mkdir(exist_ok=True)
        library = folder / "libkernels.so"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # guards the folder while one worker compiles
            if not library.exists():
                with all_cores():
                    compile_kernels(folder, library, SANITIZE if build == "sanitized" else ())
        loaded = ctypes.CDLL(str(library))
        native.declare(loaded)
        for name in ("fl_build_info", "fl_last_error"):
            getattr(loaded, name).restype = ctypes.c_char_p
        return loaded

    return load


@pytest.fixture(params=["plain", pytest.param("sanitized", marks=exhaustive)])
def kernels(request: pytest.FixtureRequest, host_kernels: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the library of ``host_kernels``."""
    return host_kernels(request.param)


def compile_kernels(folder: Path, library: Path, sanitize: tuple[str, ...]) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: neither g++ nor c++ is on PATH"
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    compiles = [
        subprocess.Popen(
            [compiler, *COMPILE, *sanitize, "-x", "c++", "-c", str(source), "-o", str(folder / f"{source.stem}.o")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source in sources
    ]
    for process in compiles:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    subprocess.run([compiler, "-shared", *sanitize, "-o", str(library), *objects], check=True)
