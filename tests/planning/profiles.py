"""The profile that tests use: the example in profiles/README.md."""

import re
from pathlib import Path

from fusionlayer.planning.profile import Profile

__all__ = ["EXAMPLE", "write_example"]

_PAGE = (Path(__file__).parents[2] / "profiles" / "README.md").read_text()
_BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
assert len(_BLOCKS) == 1

EXAMPLE: str = _BLOCKS[0]


def write_example(folder: Path) -> Path:
    """Return the path of the example, written into ``folder``."""
    path = folder / "example.yaml"
    path.write_text(EXAMPLE)
    Profile.from_yaml(path)
    return path
