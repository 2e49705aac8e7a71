"""What nvcc makes of csrc/cuda: needs nvcc, but neither a GPU nor a driver."""

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from setuptools.errors import SetupError

from fusionlayer import native
from fusionlayer.base import libraries
from tests.native.cuda_build import ARCH, CSRC, Build, built, compiled
from tests.packaging.project_tree import build_script
from tests.tiers import exhaustive, long

pytestmark = [pytest.mark.medium, pytest.mark.timeout(900)]  # nvcc takes minutes next to other tests

PTX, CUBIN = 1, 2  # kinds of entries of a fat binary


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    """Return setup.py as a module: the one place that knows flags and architectures."""
    return build_script()


@pytest.fixture(scope="module")
def nvcc(setup_script: ModuleType) -> str:
    try:
        return str(setup_script.find_nvcc())
    except SetupError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module", params=["int", pytest.param("all", marks=long)])
def build(
    nvcc: str, setup_script: ModuleType, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Build:
    """Return what nvcc makes for sm_90: of two files, in CI, or on the way of setup.py."""
    if request.param == "all":
        return built(nvcc)
    flags = setup_script.NVCC_FLAGS
    return compiled(nvcc, flags, ["int_encode", "int_decode"], tmp_path_factory.mktemp("int"))


@pytest.fixture(scope="module")
def library(nvcc: str) -> Path:
    return built(nvcc).tree / "fusionlayer/lib/libfusionlayer_cuda.so"


def fat_binary_entries(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (kind, architecture) of all that the fat binaries inside a library hold."""
    magic = struct.pack("<I", 0xBA55ED50)
    start = data.find(magic)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", data, start + 6)
        at, end = start + header, start + header + size
        while at < end:
            kind, entry_header, payload = struct.unpack_from("<H2xIQ", data, at)
            yield kind, struct.unpack_from("<I", data, at + 28)[0]
            at += entry_header + payload
        start = data.find(magic, end)


@long(guarded_by="tests/packaging/test_build.py::test_gpus_to_compile_for")
def test_library_has_machine_code_and_ptx_for_its_architectures(library: Path) -> None:
    entries = set(fat_binary_entries(library.read_bytes()))
    assert {arch for kind, arch in entries if kind == CUBIN} >= {ARCH}
    assert {arch for kind, arch in entries if kind == PTX} == {ARCH}


@long(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
def test_library_needs_no_cuda_library(library: Path) -> None:
    readelf = shutil.which("readelf")
    assert readelf, "readelf (binutils) is not on PATH"
    dynamic = subprocess.run([readelf, "-d", str(library)], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if "cuda" in name or "torch" in name or "python" in name]


@long(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
def test_library_opens_without_a_driver_and_says_what_it_is(library: Path) -> None:
    opened = ctypes.CDLL(str(library))
    opened.fl_build_info.restype = opened.fl_last_error.restype = ctypes.c_char_p
    facts = dict(line.split("=", 1) for line in opened.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION)
    assert facts["kind"] == "cuda"
    assert facts["compiler"].startswith("nvcc ")
    assert facts["archs"] == f"sm_{ARCH} compute_{ARCH}"
    assert opened.fl_last_error() == b""


@long(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so the call would succeed")
def test_without_a_device_a_call_fails_with_the_reason(library: Path) -> None:
    opened = ctypes.CDLL(str(library))
    opened.fl_last_error.restype = ctypes.c_char_p
    memory = (ctypes.c_uint8 * 512)()
    begin = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    spec = native.Spec(native.CAST, 0, (ctypes.c_uint32 * 4)(1), 0, 0, 16)
    messages = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(begin + 256), 0, 1)
    assert opened.fl_encode(ctypes.byref(spec), ctypes.c_void_p(begin), None, ctypes.byref(messages), None) == 3
    assert opened.fl_last_error().startswith(b"cudaError")
    assert not any(memory)


@long(guarded_by="tests/packaging/test_build.py::test_gpus_to_compile_for")
def test_setup_places_the_library_where_nvcc_is_found(library: Path) -> None:
    names = {path.name for path in library.parent.iterdir()}
    assert names == {"libfusionlayer_cpu.so", "libfusionlayer_cuda.so"}


@exhaustive(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
def test_nothing_is_contracted_to_a_fused_multiply_add(build: Build) -> None:
    ptx = build.ptx
    assert sum("mul.f32" in text or "mul.rn.f32" in text for text in ptx.values()) >= 2, "nothing to contract was found"
    fused, by_hand = r"\bfma\.\w+\.f32", r"// begin inline asm.*?// end inline asm"  # the latter: add_exact_product
    contracted = {name for name, text in ptx.items() if re.search(fused, re.sub(by_hand, "", text, flags=re.DOTALL))}
    assert contracted == set()
    meant = {name for name, text in ptx.items() if re.search(fused, text)}
    sums = {f"{codec}_{verb}" for codec in ("int", "block") for verb in ("decode", "encode", "two_shot")}
    assert meant == {*sums, "thc_encode", "tahquant_encode"} & ptx.keys()  # whose products are of few bits
    source = "".join(path.read_text() for path in sorted(CSRC.rglob("*.cu*")))
    assert len(re.findall(r"\bfma\.rn\.f32", source)) == 1 and "__fmaf" not in source


@exhaustive(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
def test_values_stay_in_registers(build: Build) -> None:
    assert len(build.kernels) >= min(10, len(build.ptx))
    assert {size for _, _, (_, *spilled), _ in build.kernels for size in spilled} == {0}
    # One lane of `zip` lists the seven most frequent exponents, once for each 65,536 elements.
    assert all(
        source == "zip_encode" and "choose_kernel" in name for source, name, (frame, *_), _ in build.kernels if frame
    )
    shared = {source for source, *_, used in build.kernels if "bytes smem" in used}
    codecs = ("int", "block", "thc", "tahquant", "chunked")
    through = {f"{codec}_{verb}" for codec in codecs for verb in ("encode", "decode")}
    through |= {"qsdp", "onebit", "delta_encode", "delta_decode", "int_two_shot", "block_two_shot"}
    tables = {"dynamiq", "magnitudes", "rans_decode", "rans_encode", "sparse_decode", "zip_encode"}
    assert shared == (tables | through) & build.ptx.keys(), "for histograms, sums, blocks, tables"


@exhaustive(guarded_by="tests/native/test_cores.py::test_all_libraries_write_the_same_bytes")
def test_memory_is_accessed_as_global(build: Build) -> None:
    for name, ptx in build.ptx.items():
        assert not re.search(r"\b(ld|st)\.(v\d\.)?[usbf]\d+\b", ptx), f"{name}.cu has a generic load or store"
    assert "ld.global.v4" in build.ptx["int_encode"]
    assert "st.global.v4" in build.ptx["int_decode"]
