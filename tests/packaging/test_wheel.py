"""The wheel that users install, made from the source distribution: its tag, its content, and that it works."""

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import fusionlayer

from .project_tree import ROOT, Run

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def wheel(source_tree: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    done = run(source_tree, "setup.py", "-q", "sdist", "--dist-dir", work)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    tree = work / f"fusionlayer-{fusionlayer.__version__}"
    shutil.copytree(source_tree / "build/native", tree / "build/native", dirs_exist_ok=True)
    # What an earlier build left behind must not get into the wheel.
    removed, unwanted = tree / "fusionlayer/removed.py", tree / "fusionlayer/lib/libfusionlayer_cuda.so"
    unwanted.parent.mkdir()
    for leftover in (removed, unwanted):
        leftover.touch()
    assert run(tree, "setup.py", "-q", "build").returncode == 0
    removed.unlink()
    done = run(tree, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", work)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = work.glob("*.whl")
    return made


def test_one_wheel_serves_every_python_of_the_platform(wheel: Path) -> None:
    assert re.fullmatch(rf"fusionlayer-{re.escape(fusionlayer.__version__)}-py3-none-\w+\.whl", wheel.name)
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(about).decode()


def test_wheel_holds_the_package_and_its_libraries_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fusionlayer").rglob("*.py")}
    others = {"_fusionlayer_autoload.py", "fusionlayer/py.typed", "fusionlayer/lib/libfusionlayer_cpu.so"}
    assert content == modules | others


def test_wheel_requires_torch_numpy_scipy_and_yaml_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: (.*)$", archive.read(about).decode(), re.MULTILINE)
    assert {line for line in required if "extra ==" not in line} == {"torch>=2.11", "numpy", "scipy", "PyYAML"}


def test_installed_wheel_opens_its_library(wheel: Path, run: Run, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pip", "install", "-q", "--no-deps", "--target", "site", wheel)
    assert done.returncode == 0, done.stderr
    program = "import fusionlayer; from fusionlayer.base import libraries; print(fusionlayer.__file__, libraries.isa())"
    done = run(tmp_path, "-c", program, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    file, isa = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert isa in ("avx512", "avx2", "baseline")
