"""Result files: what was measured, on what, by which command; a table for people and the same as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import device as Device  # noqa: N812 - in the class below `torch` is a field

import fusionlayer
from fusionlayer.planning.profiler.machine import cpu_name

__all__ = ["Environment", "misplaced", "result_path", "table", "write"]

misplaced: list[Path] = []
"""Results of this process that could not be written where they belong."""


@dataclass(frozen=True)
class Environment:
    """Where and how a measurement was made."""

    hardware: str
    cores: int
    load: float
    command: str
    commit: str
    fusionlayer: str
    torch: str
    python: str
    date: str

    @classmethod
    def here(cls, device: Device, hardware: str | None = None) -> Environment:
        """Return this machine's and this process's facts."""
        build = str(fusionlayer.build_info()).replace("\n", "; ")
        return cls(
            hardware or (torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()),
            os.cpu_count() or 1,
            round(os.getloadavg()[0], 2),
            shlex.join(["python", *sys.orig_argv[1:]]),
            _commit(),
            build,
            torch.__version__,
            platform.python_version(),
            datetime.date.today().isoformat(),
        )

    def __str__(self) -> str:
        return "\n".join(f"{key}: {value}" for key, value in asdict(self).items())


def _commit() -> str:
    here = Path(__file__).parent
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return ``rows`` as a Markdown table whose columns line up in a terminal too."""
    columns = list(rows[0])
    cells = [columns, *[[str(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"## {title}", "", lines[0], rule, *lines[1:], ""])


def result_path(folder: Path, theme: str, environment: Environment) -> Path:
    """Return where ``write`` puts the JSON; the table lies beside it, with the ending ``.md``."""
    hardware = re.sub(r"[^a-z0-9]+", "-", environment.hardware.lower()).strip("-")
    return folder / f"{theme}_{hardware}_{environment.date}.json"


def write(
    folder: Path,
    theme: str,
    title: str,
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    shown: Sequence[dict[str, Any]] | None = None,
) -> Path:
    """Write ``<theme>_<hardware>_<date>.json`` and ``.md`` into ``folder``; return the path of the JSON.

    The JSON has ``rows``, the table has ``shown`` (default: the same). A file that is there is replaced as a whole.
    If the folder cannot be written any more, the files go into one of the system's temporary folder, stderr says so,
    and ``misplaced`` has their paths.
    """
    facts = "\n".join(f"- {line}" for line in str(environment).splitlines())
    page = f"{table(title, rows if shown is None else shown)}\n{facts}\n"
    data = json.dumps({"title": title, "environment": asdict(environment), "rows": list(rows)}, indent=1) + "\n"
    try:
        return _write(folder, theme, environment, page, data)
    except OSError as error:
        path = _write(Path(tempfile.mkdtemp(prefix="fusionlayer-results-")), theme, environment, page, data)
        print(f"{error.filename or folder} cannot be written: {error.strerror}; results are in {path}", file=sys.stderr)
        misplaced.append(path)
        return path


def _write(folder: Path, theme: str, environment: Environment, page: str, data: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = result_path(folder, theme, environment)
    _replace(path.with_suffix(".md"), page)
    _replace(path, data)
    return path


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
