"""Plugins: codecs, collectives and planners that installed packages name as entry points."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

_logger = logging.getLogger("fusionlayer")


@dataclass(frozen=True)
class Offer:
    """One entry point.

    Attributes:
        package: name and version of the package that has it, such as "mycodecs 1.2".
        point: the entry point. Its value names the module that registers the name, or an object in that module.
    """

    package: str
    point: EntryPoint

    def load(self) -> None:
        """Import the module; raise ``ConfigError`` if that fails, regardless of the reason."""
        try:
            self.point.load()
        except (Exception, SystemExit) as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(why if isinstance(error, ConfigError) else f"{type(error).__name__}: {why}") from error


def offers(group: str) -> Mapping[str, tuple[Offer, ...]]:
    """Return the entry points of ``group``, by name. More than one package may offer a name."""
    return _scan(tuple(sys.path)).get(group, {})


# Python's path decides which packages there are, so the result counts as long as the path stays the same.
@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> dict[str, dict[str, tuple[Offer, ...]]]:
    # Imported here: it takes longer than looking up a name that fusionlayer has itself.
    from importlib.metadata import distributions

    found: dict[str, dict[str, tuple[Offer, ...]]] = {}
    seen = set()
    for distribution in distributions():
        # Most packages offer nothing to us. Their metadata are not parsed: that takes time, and may fail.
        if "[fusionlayer." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = distribution.metadata["Name"]
        key = name.lower().replace("-", "_")
        if key in seen:  # another version further along the path, which Python does not import either
            continue
        seen.add(key)
        package = f"{name} {distribution.version}"
        for point in _points(distribution, package):
            group = found.setdefault(point.group, {})
            group[point.name] = (*group.get(point.name, ()), Offer(package, point))
    return found


def _points(distribution: Distribution, package: str) -> list[EntryPoint]:
    try:
        return [point for point in distribution.entry_points if point.group.startswith("fusionlayer.")]
    except Exception:  # each version of Python has its own for a line without "="
        _logger.warning("package %s is left out: its entry_points.txt cannot be read; mend or uninstall it", package)
        return []
