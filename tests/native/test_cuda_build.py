"""What nvcc makes of csrc/cuda: needs nvcc, but neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from setuptools.errors import SetupError

from benchmarks import instructions
from fusionlayer import libraries, native
from tests.packaging.project_tree import copy_project
from tests.tiers import exhaustive

pytestmark = [pytest.mark.medium, pytest.mark.timeout(900)]  # nvcc compiles for four targets, beside other tests

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "fusionlayer/csrc"
PTX, CUBIN = 1, 2  # kinds of entries of a fat binary


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    """Return setup.py as a module: the one place that knows flags and architectures."""
    return instructions.build_script()


@pytest.fixture(scope="module")
def nvcc(setup_script: ModuleType) -> str:
    try:
        return str(setup_script.find_nvcc())
    except SetupError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def library(setup_script: ModuleType, nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the installed CUDA library; where the installation was made without it, one built now."""
    installed = native.library_path("cuda")
    if installed.exists():
        return installed
    folder, here = tmp_path_factory.mktemp("cuda_build"), Path.cwd()
    shutil.copytree(CSRC, folder / "fusionlayer/csrc")
    os.chdir(folder)
    try:
        return folder / Path(setup_script.build_cuda(werror=True))
    finally:
        os.chdir(here)


class Build(NamedTuple):
    """What setup.py has made in ``tree``: the PTX of every source file, and what ptxas says of every kernel."""

    tree: Path
    ptx: dict[str, str]
    kernels: list[tuple[str, str, list[int], str]]  # source file, name, bytes of stack frame and spills, what is used


@pytest.fixture(scope="module")
def build(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build the project for sm_90 and keep what nvcc makes on its way."""
    tree, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("ptx")
    copy_project(tree)
    asked = {"FUSIONLAYER_CUDA": "1", "FUSIONLAYER_CUDA_ARCHS": "90", "FUSIONLAYER_NVCC": nvcc}
    keep = {"NVCC_APPEND_FLAGS": f"-Xptxas -v --keep --keep-dir {folder}"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env={**os.environ, **asked, **keep}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(rf"properties for (\w+)\s+{sizes}\n.*(Used .*)", done.stderr)
    of = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_")  # nvcc calls a namespace without a name by its file
    kernels = [(of.findall(name)[0], name, [*map(int, sizes)], used) for name, *sizes, used in found]
    ptx = {source.stem: (folder / f"{source.stem}.ptx").read_text() for source in (CSRC / "cuda").glob("*.cu")}
    return Build(tree, ptx, kernels)


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


def test_library_has_machine_code_and_ptx_for_its_architectures(library: Path, setup_script: ModuleType) -> None:
    entries = set(fat_binary_entries(library.read_bytes()))
    cubins = {arch for kind, arch in entries if kind == CUBIN}
    assert cubins >= set(setup_script.CUDA_ARCHS) == {80, 90, 100}
    assert {arch for kind, arch in entries if kind == PTX} == {100}


def test_library_needs_no_cuda_library(library: Path) -> None:
    readelf = shutil.which("readelf")
    assert readelf, "readelf (binutils) is not on PATH"
    dynamic = subprocess.run([readelf, "-d", str(library)], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if "cuda" in name or "torch" in name or "python" in name]


def test_library_opens_without_a_driver_and_says_what_it_is(library: Path) -> None:
    opened = ctypes.CDLL(str(library))
    opened.fl_build_info.restype = opened.fl_last_error.restype = ctypes.c_char_p
    facts = dict(line.split("=", 1) for line in opened.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION)
    assert facts["kind"] == "cuda"
    assert facts["compiler"].startswith("nvcc ")
    assert facts["archs"] == "sm_80 sm_90 sm_100 compute_100"
    assert opened.fl_last_error() == b""


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


@exhaustive(guarded_by="tests/native/test_cuda_build.py::test_library_has_machine_code_and_ptx_for_its_architectures")
def test_setup_places_the_library_where_nvcc_is_found(build: Build) -> None:
    built = {path.name: path for path in (build.tree / "fusionlayer/lib").iterdir()}
    assert set(built) == {"libfusionlayer_cpu.so", "libfusionlayer_cuda.so"}
    entries = set(fat_binary_entries(built["libfusionlayer_cuda.so"].read_bytes()))
    assert entries >= {(CUBIN, 90), (PTX, 90)}


@exhaustive(guarded_by="tests/native/test_cuda_core.py::test_int_writes_the_bytes_of_the_cpu_core")
def test_nothing_is_contracted_to_a_fused_multiply_add(build: Build) -> None:
    ptx = build.ptx
    assert sum("mul.f32" in text or "mul.rn.f32" in text for text in ptx.values()) >= 2, "nothing to contract was found"
    fused, by_hand = r"\bfma\.\w+\.f32", r"// begin inline asm.*?// end inline asm"  # the latter: add_exact_product
    contracted = {name for name, text in ptx.items() if re.search(fused, re.sub(by_hand, "", text, flags=re.DOTALL))}
    assert contracted == set()
    meant = {name for name, text in ptx.items() if re.search(fused, text)}
    sums = {f"{codec}_{verb}" for codec in ("int", "block") for verb in ("decode", "encode", "two_shot")}
    assert meant == {*sums, "thc_encode", "tahquant_encode"}  # whose products are of few bits
    source = "".join(path.read_text() for path in sorted((CSRC / "cuda").glob("*.cu*")))
    assert len(re.findall(r"\bfma\.rn\.f32", source)) == 1 and "__fmaf" not in source


@exhaustive(guarded_by="tests/native/test_cuda_core.py::test_int_writes_the_bytes_of_the_cpu_core")
def test_values_stay_in_registers(build: Build) -> None:
    assert len(build.kernels) >= 10
    assert {size for _, _, (_, *spilled), _ in build.kernels for size in spilled} == {0}
    # One lane of `zip` lists the seven most frequent exponents, once for each 65,536 elements.
    assert all(
        source == "zip_encode" and "choose_kernel" in name for source, name, (frame, *_), _ in build.kernels if frame
    )
    shared = {source for source, *_, used in build.kernels if "bytes smem" in used}
    codecs = ("int", "block", "thc", "tahquant", "chunked")
    through = {f"{codec}_{verb}" for codec in codecs for verb in ("encode", "decode")}
    through |= {"qsdp", "onebit", "delta_encode", "delta_decode", "int_two_shot", "block_two_shot"}
    assert shared == {"dynamiq", "magnitudes", "rans_decode", "rans_encode", "sparse_decode", "zip_encode", *through}, (
        "for histograms, sums, blocks, tables"
    )


@exhaustive(guarded_by="tests/native/test_cuda_core.py::test_int_writes_the_bytes_of_the_cpu_core")
def test_memory_is_accessed_as_global(build: Build) -> None:
    for name, ptx in build.ptx.items():
        assert not re.search(r"\b(ld|st)\.(v\d\.)?[usbf]\d+\b", ptx), f"{name}.cu has a generic load or store"
    assert "ld.global.v4" in build.ptx["int_encode"]
    assert "st.global.v4" in build.ptx["int_decode"]
