"""A release, as a dry run: checks that the tree is ready, builds what is published, and prints what is left to do.

Nothing is pushed, uploaded or tagged. docs/releasing.md has the whole list.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AUDIT = str(ROOT / ".ci" / "audit.py")
SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"


def version_of(root: Path) -> str:
    """Return the version that the package has."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "fusionlayer" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def section_of(root: Path, version: str) -> tuple[str, str] | None:
    """Return what stands behind the version in its heading in the changelog, and the text below; None: no heading."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}( [^\n]*)?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return None if found is None else ((found[1] or "").strip(), found[2].strip())


def problems(root: Path) -> list[str]:
    """Return what keeps this tree from being released, a line each."""
    found = []
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        found.append(
            f"the tree is not clean: {len(changed)} files differ, the first is {changed[0][3:]}; commit or drop them"
        )
    version = version_of(root)
    section = section_of(root, version)
    if section is None:
        found.append(f"CHANGELOG.md has no heading '## {version}', the version of fusionlayer/__init__.py; write it")
    elif not re.fullmatch(r"\(\d{4}-\d\d-\d\d\)", section[0]):
        found.append(
            f"CHANGELOG.md: '## {version} {section[0]}'; give the day of the release, as in '## 1.2.3 (2030-01-31)'"
        )
    cited = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version:
        found.append(f"CITATION.cff has version {cited[1] if cited else 'none'}; expected {version}")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"tag v{version} exists; choose the next version")
    return found


def message_of(root: Path, version: str) -> str:
    """Return the message of the release's tag: the version, and the headings of its section in the changelog."""
    section = section_of(root, version)
    headings = re.findall(r"^### (.*)$", section[1] if section else "", re.MULTILINE)
    return "\n".join([f"fusionlayer {version}", "", *(f"- {heading}" for heading in headings), "", "See CHANGELOG.md."])


def git(root: Path, *arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def build(command: Sequence[str]) -> int:
    """Run a command in the project; return its status."""
    print(f"== {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(root: Path = ROOT, build: Callable[[Sequence[str]], int] = build) -> int:
    """Check, build, and print the command of the tag; return the exit status."""
    if found := problems(root):
        print(*(f"release: {problem}" for problem in found), sep="\n", file=sys.stderr)
        return 1
    for command in ([sys.executable, AUDIT], [sys.executable, "-c", SDIST], ["make", "wheels"], ["make", "docs"]):
        if build(command):
            print(f"release: `{' '.join(command)}` failed; nothing is released", file=sys.stderr)
            return 1
    if changed := git(root, "status", "--porcelain"):
        print(f"release: building has changed {changed.splitlines()[0][3:]}; commit that first", file=sys.stderr)
        return 1
    version = version_of(root)
    for file in sorted((root / "dist").glob(f"*-{version}*")):
        print(f"{file.relative_to(root)}  {file.stat().st_size:,} bytes")
    print("Nothing was tagged or pushed. What is left, as docs/releasing.md says:\n")
    print(f"git tag --sign v{version} --file - <<'END'")
    print(message_of(root, version), "END", f"git push origin v{version}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
