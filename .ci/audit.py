"""Known weaknesses of what is installed, by pip-audit: those of packages that users get stop a release."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import requires

COMMAND = (sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable")
PATIENCE = 300
"""Seconds for the whole audit."""

Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; return its status and what it has printed."""
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)


def dependencies(requirements: Sequence[str]) -> set[str]:
    """Return the names of the packages that every user installs."""
    return {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in requirements if "extra ==" not in each}


def audit(users: set[str], run: Run = run) -> tuple[list[str], list[str]]:
    """Return what stops a release and what is only to be told, a line each.

    Args:
        users: names of packages that users install.
        run: runs a command.
    """
    try:
        done = run(COMMAND)
        found = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [f"skipped: pip-audit did not run: {error}"]
    except (ValueError, KeyError):  # it prints JSON only if it has reached its database
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return [], [f"skipped: pip-audit could not look at its database: {lines[-1][:200]}"]
    stops, told = [], []
    for package in found:
        for each in package.get("vulns", []):
            fixed = ", ".join(each["fix_versions"])
            line = f"{package['name']} {package['version']} has {each['id']}, fixed in {fixed or 'no version'}"
            (stops if fixed and package["name"].lower().replace("_", "-") in users else told).append(line)
    return stops, [*told, f"{len(found)} packages were looked up"]


def main() -> int:
    """Print what is known; return the exit status: 1 if a package that users install has a fixed weakness."""
    stops, told = audit(dependencies(requires("fusionlayer") or []))
    print(*(f"audit: {line}" for line in [*told, *stops]), sep="\n")
    return int(bool(stops))


if __name__ == "__main__":
    sys.exit(main())
