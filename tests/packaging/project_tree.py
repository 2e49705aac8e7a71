import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CROSS = "aarch64-linux-gnu-g++"
NEEDED = ("setup.py", "_fusionlayer_autoload.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
"""Files that setup.py needs beside the package."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def cross_build(folder: Path) -> Path:
    """Build the library for aarch64 into ``folder`` and return it."""
    environment = {**os.environ, "CXX": CROSS, "FUSIONLAYER_CUDA": "0"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "fusionlayer/lib/libfusionlayer_cpu.so"


def build_script() -> ModuleType:
    """Return setup.py as a module: the one place that knows flags and compilers."""
    spec = importlib.util.spec_from_file_location("fusionlayer_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def copy_project(tree: Path) -> None:
    """Copy what setup.py needs, with what is compiled already, so that only changes are compiled again."""
    for name in NEEDED:
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "fusionlayer", tree / "fusionlayer", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    native = ROOT / "build/native"
    if native.exists():
        with (native / "lock").open("w") as lock:  # as setup.py has it while it compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.copytree(native, tree / "build/native")
