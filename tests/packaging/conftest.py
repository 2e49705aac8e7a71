import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from . import project_tree
from .project_tree import ROOT, Run, copy_project

BUILD_VARIABLES = (
    *("CXX", "CUDA_HOME", "FUSIONLAYER_CUDA", "FUSIONLAYER_CUDA_ARCHS", "FUSIONLAYER_NVCC", "FUSIONLAYER_OBJECTS"),
)


@pytest.fixture
def build_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``setup.py`` as a module, in an environment that says nothing about the build."""
    for name in BUILD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    return project_tree.build_script()


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs this Python in a folder; without CUDA and package index unless ``variables`` say otherwise."""

    def call(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key not in BUILD_VARIABLES}
        environment = {**inherited, "FUSIONLAYER_CUDA": "0", "PIP_NO_INDEX": "1", **variables}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)

    return call


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project (``copy_project``)."""
    tree = tmp_path_factory.mktemp("source")
    copy_project(tree)
    return tree
