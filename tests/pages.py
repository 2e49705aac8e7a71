"""The pages that tests read: README, docs and the READMEs of folders, and the code and commands on them."""

import re
from pathlib import Path

__all__ = ["DOCS", "PAGES", "ROOT", "blocks", "lines"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *("README.md", "CONTRIBUTING.md", "tests/README.md", "benchmarks/README.md", "benchmarks/lab/README.md"),
    *("profiles/README.md", "benchmarks/results/README.md"),
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced code of one language, "" for none, on a page that is named from ``docs``."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [code for of, code in fenced if of == language]


def lines(page: str, program: str) -> list[str]:
    """Return the commands of a page that run a program."""
    return [line for block in blocks(page, "") for line in block.splitlines() if program in line.split()]
