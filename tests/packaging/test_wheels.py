"""``make wheels``: what a release uploads; and that the package finds the library of the wheel ``fusionlayer-cuda``."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.errors import SetupError

import fusionlayer
from fusionlayer.base import libraries
from tests.native import cuda_build
from tests.tiers import long, needs

from .project_tree import CROSS, ROOT, cross_build


def test_cuda_library_is_this_packages_or_else_that_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fusionlayer/lib").mkdir(parents=True)
    monkeypatch.setattr(libraries, "__file__", str(tmp_path / "fusionlayer/base/libraries.py"))
    own = tmp_path / "fusionlayer/lib/libfusionlayer_cuda.so"
    assert libraries.library_path("cuda") == own, "where it belongs, if there is none"
    wheel = tmp_path / "site/fusionlayer_cuda"
    wheel.mkdir(parents=True)
    (wheel / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert libraries.library_path("cuda") == wheel / own.name
    assert libraries.library_path("cpu") == own.with_name("libfusionlayer_cpu.so")
    own.touch()
    assert libraries.library_path("cuda") == own


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all files of a release, made from what git tracks."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    if shutil.which(CROSS):
        cross_build(tmp_path_factory.mktemp("aarch64"))
    for compiled in ROOT.glob("build/native*"):
        shutil.copytree(compiled, tree / "build" / compiled.name)
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "FUSIONLAYER_CUDA")}
    command = [sys.executable, "wheels/make.py", "--into", str(dist)]
    if nvcc := find_nvcc():
        objects = cuda_build.built(nvcc).tree / "build/native/cuda"
        shutil.copytree(objects, tree / "build/native/cuda", dirs_exist_ok=True)
        environment |= {"FUSIONLAYER_CUDA_ARCHS": str(cuda_build.ARCH), "FUSIONLAYER_NVCC": nvcc}
    else:
        command.append("--without-cuda")
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return dist


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a clone: git does not say which files are of the project")
    return done.stdout.splitlines()


def script(path: Path) -> ModuleType:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(f"fusionlayer_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_nvcc() -> str | None:
    try:
        return str(script(ROOT / "setup.py").find_nvcc())
    except SetupError:
        return None


def test_a_release_has_code_for_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compile for one; ``wheels/make.py`` refuses a library that lacks another."""
    make, setup = script(ROOT / "wheels/make.py"), script(ROOT / "setup.py")
    monkeypatch.delenv("FUSIONLAYER_CUDA_ARCHS", raising=False)
    assert make.CUDA_ARCHS == setup.CUDA_ARCHS
    assert make.lacking("sm_80 sm_90 sm_100 compute_100") == []
    assert make.lacking("sm_90 compute_90") == ["sm_80", "sm_100", "compute_100"]
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", "90")
    assert make.lacking("sm_90 compute_90") == []


@pytest.mark.medium
@pytest.mark.timeout(1000)
@needs("auditwheel")
@long(guarded_by="tests/packaging/test_wheel.py::test_wheel_holds_the_package_and_its_libraries_and_nothing_else")
def test_files_of_a_release(release: Path) -> None:
    version = fusionlayer.__version__
    (sources,) = release.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked()} - packed == set()
    for machine in ("x86_64", *(["aarch64"] if shutil.which(CROSS) else [])):
        (wheel,) = release.glob(f"fusionlayer-{version}-py3-none-manylinux*_{machine}.whl")
        assert wheel.stat().st_size < 2.5e6
        with zipfile.ZipFile(wheel) as archive:
            libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert libraries == ["fusionlayer/lib/libfusionlayer_cpu.so"]
    if find_nvcc():
        (wheel,) = release.glob(f"fusionlayer_cuda-{version}-py3-none-manylinux*_x86_64.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert "fusionlayer_cuda/libfusionlayer_cuda.so" in archive.namelist()
            about = archive.read(f"fusionlayer_cuda-{version}.dist-info/METADATA").decode()
        assert f"Requires-Dist: fusionlayer=={version}\n" in about
