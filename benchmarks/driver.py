"""What the command lines of benchmarks share: common options, the wait for a quiet machine, tables and result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from benchmarks import drawing
from fusionlayer.base.errors import ConfigError
from fusionlayer.cli.arguments import check_folder
from fusionlayer.cli.progress import follow

from .plots import save
from .quiet import refuse_if_busy
from .report import Environment, misplaced, table, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add_options", "begin", "finish", "follow", "leave", "make_parser", "writable"]


def make_parser(module: str, description: str | None, **more: Any) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks.<module>``."""
    form = argparse.RawDescriptionHelpFormatter
    prog = f"python -m benchmarks.{module}"
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=form, **more)


def add_options(parser: argparse.ArgumentParser, *, timed: bool = False, smoke: bool = False) -> None:
    """Add the options that say where results go; for what is ``timed``, --busy-ok; and --smoke, if there is one."""
    parser.add_argument("--out", type=writable, help="folder for result files; without it nothing is written")
    parser.add_argument("--hardware", help="name of the machine in the file names")
    if timed:
        parser.add_argument("--busy-ok", action="store_true", help="measure while other work goes on")
    if smoke:
        parser.add_argument("--smoke", action="store_true", help="a little of everything, only to see that it works")


def writable(text: str) -> Path:
    """Read the name of a folder for results; it is made, so that nobody measures for hours and cannot write then."""
    try:
        check_folder(text, "folder")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def begin(options: argparse.Namespace, ranks: int = 0, device: str = "cpu") -> Environment:
    """Return where and how is measured, once the machine is quiet enough to time ``ranks`` processes; 0: no times."""
    if ranks:
        refuse_if_busy(options.busy_ok or getattr(options, "smoke", False), ranks)
    return Environment.here(torch.device(device), options.hardware)


def finish(
    options: argparse.Namespace,
    theme: str,
    title: str,
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    shown: Sequence[dict[str, Any]] | None = None,
    *,
    more: Sequence[str] = (),
    pictures: Mapping[str, Callable[[], Figure]] | None = None,
) -> None:
    """Print the table, and with ``--out`` write the result files; without matplotlib it leaves out the pictures.

    Args:
        options: as parsed.
        theme: first part of the files' names.
        title: of the table.
        environment: of the measurement.
        rows: that the JSON has.
        shown: rows of the table; None: the same.
        more: further tables, printed and written behind the first.
        pictures: what draws them, by the name of the file in ``plots/``.
    """
    print(table(title, rows if shown is None else shown), *more, sep="\n")
    print(environment)
    if options.out is None:
        return
    path = write(options.out, theme, title, environment, rows, shown)
    if more:
        page = path.with_suffix(".md")
        page.write_text("\n".join([page.read_text(), *more]))
    if pictures and find_spec("matplotlib") is None:
        print('no pictures: matplotlib is not installed; pip install "fusionlayer[bench]"', file=sys.stderr)
        pictures = None
    for name, draw in (pictures or {}).items():
        with drawing.style():
            save(draw(), path.parent / "plots" / name)
    print(f"wrote {path}", file=sys.stderr)


def leave(main: Callable[[], int]) -> NoReturn:
    """End the process with the status that ``main`` returns.

    It is 130 where the user has interrupted it, and 1 where results are not in the folder where they belong.
    """
    try:
        sys.exit(main() or int(bool(misplaced)))
    except KeyboardInterrupt:
        sys.exit(130)
