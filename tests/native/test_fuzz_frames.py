"""The parser of frames of ``sockets`` under AddressSanitizer and UndefinedBehaviorSanitizer: fuzz_frames.cpp."""

import subprocess
from pathlib import Path

import pytest

from tests.native.conftest import CSRC, sanitized
from tests.tiers import exhaustive, long

pytestmark = pytest.mark.medium

FLAGS = (
    *("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *(f"-I{CSRC / part}" for part in ("include", "core", "cpu", "sockets")),
)
SOURCES = (*(f"sockets/{name}.cpp" for name in ("connection", "incoming", "outgoing", "mac", "tls")), "cpu/crc32c.cpp")
FAST = {"guarded_by": "tests/transport/test_sockets.py::test_sizes_from_the_wire_are_checked"}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program; skip where the compiler has no sanitizers."""
    sources = [*(CSRC / source for source in SOURCES), Path(__file__).with_name("fuzz_frames.cpp")]
    return sanitized(tmp_path_factory.mktemp("frames"), FLAGS, [(source, source.stem, ()) for source in sources])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "runs", [pytest.param(20_000, marks=exhaustive(**FAST)), pytest.param(1_000_000, marks=long(**FAST))]
)
def test_no_bytes_of_a_peer_lead_out_of_bounds(fuzzer: Path, runs: int) -> None:
    """Nor, with tags, to a byte in a caller's memory that the peer has not sent."""
    run = subprocess.run([str(fuzzer), str(runs), "7"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == f"{runs} inputs\n"
