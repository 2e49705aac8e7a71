"""Where the examples are, and whether this machine lets them make network namespaces."""

from pathlib import Path

import pytest

from benchmarks.lab.namespaces import why_no_namespaces

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


_WHY_NOT = why_no_namespaces()
NAMESPACES_WORK = _WHY_NOT is None

needs_namespaces = pytest.mark.skipif(not NAMESPACES_WORK, reason=f"no network namespaces: {_WHY_NOT}")


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
