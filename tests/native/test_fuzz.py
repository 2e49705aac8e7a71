"""Decoders of lossless messages under AddressSanitizer and UndefinedBehaviorSanitizer: fuzz.cpp on the C ABI."""

import subprocess
from pathlib import Path

import pytest

from fusionlayer.base import libraries
from fusionlayer.base.errors import ConfigError
from tests.native.conftest import CSRC, sanitized
from tests.tiers import exhaustive, long

pytestmark = pytest.mark.medium

MARCH = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *(f"-I{CSRC / part}" for part in ("include", "core", "cpu", "")),
)
RUNS = 4000


def usable() -> list[str]:
    """Return the instruction sets of this machine that there is a vector code of its own for."""
    found = []
    for name in ("baseline", "avx512"):
        try:
            libraries.select_isa(name)
        except ConfigError:
            continue
        found.append(name)
    libraries.select_isa("auto")
    return found


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, with the decoders in it; skip where the compiler has no sanitizers."""
    have = [f"-DFL_HAVE_{name.upper()}" for name in usable() if name != "baseline"]
    kernels = Path(__file__).with_name("fuzz_kernels.cpp")
    found = [*sorted((CSRC / "cpu").glob("*.cpp")), *sorted((CSRC / "codecs").glob("*/*.cpp"))]
    sources = [path for path in found if path.stem not in ("kernels", path.parent.name)]
    each = [kernels, *(CSRC / f"codecs/{codec}/{codec}.cpp" for codec in ("delta", "rans", "zip"))]
    parts: list[tuple[Path, str, tuple[str, ...]]] = [
        (path, f"{path.stem}.{name}", (f"-DFL_ISA={name}", *MARCH[name])) for name in usable() for path in each
    ]
    parts += [(path, path.stem, tuple(have)) for path in (*sources, Path(__file__).with_name("fuzz.cpp"))]
    return sanitized(tmp_path_factory.mktemp("fuzz"), FLAGS, parts)


@long(guarded_by="tests/codecs/test_fuzz.py::test_decoders")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", usable())
def test_nothing_is_read_or_written_out_of_bounds(fuzzer: Path, isa: str) -> None:
    run = subprocess.run([str(fuzzer), isa, str(RUNS), "7"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == f"{RUNS} inputs\n"


FRAMES_FLAGS = (
    *("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *(f"-I{CSRC / part}" for part in ("include", "core", "cpu", "sockets")),
)
SOURCES = (*(f"sockets/{name}.cpp" for name in ("connection", "incoming", "outgoing", "mac", "tls")), "cpu/crc32c.cpp")
FAST = {"guarded_by": "tests/transport/test_sockets.py::test_sizes_from_the_wire_are_checked"}


@pytest.fixture(scope="module")
def frames_fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program; skip where the compiler has no sanitizers."""
    sources = [*(CSRC / source for source in SOURCES), Path(__file__).with_name("fuzz_frames.cpp")]
    return sanitized(tmp_path_factory.mktemp("frames"), FRAMES_FLAGS, [(source, source.stem, ()) for source in sources])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "runs", [pytest.param(20_000, marks=exhaustive(**FAST)), pytest.param(1_000_000, marks=long(**FAST))]
)
def test_no_bytes_of_a_peer_lead_out_of_bounds(frames_fuzzer: Path, runs: int) -> None:
    """Nor, with tags, to a byte in a caller's memory that the peer has not sent."""
    run = subprocess.run([str(frames_fuzzer), str(runs), "7"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == f"{runs} inputs\n"
