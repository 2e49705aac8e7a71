"""Decoders of lossless messages under AddressSanitizer and UndefinedBehaviorSanitizer: fuzz.cpp on the C ABI."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusionlayer import native
from fusionlayer.base.errors import ConfigError
from tests.tiers import long

pytestmark = pytest.mark.medium

CSRC = Path(__file__).resolve().parents[2] / "fusionlayer/csrc"
MARCH = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f"-I{CSRC / part}" for part in ("include", "core", "cpu", "")),
)
RUNS = 4000


def usable() -> list[str]:
    """Return the instruction sets of this machine that there is a vector code of its own for."""
    found = []
    for name in ("baseline", "avx512"):
        try:
            native.select_isa(name)
        except ConfigError:
            continue
        found.append(name)
    native.select_isa("auto")
    return found


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, with the decoders in it; skip where the compiler has no sanitizers."""
    compiler = shutil.which("g++") or shutil.which("c++")
    folder = tmp_path_factory.mktemp("fuzz")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    assert compiler, "no C++ compiler: neither g++ nor c++ is on PATH"
    run = subprocess.run([compiler, *FLAGS, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if run.returncode:
        pytest.skip("the compiler has no sanitizers")
    have = [f"-DFL_HAVE_{name.upper()}" for name in usable() if name != "baseline"]
    kernels = Path(__file__).with_name("fuzz_kernels.cpp")
    found = [*sorted((CSRC / "cpu").glob("*.cpp")), *sorted((CSRC / "codecs").glob("*/*.cpp"))]
    sources = [path for path in found if path.stem not in ("kernels", path.parent.name)]
    each = [kernels, *(CSRC / f"codecs/{codec}/{codec}.cpp" for codec in ("delta", "rans", "zip"))]
    parts: list[tuple[Path, str, tuple[str, ...]]] = [
        (path, f"{path.stem}.{name}", (f"-DFL_ISA={name}", *MARCH[name])) for name in usable() for path in each
    ]
    parts += [(path, path.stem, tuple(have)) for path in (*sources, Path(__file__).with_name("fuzz.cpp"))]

    def build(part: tuple[Path, str, tuple[str, ...]]) -> str:
        source, name, more = part
        target = str(folder / f"{name}.o")
        subprocess.run([str(compiler), *FLAGS, *more, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, parts))
    program = folder / "fuzz"
    subprocess.run([compiler, *FLAGS, *objects, "-o", str(program)], check=True)
    return program


@long(guarded_by="tests/codecs/test_fuzz.py::test_decoders")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", usable())
def test_nothing_is_read_or_written_out_of_bounds(fuzzer: Path, isa: str) -> None:
    run = subprocess.run([str(fuzzer), isa, str(RUNS), "7"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == f"{RUNS} inputs\n"
