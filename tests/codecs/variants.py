"""The codecs to test: every registered name, with its defaults and with each option in turn at its other values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fusionlayer import codecs
from fusionlayer.codecs import Codec
from fusionlayer.errors import ConfigError


def defaults() -> list[Codec]:
    """Return a codec for every registered name, each once: presets may say the same in other words."""
    return list(dict.fromkeys(codecs.get(name) for name in codecs.names()))


def every() -> list[Codec]:
    """Return the variants of every registered name, each once."""
    return list(dict.fromkeys(codec for name in codecs.names() for codec in variants(name)))


def variants(name: str) -> list[Codec]:
    """Return the codec ``name`` with its defaults, then with one option changed at a time."""
    default = codecs.get(name)
    hints = get_type_hints(type(default))
    found = [default]
    for option in default.options:
        accepted = [codec for value in _values(hints[option]) if (codec := _built(name, option, value))]
        found += accepted if _is_choice(hints[option]) else [accepted[0], accepted[-1]] if accepted else []
    return list(dict.fromkeys(found))


def _values(hint: Any) -> Iterator[Any]:
    """Yield values worth trying for an option of this type; for numbers powers of two in their order."""
    if hint is bool:
        yield from (False, True)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint in (int, float):
        yield from (hint(2) ** exponent for exponent in range(17))


def _is_choice(hint: Any) -> bool:
    return hint is bool or get_origin(hint) is Literal


def _built(name: str, option: str, value: Any) -> Codec | None:
    try:
        return codecs.get(name, **{option: value})
    except ConfigError:
        return None
