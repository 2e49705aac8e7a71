"""Registries: they bind names to codecs, collectives and planners. Nothing else does."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .errors import ConfigError

__all__ = ["Registry", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """Return text for an error message: the known names, and before them the one closest to ``name``."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


class Registry(Generic[T]):
    """The names of one kind of thing. The first look-up imports every module of one package; these register the names.

    ``get`` calls the registered factory with its options. A preset is a name for a factory with other defaults.

    Args:
        kind: word for error messages, such as "codec".
        package: package whose modules register their names on import.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._factories: dict[str, Callable[..., T]] = {}
        self._presets: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._imported = False
        # Guards _imported: no thread looks up a name before all modules are imported. Reentrant, because a module that
        # is being imported may look up a name itself.
        self._lock = threading.RLock()

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Bind ``name`` to a factory. Raise ``ConfigError`` if the name is taken."""
        if name in self._factories or name in self._presets:
            raise ConfigError(f"{self.kind} name {name!r} is taken; choose another")
        self._factories[name] = factory

    def add_preset(self, name: str, base: str, **defaults: Any) -> None:
        """Bind ``name`` to ``base`` with other defaults. The caller's options win over these."""
        if name in self._factories or name in self._presets:
            raise ConfigError(f"{self.kind} name {name!r} is taken; choose another")
        self._presets[name] = (base, defaults)

    def remove(self, name: str) -> None:
        """Unbind ``name``. Tests that register names of their own need it."""
        self._factories.pop(name, None)
        self._presets.pop(name, None)

    def names(self) -> list[str]:
        """Return all names that ``get`` takes, sorted."""
        self._import_all()
        return sorted([*self._factories, *self._presets])

    def get(self, name: str, **options: Any) -> T:
        """Return what ``name`` stands for, built with ``options``.

        Raises:
            ConfigError: unknown name or option, or an option's value is out of range.
        """
        self._import_all()
        if name in self._presets:
            base, defaults = self._presets[name]
            return self.get(base, **{**defaults, **options})
        if name not in self._factories:
            raise ConfigError(f"unknown {self.kind} {name!r}; {nearest(str(name), self.names())}")
        try:
            return self._factories[name](**options)
        except TypeError as error:
            known = self.options(name)
            unknown = [option for option in options if option not in known]
            # Python's own words lead with the name of a function that the caller has never seen.
            why = str(error).rpartition("() ")[2]
            if unknown:
                why = f"no {unknown[0]!r}; {nearest(unknown[0], known) if known else 'it takes none'}"
            raise ConfigError(f"{self.kind} {name!r} cannot take the options {options}: {why}") from error

    def options(self, name: str) -> list[str]:
        """Return the names of the options that ``get(name)`` takes; none for an unknown name."""
        self._import_all()
        name = self._presets[name][0] if name in self._presets else name
        if name not in self._factories:
            return []
        parameters = inspect.signature(self._factories[name]).parameters.values()
        return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]

    def _import_all(self) -> None:
        # A thread that comes while another one imports waits here until all names are registered.
        with self._lock:
            if self._imported:
                return
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._imported = True
