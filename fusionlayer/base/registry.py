"""Registries: they bind names to codecs, collectives and planners. Nothing else does."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from . import plugins
from .errors import ConfigError

__all__ = ["Registry", "closest", "nearest"]

T = TypeVar("T")

_logger = logging.getLogger("fusionlayer")


def closest(name: str, known: list[str]) -> str:
    """Return text for an error message: "did you mean ...? " with the known name closest to ``name``, if one is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def nearest(name: str, known: list[str]) -> str:
    """Return text for an error message: the known names, and before them the one closest to ``name``."""
    return f"{closest(name, known)}known: {', '.join(known)}"


def _packages(found: Sequence[plugins.Offer]) -> str:
    return " and ".join(offer.package for offer in found)


class Registry(Generic[T]):
    """The names of one kind of thing. The first look-up imports every module of one package; these register the names.

    A subpackage may wait: one of its modules is imported when a name that begins with the module's name is looked up,
        or when all names are listed.

    Installed packages may offer more names, as entry points (``plugins``). The module that one names is imported when
    its name is looked up or all names are listed, and registers the name. A package that cannot be used fails when its
    name is looked up; a list leaves it out, with one warning.

    ``get`` calls the registered factory with its options. A preset is a name for a factory with other defaults.

    Args:
        kind: word for error messages, such as "codec".
        package: package whose modules register their names on import.
        group: group of entry points for more names.
        later: names of the subpackages that wait.
    """

    def __init__(self, kind: str, package: str, group: str, later: Sequence[str] = ()) -> None:
        self.kind = kind
        self._package = package
        self._later = [f"{package}.{name}" for name in later]
        self._group = group
        self._factories: dict[str, Callable[..., T]] = {}
        self._presets: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._imported = False
        self._offered: dict[str, str] = {}  # names of entry points that were loaded, each with what failed, or ""
        self._told: set[str] = set()
        # Guards _imported and _offered: no thread looks up a name before all modules are imported. Reentrant, because a
        # module that is being imported may look up a name itself.
        self._lock = threading.RLock()

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Bind ``name`` to a factory. Raise ``ConfigError`` if the name is taken."""
        self._refuse_taken(name)
        self._factories[name] = factory

    def add_preset(self, name: str, base: str, **defaults: Any) -> None:
        """Bind ``name`` to ``base`` with other defaults. The caller's options win over these."""
        self._refuse_taken(name)
        self._presets[name] = (base, defaults)

    def remove(self, name: str) -> None:
        """Unbind ``name``. Tests that register names of their own need it."""
        self._factories.pop(name, None)
        self._presets.pop(name, None)

    def names(self) -> list[str]:
        """Return all names that ``get`` takes, sorted."""
        self._import()
        for name in plugins.offers(self._group):
            why = self._load(name)
            if why and name not in self._told:
                self._told.add(name)
                _logger.warning("%s", why)
        return sorted([*self._factories, *self._presets])

    def offered(self) -> dict[str, str]:
        """Return the names that installed packages offer, each with name and version of its package."""
        return {name: _packages(found) for name, found in plugins.offers(self._group).items()}

    def knows(self, name: str) -> bool:
        """Return whether ``get`` takes ``name``."""
        self._import(name)
        return self._is_bound(name) or (not self._load(name) and self._is_bound(name))

    def get(self, name: str, **options: Any) -> T:
        """Return the object registered as ``name``, built with ``options``.

        Raises:
            ConfigError: unknown name or option, an option's value is out of range, or the package that offers the name
                cannot be used.
        """
        if not isinstance(name, str) or not self.knows(name):
            why = self._load(name) if isinstance(name, str) else ""
            raise ConfigError(why or f"unknown {self.kind} {name!r}; {nearest(str(name), self.names())}")
        if name in self._presets:
            base, defaults = self._presets[name]
            return self.get(base, **{**defaults, **options})
        try:
            return self._factories[name](**options)
        except TypeError as error:
            known = self.options(name)
            unknown = [option for option in options if option not in known]
            # Python's own words lead with the name of a function that the caller has never seen.
            why = str(error).rpartition("() ")[2]
            if unknown:
                why = f"no {unknown[0]!r}; {nearest(unknown[0], known) if known else 'it takes none'}"
            raise ConfigError(f"{self.kind} {name!r} cannot take the options {options}: {why}") from None

    def options(self, name: str) -> list[str]:
        """Return the names of the options that ``get(name)`` takes; none for an unknown name."""
        if not self.knows(name):
            return []
        name = self._presets[name][0] if name in self._presets else name
        parameters = inspect.signature(self._factories[name]).parameters.values()
        return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]

    def _is_bound(self, name: str) -> bool:
        return name in self._factories or name in self._presets

    def _refuse_taken(self, name: str) -> None:
        if self._is_bound(name):
            raise ConfigError(f"{self.kind} name {name!r} is taken; choose another")

    def _load(self, name: str) -> str:
        """Load the entry point ``name`` once, if there is one; return why that failed, or ""."""
        offers = plugins.offers(self._group).get(name, ())
        with self._lock:
            if not offers or name in self._offered:
                return self._offered.get(name, "")
            self._offered[name] = ""  # its module may look up names while it is being imported
            was_bound = self._is_bound(name)
            lead = f"{self.kind} {name!r} of package {_packages(offers)} cannot be used: "
            try:
                if len(offers) > 1:
                    raise ConfigError("both offer this name; uninstall one of them")
                offers[0].load()
                if not self._is_bound(name):
                    raise ConfigError(f"{offers[0].point.value} registers no {self.kind} of this name")
            except ConfigError as error:
                if not was_bound:
                    self.remove(name)
                self._offered[name] = f"{lead}{error}"
            return self._offered[name]

    def _import(self, name: str = "") -> None:
        """Import the modules that register names; of the waiting ones only the module for ``name``, if no other has
        it."""
        # A thread that comes while another one imports waits here until all names are registered.
        with self._lock:
            if not self._imported:
                self._import_package(self._package)
                self._imported = True
            if not self._is_bound(name):
                for package in self._later:
                    self._import_package(package, name)

    def _import_package(self, package: str, name: str = "") -> None:
        """Import the modules of ``package`` whose names are prefixes of ``name``; all of them for an empty name."""
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if module.ispkg and module.name not in self._later:
                self._import_package(module.name)
            elif not module.ispkg and (not name or name.startswith(module.name.rpartition(".")[2])):
                importlib.import_module(module.name)
