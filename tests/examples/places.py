"""Where the examples are, and whether this machine lets them make network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def _namespaces_work() -> bool:
    if any(shutil.which(program) is None for program in ("unshare", "nsenter", "ip", "tc")):
        return False
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return subprocess.run(["unshare", *user, "--net", "true"], capture_output=True).returncode == 0


NAMESPACES_WORK = _namespaces_work()

needs_namespaces = pytest.mark.skipif(not NAMESPACES_WORK, reason="needs iproute2, and root or user namespaces")


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that have ``mark`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found
