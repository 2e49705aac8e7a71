"""Figures in the sentences of README and docs: each is what a result file has, or is listed as a definition.

``figures.yaml`` has three parts. ``measured`` says for texts of a page which expressions their numbers come from.
``defined`` lists texts whose numbers are not measured, with the reason. ``everywhere`` has patterns of figures that are
definitions on every page, such as a link's rate.

The page of the result files itself has hundreds of figures. There a figure must be near a number of a file that its
section links to. That is less than an expression for each, but finds what is stale or mistyped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pages.found import NAMES, RESULTS, ROOT, load

__all__ = ["problems", "read", "strays", "texts"]

MAP = Path(__file__).with_name("figures.yaml")

_UNITS = (
    *("×", "%", "per cent", "times", "ns", "us", "µs", "ms", "s", "min", "h", "seconds?", "minutes?", "hours?"),
    *("[kKMGT]i?[Bb]", "[KMGT]?B/s", "[KMG]iB/s", "[kMG]bit/s", "bits?", "bytes?"),
)
_NUMBER = r"[-+]?\d+(?:[.,]\d+)*"
FIGURE = re.compile(rf"(?<![\w.,/^-])({_NUMBER})(x|[ -]?({'|'.join(_UNITS)}))(?![\w/])")
_ALONE = re.compile(rf"(?<![\w.,]){_NUMBER}")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?").findall
_UNSEEN = re.compile(r"^```.*?^```$|<!-- table: .*?<!-- end of table -->|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", re.M | re.S)


def texts() -> dict[str, str]:
    """Return the pages whose figures are checked, by their path in the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def read() -> Mapping[str, Any]:
    """Return what ``figures.yaml`` says."""
    found: Mapping[str, Any] = yaml.safe_load(MAP.read_text())
    return found


def problems(page: str, text: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure of a page that no entry explains, and for each entry that is wrong or not needed."""
    if page in known["defined"] and isinstance(known["defined"][page], str):  # of the whole page
        return
    hidden = _UNSEEN.sub(lambda place: "\N{MIDDLE DOT}" * len(place[0]), text)
    hidden, text = (re.sub(r"\s", " ", each) for each in (hidden, text))
    explained: list[tuple[int, int]] = []
    measured = known["measured"].get(page, {})
    for words in [*measured, *known["defined"].get(page, {})]:
        places = [place.span() for place in re.finditer(rf"(?<![\d.,]){re.escape(words)}", text)]
        if not places:
            yield f"{page} does not say {words!r}, which figures.yaml explains"
        explained += places
    for words, expressions in measured.items():
        yield from _wrong(page, words, expressions)
    for figure in FIGURE.finditer(hidden):
        start, end = figure.span()
        if any(re.fullmatch(pattern, figure[0]) for pattern in known["everywhere"]):
            continue
        if not any(a <= start and end <= b for a, b in explained):
            around = text[max(0, start - 40) : end + 20].strip()
            yield f"{page} says {figure[0]!r} (... {around} ...): figures.yaml has neither its result nor its reason"


def _wrong(page: str, words: str, expressions: str) -> Iterator[str]:
    numbers = [number[0] for number in _ALONE.finditer(words)]
    try:
        found = eval(expressions, {"__builtins__": {}, **NAMES})
    except (LookupError, AttributeError, NameError, SyntaxError, TypeError, ValueError) as error:
        yield f"{page}: {words!r}: {expressions} fails: {error}"
        return
    values = found if isinstance(found, tuple) else (found,)
    if len(numbers) != len(values):
        yield f"{page}: {words!r} has {len(numbers)} numbers, but {len(values)} expressions"
        return
    for number, value in zip(numbers, values, strict=True):
        digits = len(number.partition(".")[2])
        if abs(value - float(number)) > 0.501 * 10.0**-digits:
            yield f"{page}: {words!r}: {number} should be {value:.{digits}f}, which is {expressions}"


def strays(known: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure of benchmarks/results/README.md that no file of its section has."""
    page = "benchmarks/results/README.md"
    reasons = known["defined"].get(page, {})
    for section in re.split(r"^(?=## )", (ROOT / page).read_text(), flags=re.M):
        files = [RESULTS / f"{name}.json" for name in re.findall(r"\]\(([\w.-]+)\.md\)", section)]
        values = {abs(value) for path in files if path.exists() for row in load(path).rows for value in _numbers(row)}
        tables = [path.with_suffix(".md").read_text() for path in files if path.exists()]
        values |= {float(number) for table in tables for number in _NUMBERS(table)}
        hidden = _UNSEEN.sub(lambda place: "\N{MIDDLE DOT}" * len(place[0]), section)
        for figure in FIGURE.finditer(hidden):
            around = " ".join(section[max(0, figure.start() - 50) : figure.end() + 20].split())
            if any(re.fullmatch(pattern, figure[0]) for pattern in known["everywhere"]):
                continue
            if any(words in around for words in reasons):
                continue
            digits = len(figure[1].partition(".")[2])
            wanted, near = abs(float(figure[1])), 0.501 * 10.0**-digits
            if not any(abs(form - wanted) <= near for value in values for form in _forms(value)):
                yield f"{page} says {figure[0]!r} (... {around} ...), which no file has that the section links to"


def _forms(value: float) -> tuple[float, ...]:
    """Return a value as a text may print it: in per cent, above or below 1, in milliseconds, in MB."""
    return value, 100 * value, 100 * abs(value - 1), 1e3 * value, 1e-6 * value


def _numbers(found: object) -> Iterator[float]:
    """Yield what a row says as a whole; single rounds, which are lists, would match any figure."""
    if isinstance(found, dict):
        for each in found.values():
            yield from _numbers(each)
    elif isinstance(found, str):
        yield from map(float, _NUMBERS(found))
    elif isinstance(found, (int, float)):
        yield float(found)
