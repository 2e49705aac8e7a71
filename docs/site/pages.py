"""The pages that are made from code. ``make docs`` writes them anew, by ``python -m docs.site.pages``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.site.codecs_page import codec_table
from docs.site.commands_page import commands
from docs.site.kernels_page import gpus, kernels
from docs.site.settings_page import configuration

ROOT = Path(__file__).resolve().parents[2]

PAGES: dict[str, Callable[[], str]] = {
    "docs/config.md": configuration,
    "docs/commands.md": commands,
    "docs/codecs.md": codec_table,
    "docs/kernels.md": kernels,
    "docs/gpu.md": gpus,
}


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())


if __name__ == "__main__":
    main()
