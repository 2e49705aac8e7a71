"""Libraries that several modules of these tests compare."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from fusionlayer import native

CSRC = Path(native.__file__).parent / "csrc"
HOST = Path(__file__).parent / "cuda_on_host"
COMPILE = (
    *("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(f"-I{HOST}", f"-I{CSRC / 'include'}", f"-I{CSRC / 'core'}", '-DFL_CUDA_ARCHS="host"'),
)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return csrc/cuda as a library for this CPU."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: neither g++ nor c++ is on PATH"
    folder = tmp_path_factory.mktemp("cuda_on_host")
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    compiles = [
        subprocess.Popen(
            [compiler, *COMPILE, "-x", "c++", "-c", str(source), "-o", str(folder / f"{source.stem}.o")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source in sources
    ]
    for process in compiles:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    library = folder / "libkernels.so"
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    subprocess.run([compiler, "-shared", "-fsanitize=undefined", "-o", str(library), *objects], check=True)
    loaded = ctypes.CDLL(str(library))
    native.declare(loaded)
    for name in ("fl_build_info", "fl_last_error"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded
