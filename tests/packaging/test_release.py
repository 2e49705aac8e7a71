"""The dry run of a release: what it refuses, builds and prints."""

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from .project_tree import ROOT


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, audit = loaded("release"), loaded("audit")

CHANGES = (
    "# Changelog\n\n## 1.2.0 (2030-01-31)\n\n### Added\n\n- this\n\n### Removed\n\n- that\n\n## 1.1.0 (2029-01-31)\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project that is ready for its release."""
    (tmp_path / "fusionlayer").mkdir()
    (tmp_path / "dist").mkdir()
    files = {
        "fusionlayer/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": CHANGES,
        "CITATION.cff": "version: 1.2.0\n",
        "Makefile": "wheels:\n",
        ".gitignore": "dist\n",
        "dist/x-1.2.0.tar.gz": "x",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def run(tree: Path, *arguments: str) -> None:
    who = (
        "-c",
        "user.name=x",
        "-c",
        "user.email=x@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)


def commit(tree: Path) -> None:
    run(tree, "add", "-A")
    run(tree, "commit", "-q", "-m", "x")


def test_a_ready_tree_is_built_and_the_command_of_its_tag_printed(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Sequence[str]] = []

    def build(command: Sequence[str]) -> int:
        built.append(command)
        return 0

    assert release.main(tree, build) == 0
    assert [command[1:] for command in built] == [[release.AUDIT], ["-c", release.SDIST], ["wheels"], ["docs"]]
    told = capsys.readouterr().out
    assert "dist/x-1.2.0.tar.gz  1 bytes" in told
    assert (
        "git tag --sign v1.2.0 --file - <<'END'\nfusionlayer 1.2.0\n\n- Added\n- Removed\n\nSee CHANGELOG.md.\nEND\n"
        in told
    )
    assert not subprocess.check_output(["git", "tag"], cwd=tree)
    assert release.main(tree, lambda command: 2) == 1
    assert "audit.py` failed" in capsys.readouterr().err


def test_what_is_not_ready_is_refused_before_anything_is_built(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tree, "tag", "v1.2.0")
    (tree / "CHANGELOG.md").write_text(CHANGES.replace("2030-01-31", "unreleased"))
    (tree / "CITATION.cff").write_text("version: 1.1.0\n")
    assert release.main(tree, lambda command: pytest.fail("built")) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in told] == [
        "release: the tree is not clean: 2 files differ, the first is CHANGELOG.md",
        "release: CHANGELOG.md: '## 1.2.0 (unreleased)'",
        "release: CITATION.cff has version 1.1.0",
        "release: tag v1.2.0 exists",
    ]
    (tree / "fusionlayer" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    assert "CHANGELOG.md has no heading '## 1.3.0'" in "\n".join(release.problems(tree))


def test_weak_packages_of_users_stop_a_release() -> None:
    users = audit.dependencies(["numpy", "PyYAML>=6", 'mpi4py>=4; extra == "mpi"', "torch>=2.11"])
    fixes = {"PyYAML": ["1.1"], "torch": [], "mkdocs": ["2"]}
    found = [{"name": n, "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": f}]} for n, f in fixes.items()]

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, json.dumps({"dependencies": found}) if found else "", "no route")

    stops, told = audit.audit(users, run)
    assert stops == ["PyYAML 1 has CVE-1, fixed in 1.1"]
    assert [line.split()[0] for line in told] == [
        "torch",
        "mkdocs",
        "3",
    ]
    found.clear()
    assert audit.audit(users, run) == ([], ["skipped: pip-audit could not look at its database: no route"])


def test_the_files_of_the_repository_fit() -> None:
    assert release.section_of(ROOT, release.version_of(ROOT)) is not None
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == release.version_of(ROOT) and len(cited["references"]) == 3
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path
    makefile = (ROOT / "Makefile").read_text()
    assert "\nrelease:" in makefile
