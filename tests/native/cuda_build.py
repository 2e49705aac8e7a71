"""What nvcc makes of csrc for one architecture: of a few files, or all, once for all tests that look into it."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.packaging.project_tree import ROOT, copy_project

ARCH = 90
"""The only compute capability that tests compile for: each takes minutes. ``wheels/make.py`` checks a release."""
CSRC = ROOT / "fusionlayer/csrc"
FOLDER = ROOT / f"build/cuda_sm{ARCH}"


class Build(NamedTuple):
    """What setup.py has made in ``tree``: the PTX of every source file, and what ptxas says of every kernel."""

    tree: Path
    ptx: dict[str, str]
    kernels: list[tuple[str, str, list[int], str]]  # source file, name, bytes of stack frame and spills, what is used


def built(nvcc: str) -> Build:
    """Return the build in ``FOLDER``; it is made anew when nvcc, setup.py or a source has changed."""
    tree, ptx, told = FOLDER / "tree", FOLDER / "ptx", FOLDER / "told"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted, made_of = digest(nvcc), FOLDER / "made_of"
        if not made_of.exists() or made_of.read_text() != wanted:
            shutil.rmtree(FOLDER)
            for folder in (tree, ptx):
                folder.mkdir(parents=True)
            copy_project(tree)
            shutil.rmtree(tree / "build/native/cuda", ignore_errors=True)
            asked = {"FUSIONLAYER_CUDA": "1", "FUSIONLAYER_CUDA_ARCHS": str(ARCH), "FUSIONLAYER_NVCC": nvcc}
            keep = {"NVCC_APPEND_FLAGS": f"-Xptxas -v --keep --keep-dir {ptx}", "FUSIONLAYER_OBJECTS": ""}
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            environment = {**os.environ, **asked, **keep}
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            for path in ptx.iterdir():  # a gigabyte, of which the PTX is needed
                if path.suffix != ".ptx":
                    path.unlink()
            told.write_text(done.stderr)
            made_of.write_text(wanted)
    return read(tree, told.read_text(), ptx, [source.stem for source in CSRC.rglob("*.cu")])


def compiled(nvcc: str, flags: Sequence[str], names: Sequence[str], folder: Path) -> Build:
    """Return what nvcc makes of a few files with the flags of setup.py; there is no tree."""
    told = ""
    for name in names:
        command = [nvcc, *flags, f"-gencode=arch=compute_{ARCH},code=sm_{ARCH}", "-Xptxas", "-v", "--keep"]
        (source,) = CSRC.rglob(f"{name}.cu")
        command += ["--keep-dir", str(folder), "-c", str(source), "-o", str(folder / f"{name}.o")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told += done.stderr
    return read(folder, told, folder, names)


def read(tree: Path, told: str, ptx: Path, names: Sequence[str]) -> Build:
    """Return what ptxas has told, and the PTX of the files of these names."""
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(rf"properties for (\w+)\s+{sizes}\n.*(Used .*)", told)
    of = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_")  # nvcc calls a namespace without a name by its file
    kernels = [(of.findall(name)[0], name, [*map(int, sizes)], used) for name, *sizes, used in found]
    return Build(tree, {name: (ptx / f"{name}.ptx").read_text() for name in names}, kernels)


def digest(nvcc: str) -> str:
    """Return a digest of all that the build is made of."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version + repr((nvcc, ARCH, os.environ.get("FUSIONLAYER_WERROR"))).encode())
    for path in [ROOT / "setup.py", Path(__file__), *sorted(path for path in CSRC.rglob("*") if path.is_file())]:
        found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()
