"""docs/commands.md: what every command and option means, from the parsers themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from itertools import groupby
from textwrap import dedent

from docs.site.markdown import as_code, as_page
from fusionlayer import cli
from fusionlayer.cli import fusionrun

__all__ = ["commands", "parsers"]

_FEW = 4  # choices that are shown next to an option; more stand in its meaning
_COMMON = ("help", "columns")  # options that the introduction describes


def commands() -> str:
    """Return docs/commands.md: what every command and option means, from the parsers themselves."""
    parts: list[str | list[str]] = []
    for parser in parsers():
        about = " ".join((parser.description or "").split())
        parts += [f"## {parser.prog}", about, f"```\n{_usage(parser)}\n```"]
        for group in parser._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            rows = [(_flags(action), _meaning(parser, action)) for action in shown if action.dest not in _COMMON]
            if rows:
                usual = group.title in ("options", "positional arguments", "optional arguments")
                parts += [] if usual else [f"{str(group.title)[0].upper()}{str(group.title)[1:]}:"]
                parts.append([f"- {flags}: {meaning}" for flags, meaning in rows])
        parts += _prose(re.sub(r"^examples:\n(?: .*\n)+\n?", "", parser.epilog or ""))
    return as_page(
        "# Commands",
        "Which commands does the package install, and what do their options mean? `--help` of each also has examples.\n"
        "The exit status is 0; 1 after a failure; 2 for an unusable argument, file or setting. `--columns NAME,NAME`\n"
        "chooses columns of printed tables (default: those that fit the terminal or COLUMNS; all in pipes).",
        *parts,
    )


def parsers() -> list[argparse.ArgumentParser]:
    """Return the parsers of all commands."""
    return [*_leaves(cli.make_parser()), fusionrun.make_parser()]


def _prose(text: str) -> list[str | list[str]]:
    """Return paragraphs; lines that are indented, or aligned in columns, become blocks of code."""

    def is_code(line: str) -> bool:
        return bool(re.search(r"\S {2}", line)) or line.startswith("    ")

    parts: list[str | list[str]] = []
    for paragraph in text.strip("\n").split("\n\n"):
        for code, lines in groupby(paragraph.splitlines(), is_code):
            shown = "\n".join(lines)
            parts.append(f"```\n{dedent(shown)}\n```" if code else shown)
    return parts


def _leaves(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for child in action.choices.values():
            yield from _leaves(child)


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return parser.usage
    needed = [
        _value(action, action.option_strings[-1])
        for action in parser._actions
        if action.required and action.option_strings
    ]
    places = [
        f"[{_value(action)}]" if action.nargs == "?" else _value(action) + (" ..." if action.nargs == "+" else "")
        for action in parser._actions
        if not action.option_strings
    ]
    return " ".join([parser.prog, *places, *needed, "[options]"])


def _value(action: argparse.Action, flag: str = "") -> str:
    if action.nargs == 0:
        return flag
    few = action.choices and len([*action.choices]) <= _FEW
    shown = action.metavar or ("|".join(map(str, action.choices or ())) if few else action.dest.upper())
    return f"{flag} {shown}".strip()


def _flags(action: argparse.Action) -> str:
    return as_code(_value(action, flag) for flag in action.option_strings or [""])


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    help = parser._get_formatter()._expand_help(action) if action.help else ""
    listed = action.choices and (action.metavar or len([*action.choices]) > _FEW)
    listed = listed and not all(str(choice) in help for choice in action.choices or ())
    choices = f"one of {as_code(map(str, action.choices or ()))}" if listed else ""
    return "; ".join(filter(None, [help, choices]))
