"""``setup.py``: what it builds, from what, and what it says where it cannot."""

import os
import re
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.errors import SetupError

from .project_tree import Run

BUILD_IN_PLACE = ("setup.py", "-q", "build_ext", "--inplace")


def program(path: Path, text: str) -> Path:
    """Make ``path`` an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def libraries(tree: Path) -> set[str]:
    return {path.name for path in (tree / "fusionlayer/lib").iterdir()}


@pytest.fixture
def no_nvcc(build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_script.sysconfig, "get_path", lambda _: str(tmp_path))


@pytest.fixture
def cpu_is_built(build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(build_script, "BUILD", tmp_path / "native")
    monkeypatch.setattr(build_script, "build_cpu", lambda _: tmp_path / "libfusionlayer_cpu.so")
    return tmp_path / "libfusionlayer_cpu.so"


@pytest.mark.medium
def test_build_in_place_needs_no_torch(source_tree: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('setup.py imported torch')")
    done = run(source_tree, *BUILD_IN_PLACE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert libraries(source_tree) == {"libfusionlayer_cpu.so"}


@pytest.mark.medium
def test_second_build_compiles_nothing(source_tree: Path, run: Run) -> None:
    assert run(source_tree, *BUILD_IN_PLACE).returncode == 0
    done = run(source_tree, *BUILD_IN_PLACE)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.medium
def test_failing_nvcc_leaves_cuda_out_unless_it_is_demanded(source_tree: Path, run: Run, tmp_path: Path) -> None:
    nvcc = program(tmp_path / "nvcc", "echo unsupported host compiler; exit 1")
    (source_tree / "fusionlayer/lib").mkdir(exist_ok=True)
    (source_tree / "fusionlayer/lib/libfusionlayer_cuda.so").touch()
    asked = {"FUSIONLAYER_CUDA": "auto", "FUSIONLAYER_CUDA_ARCHS": "all"}
    lenient = run(source_tree, *BUILD_IN_PLACE, **asked, FUSIONLAYER_NVCC=str(nvcc))
    assert lenient.returncode == 0, lenient.stderr
    assert "without its CUDA library" in lenient.stdout and "unsupported host compiler" in lenient.stdout
    assert libraries(source_tree) == {"libfusionlayer_cpu.so"}
    strict = run(source_tree, *BUILD_IN_PLACE, FUSIONLAYER_CUDA="1", FUSIONLAYER_NVCC=str(nvcc))
    assert strict.returncode != 0
    assert "FUSIONLAYER_CUDA=1" in strict.stderr and "unsupported host compiler" in strict.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FUSIONLAYER_CUDA": "yes"}, "error: FUSIONLAYER_CUDA='yes'; expected one of: auto, 1, 0"),
        ({"FUSIONLAYER_WERROR": "on"}, "error: FUSIONLAYER_WERROR='on'; expected one of: 0, 1"),
        ({"CXX": "/nowhere/g++"}, "error: CXX='/nowhere/g++' is not a program"),
        ({"PATH": "/nowhere"}, "error: no C++ compiler"),
    ],
)
def test_unusable_setting_is_one_clear_line(
    source_tree: Path, run: Run, variables: dict[str, str], message: str
) -> None:
    done = run(source_tree, *BUILD_IN_PLACE, **variables)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize(
    "asked, told", [("all", "warning: .*: no nvcc: "), ("", "no NVIDIA GPU .* FUSIONLAYER_CUDA=1")]
)
def test_absent_nvcc_or_gpu_means_cpu_only_and_one_line(
    build_script: ModuleType,
    cpu_is_built: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    told: str,
) -> None:
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", asked)
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    assert build_script.build_native() == [cpu_is_built]
    (line,) = capsys.readouterr().out.splitlines()
    assert "without its CUDA library" in line and re.search(told, line)


def test_gpus_to_compile_for(build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = str(program(tmp_path / "nvcc", "echo compute_75 compute_80 compute_86 compute_90 compute_121"))
    smi = program(tmp_path / "nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert build_script.cuda_archs(nvcc) == [80, 90], "no GPU is here, so the library is for other machines"
    # Two of one kind; one that nvcc knows; one that it does not know yet; one that is too old.
    program(smi, "echo 9.0; echo 9.0; echo 8.6; echo 10.3; echo 7.5")
    assert build_script.cuda_archs(nvcc) == [86, 90]
    program(smi, "echo 7.5")
    with pytest.raises(SetupError, match="the GPU of this machine is of compute capability 7.5; the kernels need 8.0"):
        build_script.cuda_archs(nvcc)
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", "all")
    assert build_script.cuda_archs(nvcc) == [80, 90]
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", "121, 90")
    assert build_script.cuda_archs(nvcc) == [90, 121]
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", "90 sm_80 75")
    expected = r"^FUSIONLAYER_CUDA_ARCHS: sm_80 75; expected all, or numbers among: 80 86 90 121$"
    with pytest.raises(SetupError, match=expected):
        build_script.cuda_archs(nvcc)
    old = str(program(tmp_path / "old", "echo compute_75"))
    monkeypatch.setenv("FUSIONLAYER_CUDA_ARCHS", "all")
    with pytest.raises(SetupError, match="compiles for none of sm_80, sm_90, sm_100; use CUDA 12.8 or later"):
        build_script.cuda_archs(old)


def test_instruction_set_that_the_compiler_lacks_is_left_out(
    build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = program(tmp_path / "old-g++", 'case "$*" in *x86-64-v4*) exit 1;; *) echo g++ 9;; esac')
    monkeypatch.setenv("CXX", str(old))
    steps: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        build_script, "build_library", lambda _, compiles, *__: steps.extend(s.command for s in compiles)
    )
    build_script.build_cpu(werror=False)
    kernels = [step for step in steps if any(flag.startswith("-DFL_ISA=") for flag in step)]
    others = [step for step in steps if step not in kernels]
    assert {flag for step in kernels for flag in step if "FL_ISA" in flag} == {"-DFL_ISA=avx2", "-DFL_ISA=baseline"}
    assert others and all("-DFL_HAVE_AVX2" in step and "-DFL_HAVE_AVX512" not in step for step in others)


def test_step_runs_again_only_when_command_tool_or_input_change(build_script: ModuleType, tmp_path: Path) -> None:
    source, output, log = tmp_path / "in", tmp_path / "out/object", tmp_path / "log"
    source.write_text("1")

    def runs(word: str = "a", tool: str = "1.0") -> int:
        script = f"echo {word} >> {log} && cp {source} {output}"
        build_script.Step(output, ("sh", "-c", script), (source,), tool).run()
        return len(log.read_text().splitlines())

    assert [runs(), runs()] == [1, 1]
    source.write_text("2")
    assert [runs(), runs()] == [2, 2]
    assert output.read_text() == "2"
    assert [runs("b"), runs("b")] == [3, 3]
    assert [runs("b", "1.1"), runs("b", "1.1")] == [4, 4]
    output.unlink()
    assert runs("b", "1.1") == 5


def test_failed_step_shows_the_compilers_words_and_leaves_nothing_current(
    build_script: ModuleType, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "object"
    script = f"cp {source} {output}; if grep -q bad {source}; then echo no such type; exit 2; fi"
    step = build_script.Step(output, ("sh", "-c", script), (source,), "")
    source.write_text("good")
    step.run()
    source.write_text("bad")
    with pytest.raises(SetupError, match="(?s)failed with status 2:.*no such type"):
        step.run()
    source.write_text("good")
    step.run()
    assert output.read_text() == "good"


def test_open_library_is_replaced_not_overwritten(build_script: ModuleType, tmp_path: Path) -> None:
    fresh, folder = tmp_path / "libfusionlayer_cpu.so", tmp_path / "lib"
    fresh.write_text("one")
    build_script.place([fresh], folder)
    with (folder / fresh.name).open() as still_open:
        fresh.write_text("two")
        build_script.place([fresh], folder)
        assert still_open.read() == "one"
    assert [path.read_text() for path in folder.iterdir()] == ["two"]
