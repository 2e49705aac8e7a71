"""The only way a name is bound to a codec, a collective or a planner."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .errors import ConfigError

__all__ = ["Registry", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """Return ``known`` as text for an error message, the closest match to ``name`` pointed out."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


class Registry(Generic[T]):
    """Names of one kind, found by importing every module of one package.

    A registered factory is called with the options of ``get``; a preset is a name for a factory with other defaults.

    Args:
        kind: what the names stand for, as error messages say it.
        package: package whose modules register their names on import.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._factories: dict[str, Callable[..., T]] = {}
        self._presets: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._imported = False
        # Guards _imported: no thread looks a name up before all modules are imported. Reentrant: a module that is being
        # imported may look one up.
        self._lock = threading.RLock()

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Bind ``name``; a name that is taken is a ``ConfigError``."""
        if name in self._factories or name in self._presets:
            raise ConfigError(f"{self.kind} name {name!r} is taken; choose another")
        self._factories[name] = factory

    def add_preset(self, name: str, base: str, **defaults: Any) -> None:
        """Bind ``name`` to ``base`` with other defaults; the caller's options still win."""
        if name in self._factories or name in self._presets:
            raise ConfigError(f"{self.kind} name {name!r} is taken; choose another")
        self._presets[name] = (base, defaults)

    def remove(self, name: str) -> None:
        """Unbind ``name`` (for tests that register something of their own)."""
        self._factories.pop(name, None)
        self._presets.pop(name, None)

    def names(self) -> list[str]:
        """Return every name that ``get`` takes, sorted."""
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
            raise ConfigError(f"{self.kind} {name!r} cannot take the options {options}: {error}") from error

    def _import_all(self) -> None:
        with self._lock:  # another thread must not look before all names are there
            if self._imported:
                return
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._imported = True
