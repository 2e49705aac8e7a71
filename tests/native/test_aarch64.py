"""The library for aarch64, run by an emulator, writes the bytes that the one for this machine writes."""

import itertools
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from fusionlayer import native
from tests.native.abi import (
    Area,
    Bytes,
    Case,
    Planes,
    Run,
    assert_same,
    block_cases,
    cast_case,
    chunked_case,
    dynamiq_case,
    int_case,
    onebit_case,
    qsdp_case,
    results,
    tah_case,
    thc_case,
    verbs_of,
    zip_case,
)
from tests.packaging.project_tree import CROSS, ROOT, cross_build
from tests.tiers import long

EMULATOR = "qemu-aarch64"
VERBS = ("fl_encode", "fl_decode", "fl_decode_sum", "fl_recode")

pytestmark = [
    pytest.mark.medium,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}"),
    long(guarded_by="tests/codecs/test_isa.py::test_bytes_depend_neither_on_instruction_set_nor_on_threads"),
]


@dataclass(frozen=True)
class Remote(Run):
    """A run whose verbs the program ``remote_core.cpp`` calls, with the bytes of all buffers."""

    requests: IO[bytes] | None = None
    answers: IO[bytes] | None = None

    def _call(self, verb: str, buffers: list[Area | Planes | None], *options: int) -> list[Bytes]:
        assert self.requests and self.answers
        option = options[0] if options else 0
        self.requests.write(struct.pack("q", VERBS.index(verb)) + bytes(self.case.spec))
        self.requests.write(struct.pack("qq", option, len(buffers)))
        areas = [buffer.area if isinstance(buffer, Planes) else buffer for buffer in buffers]
        for buffer, area in zip(buffers, areas, strict=True):
            if area is None:
                self.requests.write(struct.pack("qqq", -1, 0, 0))
                continue
            self.requests.write(struct.pack("qqq", area.address % 64, area.data.size, isinstance(buffer, Planes)))
            if isinstance(buffer, Planes):
                given = buffer.messages
                # A plane that a codec lacks is null, and lies at 0 here.
                starts = [pointer - area.address if pointer else 0 for pointer in given.plane]
                self.requests.write(struct.pack("7q", *starts, given.stride, given.count))
            self.requests.write(area.data.tobytes())
        self.requests.flush()
        (status,) = struct.unpack("q", self.answers.read(8))
        assert status == 0, f"{verb} of {self.case} gave status {status}"
        present = [area for area in areas if area is not None]
        return [np.frombuffer(self.answers.read(area.data.size), np.uint8) for area in present]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """Build the library with setup.py, link it with ``remote_core.cpp`` and start the program."""
    folder = tmp_path_factory.mktemp("aarch64")
    library, program = cross_build(folder), folder / "remote_core"
    command: list[str | Path] = [CROSS, "-O1", "-std=c++17", f"-I{ROOT}/fusionlayer/csrc/include", "-o", program]
    command += [Path(__file__).with_name("remote_core.cpp"), library, f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    run = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def cases() -> Iterator[Case]:
    """Yield cases of every codec that the C ABI's four verbs have, with all options that change arithmetic."""
    for bits, group, flags in itertools.product((2, 3, 4, 8), (32, 128, 4096), range(4)):
        yield int_case(bits, group, flags)
    yield from (cast_case(wire) for wire in range(3))
    yield from block_cases()
    yield from (zip_case(wire, choice) for wire, choice in itertools.product(range(3), range(3)))
    yield from (thc_case(flags) for flags in range(8))
    yield from (tah_case(bits, 64, 32, share) for bits, share in ((4, 0), (4, 1 << 30), (6, 0)))
    yield from (dynamiq_case(flags) for flags in range(2))
    yield from (chunked_case(bits, 512, kept) for bits in (2, 3, 8, 32) for kept in (1, 9, 300))
    yield from (onebit_case(group) for group in (32, 1024))
    yield from (qsdp_case(bits, group, flags) for bits, group, flags in ((4, 32, 0), (4, 256, 1), (8, 1024, 1)))


def varied(given: Iterable[Case]) -> Iterator[Case]:
    """Give cases lengths, types, counts and alignments in turn."""
    for i, case in enumerate(given):
        numel = (1, 4097, 129, 2048, 9_001)[i % 5]
        if case.codec == native.TAHQUANT:
            yield replace(case, numel=64 * 40, count=2)
        elif case.codec == native.DYNAMIQ:
            yield dynamiq_case(case.param[0], numel=numel, count=1 + i % 2)
        elif case.codec == native.ZIP:
            yield replace(case, numel=numel, count=1 + i % 3)
        else:
            yield replace(case, numel=numel, dtype=i % 3, count=(1, 3, 2)[i % 3], misaligned=i % 7 == 3)


def test_aarch64_writes_the_bytes_of_this_machine(emulated: subprocess.Popen[bytes]) -> None:
    tried = 0
    for case in varied(cases()):
        remote = Remote(native.cpu(), case, native.cpu(), requests=emulated.stdin, answers=emulated.stdout)
        got = [getattr(remote, verb)(**options) for verb, options in verbs_of(case)]
        assert_same(got, results(native.cpu(), case, native.cpu()), case)
        tried += 1
    assert tried > 150
