"""Quotients of two operations and a product are those of a division: quotients.cpp on the vectors of this machine."""

import subprocess
from pathlib import Path

import pytest

from fusionlayer.base import libraries
from fusionlayer.base.errors import ConfigError
from tests.native.conftest import CSRC, find_compiler
from tests.native.test_fuzz import MARCH

pytestmark = pytest.mark.medium


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_quotients_that_lie_near_the_middle_of_two_floats_are_rounded_right(isa: str, tmp_path: Path) -> None:
    try:
        libraries.select_isa(isa)
    except ConfigError:
        pytest.skip(f"this CPU has no {isa}")
    finally:
        libraries.select_isa("auto")
    program, source = tmp_path / "quotients", Path(__file__).with_name("quotients.cpp")
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *MARCH[isa], f"-DFL_ISA={isa}"]
    includes = [f"-I{CSRC / part}" for part in ("include", "core", "cpu")]
    subprocess.run([find_compiler(), *flags, *includes, str(source), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    tried = int(run.stdout.split()[0])
    assert run.stdout == f"{tried} quotients, 0 wrong\n"
    assert tried > 40_000_000
