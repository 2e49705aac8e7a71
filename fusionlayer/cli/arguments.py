"""Argument types and options that several subcommands share.

Nothing here and in ``parsers`` imports torch, so that ``--help`` and errors of a command line appear at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..base.errors import ConfigError
from ..base.registry import nearest

REPORT = "FUSIONRUN_REPORT"
"""The variable with the file for the report of a failed rank of ``fusionrun``; without it the report is printed."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and name the nearest known word; the layout of its epilog is kept."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        end = "" if message.endswith("?") else ";"
        self.exit(2, f"{self.prog}: {message}{end} see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the arguments; refuse unknown ones, which argparse would pass to its parent."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}{_meant(unknown[0], self._option_string_actions)}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [*map(str, action.choices)]
            raise argparse.ArgumentError(action, f"unknown {value!r}; {nearest(str(value), known)}")


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], [*known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def planner(text: str) -> str:
    """Return the name of a planner; another package is asked for it only if it is none of ours."""
    from ..scheduler import planners

    if not planners.knows(text):
        raise argparse.ArgumentTypeError(f"unknown {text!r}; {nearest(text, planners.names())}")
    return text


def join(items: Iterable[object]) -> str:
    """Return "a,b,c"."""
    return ",".join(map(str, items))


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """Read a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 0")
    return int(text)


def above_zero(text: str) -> float:
    """Read a number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return value


def seconds(text: str) -> float:
    """Read a number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds of at least 0")
    return value


def chance(text: str) -> float:
    """Read a number from 0 to below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a chance from 0 to below 1, such as 0.001")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def numbers(text: str) -> list[int]:
    """Read growing whole numbers from "2,8,64"."""
    return sorted({positive(part) for part in text.split(",")})


def names(text: str) -> list[str]:
    """Read names from "a,b"; there is at least one."""
    found = [part for part in text.split(",") if part]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; expected names, such as a,b")
    return found


def some_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a type that reads names of a kind from "a,b", all of which are known."""

    def read(text: str) -> list[str]:
        found = names(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {kind} {name!r}; {nearest(name, [*known])}")
        return found

    return read


def key_value(text: str) -> tuple[str, Any]:
    """Read an option from "key=value"; the value is YAML."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; expected key=value")
    import yaml  # takes longer than all else of --help, as records does, which imports it

    from ..base import records

    try:
        return key, records.parse(value)
    except yaml.constructor.ConstructorError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.problem}") from None
    except yaml.YAMLError:
        return key, value


def as_options(pairs: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    """Return the options that ``key_value`` has read; a later value replaces an earlier one."""
    return dict(pairs or ())


def check_file(path: str | Path, flag: str) -> None:
    """Raise ``ConfigError`` unless this file can be written, before work is done for it.

    Its folder is made; an existing file stays unchanged.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        with path.open("ab"):
            pass
        if not known:
            path.unlink(missing_ok=True)  # ranks try it at the same time
    except OSError as error:
        raise _unwritable(path, flag, error) from error


def check_folder(path: str | Path, flag: str) -> None:
    """Raise ``ConfigError`` unless files can be written into this folder. It is made."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _unwritable(path, flag, error) from error


def _unwritable(path: str | Path, flag: str, error: OSError) -> ConfigError:
    why = "its folder is a file" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
    return ConfigError(f"{flag} {path} cannot be written: {why}; name another file")


def add_removed(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """Refuse an option that was removed; ``instead`` is the remedy, as an imperative."""

    class Refuse(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            parser.error(f"{option} was removed: {instead}")

    parser.add_argument(option, nargs="?", action=Refuse, help=argparse.SUPPRESS)


def add_device(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that says where tensors are."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=f"{what} (default cpu)")


def add_cluster(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that describe the cluster of a plan; ``required``: whether a profile is."""
    parser.add_argument("--profile", type=str, required=required, metavar="PROFILE.yaml", help="measured costs")
    parser.add_argument(
        "--rate",
        help="rate of each host's link, such as 1gbit (default: collectives as measured with so many workers, or the "
        "profile's highest rate)",
    )
    parser.add_argument("--per-host", type=positive, metavar="N", help="workers on each host (default: as measured)")
