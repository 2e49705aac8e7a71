"""Builds the wheel ``fusionlayer-cuda`` with what ``setup.py`` of the package knows; for all GPUs by default."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_spec = importlib.util.spec_from_file_location("fusionlayer_setup", ROOT / "setup.py")
assert _spec and _spec.loader
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildCuda(native.BuildNative):  # type: ignore[misc, name-defined]
    """``build_ext`` that makes the CUDA library alone."""

    folder = Path("fusionlayer_cuda")

    def make(self) -> list[Path]:
        """Build the library in the tree of the package."""
        os.chdir(ROOT)
        try:
            return [library.resolve() for library in native.build_native(["cuda"])]
        finally:
            os.chdir(HERE)


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("FUSIONLAYER_CUDA_ARCHS", "all")
    os.environ["FUSIONLAYER_CUDA"] = "1"
    os.chdir(HERE)
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "fusionlayer/__init__.py").read_text(), re.MULTILINE)
    setup(
        version=version,
        install_requires=[f"fusionlayer=={version}"],
        distclass=native.NativeDistribution,
        cmdclass={"build_ext": BuildCuda, "bdist_wheel": native.PlatformWheel},
    )


if __name__ == "__main__":
    main()
