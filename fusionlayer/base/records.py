"""Records: dataclasses that are read from YAML or JSON. All files share one checker and one style of error.

Why not a library:

- msgspec ignores unknown keys of dataclasses, does not name the value it refuses, and takes no union of two
  dataclasses, such as a line or a curve.
- pydantic is 10 MB with its core. Its errors have several lines and do not say where in a union they occurred. To name
  the nearest key it would need as much code again.

A dataclass whose only field is a list is written as that list: a curve is written as its points.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .errors import ConfigError, require
from .registry import nearest

T = TypeVar("T")

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    Mapping: "keys and values",
    Sequence: "a list",
}
# The C parser is many times faster, but not every PyYAML has it. Both make plain data only.
_SPECIAL = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
_LARGEST = (1 << 64) - 1
# Values that aliases repeat: a file of a few lines can name more than any memory holds.
_MOST_REPEATED = 1_000_000
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Refuses a mapping that has a key twice: YAML forbids it, and PyYAML would keep the last value.

    It also refuses texts that look like a number or a date without being one, such as 2001-99-99, and numbers of more
    than 64 bits: PyYAML would raise the errors of its conversion. Aliases may repeat ``_MOST_REPEATED``
    values at most.
    """

    def construct_document(self, node: Any) -> Any:
        known: dict[int, int] = {}
        if _count(node, known) - len(known) > _MOST_REPEATED:
            problem = f"aliases repeat more than {_MOST_REPEATED} values, or one holds itself; write values out"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            problem = f"{_start(node)} is no {node.tag.rpartition(':')[2]}; put a text in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if type(made) is int and abs(made) > _LARGEST:
            problem = f"{_start(node)} is too large; expected a whole number of at most 64 bits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return made

    def flatten_mapping(self, node: Any) -> None:
        # PyYAML calls this for each mapping before it replaces "<<" by another mapping's keys, and may call it again.
        if not getattr(node, "checked", False):
            node.checked = True
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = key_node.value if key_node.tag in _SPECIAL else self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    continue  # PyYAML refuses it
                if key in seen:
                    problem = f"the mapping has the key {key!r} twice; expected one value"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        super().flatten_mapping(node)


def _count(node: Any, known: dict[int, int]) -> int:
    """Return how many values a node has with each alias written out. ``known``: the counts so far, by identity."""
    if id(node) not in known:
        known[id(node)] = _LARGEST  # while it is counted: it holds itself if it is met again
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(_count(part, known) for part in each)
    return known[id(node)]


def _start(node: Any) -> str:
    return repr(node.value[:40]) if isinstance(node.value, str) else f"a {node.id}"


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: str | Path, what: str) -> Any:
    """Return the data of a YAML file; ``ConfigError`` if it cannot be read. ``what`` names the content of the file."""
    require(path, (str, Path), what, "the path of a file")
    try:
        return parse(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} cannot be read: it is no text; expected YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} cannot be read: {_why(error)}") from None


def parse(text: str) -> Any:
    """Return the data of a YAML text; ``yaml.YAMLError`` if it is none, or has a key twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("its lists or mappings are nested too deeply") from None


def _why(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    problem = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def load(kind: type[T], path: str | Path, what: str, version: int | None = None) -> T:
    """Return the record in a YAML file.

    Args:
        kind: dataclass of the record.
        path: the file.
        what: name for the record in errors, such as "profile".
        version: expected value of the key ``version``; None: there is no such key.

    Raises:
        ConfigError: the file cannot be read, has another version, or does not fit ``kind``.
    """
    data = read(path, what)
    # Before all else, as a file of another version may have other keys.
    if version is not None and isinstance(data, Mapping) and data.get("version", version) != version:
        raise ConfigError(f"{what} {path} has version {data['version']}, expected {version}; make it anew")
    return build(kind, data, f"{what} {path}")


def build(kind: type[T], data: object, where: str) -> T:
    """Return the dataclass ``kind`` made from a mapping. Errors begin with ``where``, which names its source.

    Dataclasses are kept unchanged.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type. The message has ``where``, the key, its
            value, the expectation, and for an unknown key the nearest known one.
    """
    try:
        return typing.cast(T, _record(kind, data, ""))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def check(record: Any) -> None:
    """Raise ``ConfigError`` unless each field of a dataclass has a value of its type. Call it in ``__post_init__``."""
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        _value(hint, getattr(record, name), name)


# Cached: resolving the types takes longer than checking a value, and a plan has thousands of slots.
@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


@cache
def _required(kind: type) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.default is MISSING and f.default_factory is MISSING)


def _record(kind: type, data: object, where: str) -> Any:
    hints = _hints(kind)
    if _shape(kind) is Sequence:
        ((name, hint),) = hints.items()
        values = {name: _value(hint, data, where)}
    else:
        if not isinstance(data, Mapping):
            raise _refusal(data, where, Mapping)
        for key in data:
            if key not in hints:
                raise ConfigError(f"{_lead(where)}unknown key {key!r}; {nearest(str(key), list(hints))}")
        for name in _required(kind):
            if name not in data:
                raise ConfigError(f"{_lead(where)}lacks {name!r}; it needs: {', '.join(_required(kind))}")
        values = {key: _value(hints[key], value, f"{where}.{key}" if where else key) for key, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{_lead(where)}{error}") from None


def _value(hint: Any, data: object, where: str) -> Any:
    """Return ``data`` converted to the type ``hint``. ``where`` is its place in the record, for errors."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        fitting = [each for each in args if _looks(data, each)]
        if not fitting:
            raise _refusal(data, where, *args)
        return _value(fitting[0], data, where)
    if hint is Any:
        return data
    if not _looks(data, hint):
        raise _refusal(data, where, hint)
    if dataclasses.is_dataclass(hint):
        return data if isinstance(data, typing.cast(type, hint)) else _record(typing.cast(type, hint), data, where)
    if isinstance(data, Mapping):
        return {str(key): _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if _shape(hint) is Sequence:
        items = typing.cast(Sequence[Any], data)
        if (
            args == (int, Ellipsis)
            and {*map(type, items)} == {int}
            and -_LARGEST <= min(items) <= max(items) <= _LARGEST
        ):
            return tuple(items)  # quick, as some have a number for each rank of a job
        kinds = args if _length(hint) else (args[0],) * len(items)
        return tuple(
            _value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    if isinstance(data, int) and abs(data) > _LARGEST:
        digits = data.bit_length() * 3 // 10
        raise ConfigError(f"{where} has about {digits} digits; expected a whole number of at most 64 bits")
    return float(typing.cast(float, data)) if hint is float else data


def _looks(data: object, hint: Any) -> bool:
    """Return whether ``data`` has the outer shape of ``hint``. Its content is not checked."""
    shape = _shape(hint)
    if dataclasses.is_dataclass(hint) and isinstance(data, typing.cast(type, hint)):
        return True
    if shape is Sequence:
        return isinstance(data, (list, tuple)) and _length(hint) in (None, len(data))
    if isinstance(data, bool):
        return shape is bool
    return isinstance(data, (int, float) if shape is float else shape)


def _shape(hint: Any) -> Any:
    """Return the key in ``_WORDS`` for a type."""
    if dataclasses.is_dataclass(hint):
        shapes = [_shape(each) for each in _hints(typing.cast(type, hint)).values()]
        return Sequence if shapes == [Sequence] else Mapping
    origin = typing.get_origin(hint)
    return Sequence if origin is tuple else origin or hint


def _length(hint: Any) -> int | None:
    """Return how many items a tuple type has, or None for any number."""
    args = typing.get_args(hint)
    return len(args) if typing.get_origin(hint) is tuple and args[-1] is not Ellipsis else None


def _lead(where: str) -> str:
    return f"{where}: " if where else ""


def _refusal(data: object, where: str, *hints: Any) -> ConfigError:
    words = [f"{_WORDS[_shape(hint)]}{f' of {_length(hint)}' if _length(hint) else ''}" for hint in hints]
    given = "nothing" if data is None and not where else f"{data!r:.60}"
    return ConfigError(f"{where}{'=' if where else ''}{given}; expected {' or '.join(dict.fromkeys(words))}")


# ---- writing --------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writes floats with five significant digits."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _number(value)))


def save(record: object, path: str | Path, comment: str = "") -> None:
    """Write a record to a YAML file that begins with a comment. Fields that have their default are left out."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    text = yaml.dump(plain(record), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    Path(path).write_text(head + text)


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    text = f"{value:.5g}"
    return text if "." in text else text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a string


def plain(value: Any) -> Any:
    """Return ``value`` as mappings, lists and scalars. Fields that have their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if _shape(type(value)) is Sequence:
            return plain(getattr(value, fields[0].name))
        return {f.name: plain(getattr(value, f.name)) for f in fields if not _is_default(value, f)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _is_default(value: Any, f: dataclasses.Field[Any]) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return bool(getattr(value, f.name) == default)
