"""The CUDA kernels, compiled for the CPU (see cuda_on_host/), write the bytes that the CPU core writes."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fusionlayer import native

pytestmark = pytest.mark.short

Bytes = npt.NDArray[np.uint8]

CSRC = Path(native.__file__).parent / "csrc"
HOST = Path(__file__).parent / "cuda_on_host"
GUARD, GUARD_BYTES = 0xA5, 256
F32, BF16, F16 = 0, 1, 2
HADAMARD, STOCHASTIC = native.INT_HADAMARD, native.INT_STOCHASTIC
LENGTHS = (1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)
COMPILE = (
    *("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(f"-I{HOST}", f"-I{CSRC / 'include'}", f"-I{CSRC / 'core'}", '-DFL_CUDA_ARCHS="host"'),
)


@pytest.fixture(scope="module")
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
    loaded.fl_build_info.restype = loaded.fl_last_error.restype = ctypes.c_char_p
    return loaded


@dataclass(frozen=True)
class Case:
    """One spec, and how the buffers lie."""

    codec: int
    param: tuple[int, int, int]
    dtype: int
    numel: int
    count: int = 1
    seed: int = 0x1234_5678_9ABC_DEF0
    offset: int = 0
    misaligned: bool = False
    """x, residual and out are aligned to their own type only."""

    @property
    def spec(self) -> native.Spec:
        param = (ctypes.c_uint32 * 4)(*self.param)
        return native.Spec(self.codec, self.dtype, param, self.seed, self.offset, self.numel)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        if self.codec == native.CAST:
            return (self.numel * itemsize(self.param[0]),)
        bits, group, _ = self.param
        groups = -(-self.numel // group)
        return groups * 4, groups * group * bits // 8


def itemsize(dtype: int) -> int:
    return 4 if dtype == F32 else 2


class Area:
    """``nbytes`` bytes at a multiple of 64, or ``shift`` bytes past one, with guard bytes on both sides."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._all = np.full(nbytes + 2 * GUARD_BYTES + 64 + shift, GUARD, np.uint8)
        begin = GUARD_BYTES + -(self._all.ctypes.data + GUARD_BYTES) % 64 + shift
        self._inside = slice(begin, begin + nbytes)
        self.data = self._all[self._inside]

    @property
    def pointer(self) -> int:
        return self.data.ctypes.data

    def guards_hold(self) -> bool:
        outside = self._all.copy()
        outside[self._inside] = GUARD
        return bool((outside == GUARD).all())


class Planes:
    """Messages: all planes of one message, then those of the next."""

    def __init__(self, case: Case, count: int) -> None:
        offsets = [0, *itertools.accumulate(-(-nbytes // 16) * 16 for nbytes in case.plane_bytes)]
        self._stride = offsets[-1] + 32
        self.area = Area(self._stride * max(count, 1))
        base = self.area.pointer
        pointers = (ctypes.c_void_p * native.MAX_PLANES)(*(base + offset for offset in offsets[:-1]))
        self.messages = native.Messages(pointers, self._stride, count)


def values(rng: np.random.Generator, dtype: int, numel: int) -> Bytes:
    """Return ``numel`` elements of all magnitudes: runs of zeros, subnormals, tiny, huge and not finite ones too."""
    v = rng.standard_normal(numel).astype(np.float32) * np.float32(0.01)
    v *= np.exp2(np.repeat(rng.integers(-8, 9, numel // 64 + 1), 64)[:numel]).astype(np.float32)
    kinds = np.repeat(rng.integers(0, 40, numel // 32 + 1), 32)[:numel]
    for kind, factor in enumerate((0.0, 1e-42, 1e-33, 1e38, 3e40)):
        with np.errstate(over="ignore"):
            v = np.where(kinds == kind, v * np.float64(factor), v).astype(np.float32)
    odd = (kinds == 5) & (rng.random(numel) < 0.05)
    v[odd] = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32), int(odd.sum()))
    bits = v.view(np.uint32)
    bits[odd & np.isnan(v)] ^= np.uint32(0x8000_4001)  # not the canonical NaN
    if dtype == BF16:
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    if dtype == F16:
        with np.errstate(over="ignore"):
            return v.astype(np.float16).view(np.uint8)
    return v.view(np.uint8)


class Run:
    """The verbs of one library on buffers that a case determines, so that two libraries get equal ones."""

    def __init__(self, library: ctypes.CDLL, case: Case, garbage: bool = False) -> None:
        self._library, self._case, self._garbage = library, case, garbage
        self._spec = case.spec
        self._areas: list[Area] = []

    def _area(self, content: Bytes, itemsize: int) -> Area:
        area = Area(content.size, itemsize if self._case.misaligned else 0)
        area.data[:] = content
        self._areas.append(area)
        return area

    def _values(self, salt: int, count: int) -> Area:
        case = self._case
        data = values(np.random.default_rng([salt, case.numel, case.dtype]), case.dtype, case.numel * count)
        return self._area(data, itemsize(case.dtype))

    def _residual(self, count: int) -> Area:
        return self._area(values(np.random.default_rng(9), F32, self._case.numel * count), 4)

    def _planes(self, count: int) -> Planes:
        planes = Planes(self._case, count)
        self._areas.append(planes.area)
        return planes

    def _call(self, verb: str, *arguments: object) -> None:
        status = getattr(self._library, verb)(ctypes.byref(self._spec), *arguments, None)
        assert status == 0, f"{verb} of {self._case} gave status {status}"

    def _encoded(self, count: int) -> Planes:
        """Return messages made by the CPU core: every library decodes the same ones."""
        planes = self._planes(count)
        if self._garbage:
            planes.area.data[:] = np.random.default_rng(5).integers(0, 256, planes.area.data.size, np.uint8)
            return planes
        x = self._values(1, count)
        status = native.cpu().fl_encode(ctypes.byref(self._spec), pointer(x), None, ctypes.byref(planes.messages), None)
        assert status == 0
        return planes

    def encode(self, residual: bool) -> None:
        case = self._case
        x, out = self._values(2, case.count), self._planes(case.count)
        kept = pointer(self._residual(case.count)) if residual else None
        self._call("fl_encode", pointer(x), kept, ctypes.byref(out.messages))

    def decode(self) -> None:
        case = self._case
        planes = self._encoded(case.count)
        out = self._area(np.full(case.numel * case.count * itemsize(case.dtype), 0x77, np.uint8), itemsize(case.dtype))
        self._call("fl_decode", ctypes.byref(planes.messages), pointer(out))

    def decode_sum(self, add: bool) -> None:
        planes = self._encoded(self._case.count)
        out = self._values(3, 1)
        self._call("fl_decode_sum", ctypes.byref(planes.messages), pointer(out), int(add))

    def recode(self, x: bool, residual: bool) -> None:
        planes, out = self._encoded(self._case.count), self._planes(1)
        added, kept = self._values(4, 1), self._residual(1)
        self._call(
            "fl_recode",
            ctypes.byref(planes.messages),
            pointer(added) if x else None,
            pointer(kept) if residual else None,
            ctypes.byref(out.messages),
        )

    def all_bytes(self) -> list[Bytes]:
        assert all(area.guards_hold() for area in self._areas), f"bytes outside the buffers were touched: {self._case}"
        return [area.data for area in self._areas]


def pointer(area: Area) -> ctypes.c_void_p:
    return ctypes.c_void_p(area.pointer)


VERBS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("encode", {"residual": False}),
    ("encode", {"residual": True}),
    ("decode", {}),
    ("decode_sum", {"add": False}),
    ("decode_sum", {"add": True}),
    ("recode", {"x": True, "residual": True}),
    ("recode", {"x": False, "residual": False}),
)


def check(kernels: ctypes.CDLL, case: Case, *, garbage: bool = False) -> None:
    """Compare all verbs of ``kernels`` and the CPU core; with ``garbage`` messages to decode are random bytes."""
    for verb, options in VERBS:
        runs = [Run(library, case, garbage) for library in (native.cpu(), kernels)]
        for run in runs:
            getattr(run, verb)(**options)
        for want, got in zip(*(run.all_bytes() for run in runs), strict=True):
            different = np.flatnonzero(want != got)
            assert different.size == 0, f"{verb}{options} of {case}: {different.size} bytes, first at {different[0]}"


def varied(cases: Iterable[Case]) -> Iterator[Case]:
    """Give neighbouring cases different dtypes, message counts and alignments."""
    for i, case in enumerate(cases):
        yield replace(case, dtype=i % 3, count=(1, 3, 0, 2, 5)[i % 5], misaligned=i % 7 == 3)


@pytest.mark.parametrize("flags", [0, HADAMARD, STOCHASTIC, HADAMARD | STOCHASTIC])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_int_writes_the_bytes_of_the_cpu_core(kernels: ctypes.CDLL, group: int, bits: int, flags: int) -> None:
    start = Case(native.INT, (bits, group, flags), F32, 0, offset=group * 3)
    for case in varied(replace(start, numel=numel) for numel in (*LENGTHS, group - 1, group + 1, 2 * group + 5, 3000)):
        check(kernels, case)


@pytest.mark.parametrize("wire", [F32, BF16, F16])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_cast_writes_the_bytes_of_the_cpu_core(kernels: ctypes.CDLL, dtype: int, wire: int) -> None:
    start = Case(native.CAST, (wire, 0, 0), dtype, 0)
    for case in varied(replace(start, numel=numel) for numel in (*LENGTHS, 511, 512, 513, 3000)):
        check(kernels, replace(case, dtype=dtype))


@pytest.mark.parametrize("codec, param", [(native.CAST, (BF16, 0, 0)), (native.INT, (4, 128, HADAMARD))])
def test_more_work_than_the_grid_has_warps(kernels: ctypes.CDLL, codec: int, param: tuple[int, int, int]) -> None:
    check(kernels, Case(codec, param, F32, numel=5000, count=40))
    check(kernels, Case(codec, param, BF16, numel=140_000))


@pytest.mark.parametrize("offset", [2**32 - 256, 2**40 + 128, 2**62])
def test_element_numbers_have_64_bits(kernels: ctypes.CDLL, offset: int) -> None:
    check(kernels, Case(native.INT, (8, 128, STOCHASTIC), F32, numel=700, count=2, offset=offset))


@pytest.mark.parametrize("group", [32, 128, 2048])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("flags", [0, HADAMARD])
def test_any_bytes_decode_alike(kernels: ctypes.CDLL, group: int, bits: int, flags: int) -> None:
    case = Case(native.INT, (bits, group, flags), F32, numel=4999, count=2)
    check(kernels, case, garbage=True)


def test_nothing_to_do(kernels: ctypes.CDLL) -> None:
    for case in (Case(native.INT, (4, 128, 0), F32, 0, count=3), Case(native.CAST, (F16, 0, 0), F32, 0)):
        check(kernels, case)


WRONG: tuple[tuple[str, Case], ...] = (
    ("codec", Case(2, (0, 0, 0), F32, 64)),
    ("dtype", Case(native.CAST, (F32, 0, 0), 3, 64)),
    ("wire dtype", Case(native.CAST, (3, 0, 0), F32, 64)),
    ("unused parameter", Case(native.CAST, (F32, 1, 0), F32, 64)),
    ("bits", Case(native.INT, (5, 128, 0), F32, 64)),
    ("group not a power of two", Case(native.INT, (4, 96, 0), F32, 64)),
    ("group too small", Case(native.INT, (4, 16, 0), F32, 64)),
    ("group too large", Case(native.INT, (4, 8192, 0), F32, 64)),
    ("flag", Case(native.INT, (4, 128, 4), F32, 64)),
    ("offset", Case(native.INT, (4, 128, 0), F32, 64, offset=64)),
    ("numel", Case(native.INT, (4, 128, 0), F32, -1)),
)


@pytest.mark.parametrize("case", [case for _, case in WRONG], ids=[name for name, _ in WRONG])
def test_a_wrong_spec_is_refused_as_on_the_cpu(kernels: ctypes.CDLL, case: Case) -> None:
    area = Area(4096)
    planes = (ctypes.c_void_p * native.MAX_PLANES)(*[area.pointer] * native.MAX_PLANES)
    messages, spec = ctypes.byref(native.Messages(planes, 4096, 1)), ctypes.byref(case.spec)
    verbs = {
        "fl_encode": (spec, pointer(area), None, messages, None),
        "fl_decode": (spec, messages, pointer(area), None),
        "fl_decode_sum": (spec, messages, pointer(area), 0, None),
        "fl_recode": (spec, messages, None, None, messages, None),
    }
    for verb, arguments in verbs.items():
        status = getattr(kernels, verb)(*arguments)
        assert status in (1, 2), f"{verb} accepted it"
        assert status == getattr(native.cpu(), verb)(*arguments)
    assert (area.data == GUARD).all()


def test_a_misaligned_plane_and_a_missing_tensor_are_refused(kernels: ctypes.CDLL) -> None:
    case = Case(native.INT, (4, 128, 0), F32, 64)
    area, spec = Area(4096), ctypes.byref(case.spec)
    good = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(area.pointer, area.pointer + 64), 0, 1)
    shifted = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(area.pointer, area.pointer + 72), 0, 1)
    assert kernels.fl_encode(spec, pointer(area), None, ctypes.byref(shifted), None) == 1
    assert kernels.fl_encode(spec, None, None, ctypes.byref(good), None) == 1
    assert kernels.fl_encode(None, pointer(area), None, ctypes.byref(good), None) == 1
    assert kernels.fl_decode(spec, ctypes.byref(good), None, None) == 1
    assert (area.data == GUARD).all()


def test_a_cuda_error_becomes_a_status_and_a_text(kernels: ctypes.CDLL) -> None:
    case = Case(native.CAST, (BF16, 0, 0), F32, 64)
    kernels.fail_next_cuda_call()
    with pytest.raises(AssertionError, match="gave status 3"):
        Run(kernels, case).encode(residual=False)
    assert kernels.fl_last_error() == b"cudaErrorNoDevice: simulated"
    check(kernels, case)


def test_build_info_names_abi_and_kind(kernels: ctypes.CDLL) -> None:
    facts = dict(line.split("=", 1) for line in kernels.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(native.ABI_VERSION)
    assert facts["kind"] == "cuda"
    assert facts["archs"] == "host"
    assert facts["compiler"]
