"""Cost profiles: what a machine, its links, its codecs and one model's step were measured to cost. YAML files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..errors import ConfigError
from ..plan import TensorInfo
from ..registry import nearest
from .cost_model import CodecCost, Cost, Curve, LinkCost, parse_rate

__all__ = ["PROFILE_VERSION", "Gradient", "Machine", "Model", "Profile", "Validation"]

PROFILE_VERSION = 1
_NO_LINKS = "profile has no links; measure one with two ranks or more: `torchrun --no-python ... fusionlayer profile`"

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Where the profile was measured.

    Attributes:
        cores: of the machine.
        workers: ranks that shared them; emulated hosts share one machine's.
        threads: that each rank computed with.
    """

    cores: int
    workers: int
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("cores", "workers", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"machine: {name}={getattr(self, name)}; expected at least 1")

    @property
    def cores_per_worker(self) -> float:
        """Cores that a rank had for itself."""
        return self.cores / self.workers


@dataclass(frozen=True)
class Gradient:
    """A gradient of the model.

    Attributes:
        name: the parameter's.
        numel: elements.
        ready: seconds of backward after which it is there.
        used: seconds of forward after which its parameter is first needed.
        dtype: element type.
        itemsize: bytes of an element.
    """

    name: str
    numel: int
    ready: float
    used: float = 0.0
    dtype: str = "float32"
    itemsize: int = 4

    @property
    def info(self) -> TensorInfo:
        """What a planner knows of it."""
        return TensorInfo(self.name, self.numel, self.dtype, self.itemsize)


@dataclass(frozen=True)
class Model:
    """One step of a model without communication, in seconds.

    Attributes:
        name: of the model.
        forward: of the forward pass, loss included.
        backward: of the backward pass.
        optimizer: of the update, clearing of gradients included.
        tensors: gradients in the order of their arrival.
    """

    name: str
    forward: float
    backward: float
    optimizer: float
    tensors: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConfigError(f"model {self.name!r} has no tensors; expected one at least")
        for name in ("forward", "backward", "optimizer"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"model {self.name!r}: {name}={getattr(self, name)!r}; expected seconds from 0 on")


@dataclass(frozen=True)
class Validation:
    """How projected steps compared with measured ones.

    Attributes:
        source: file with the measured steps.
        cells: number of steps compared.
        workers: smallest and largest number of ranks among them.
        rates: lowest and highest rate among them.
        methods: what was compared.
        error: mean, median and largest of |projected / measured - 1|.
        low: smallest measured / projected.
        median: median of it.
        high: largest of it.
    """

    source: str
    cells: int
    workers: tuple[int, int]
    rates: tuple[str, str]
    methods: tuple[str, ...]
    error: tuple[float, float, float]
    low: float
    median: float
    high: float

    def covers_workers(self, workers: int) -> bool:
        """Return whether so many ranks are within the validated range."""
        return self.workers[0] <= workers <= self.workers[1]

    def covers_rate(self, rate: str) -> bool:
        """Return whether the rate is within the validated range."""
        low, high = map(parse_rate, self.rates)
        return low <= parse_rate(rate) <= high


@dataclass(frozen=True)
class Profile:
    """Everything that a projection needs, and that a planner may use.

    Attributes:
        version: of this schema.
        title: what was measured, in words.
        machine: where.
        model: step of the model.
        copy: CPU seconds of packing, and of unpacking, by elements of a bucket.
        codecs: costs by name of the codec.
        links: costs of the link between hosts, by rate in the words of tc; none if one process measured alone.
        inside: costs of the link between ranks of one host, if it was measured.
        collectives: seconds of collectives by bytes of each rank's message, by algorithm and number of ranks.
        disturbance: seconds that a rank's computing loses while it exchanges one small message with all others.
        environment: facts about hardware and software, in words.
        validation: how well projections from this profile held.
    """

    version: int
    title: str
    machine: Machine
    model: Model
    copy: Cost
    codecs: Mapping[str, CodecCost]
    links: Mapping[str, LinkCost]
    inside: LinkCost | None = None
    collectives: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)
    disturbance: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    validation: Validation | None = None

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ConfigError(f"profile has version {self.version}, expected {PROFILE_VERSION}; measure it anew")
        for rate in self.links:
            parse_rate(rate)

    @property
    def fastest_rate(self) -> str:
        """The highest rate that was measured; ``ConfigError`` if none was."""
        if not self.links:
            raise ConfigError(_NO_LINKS)
        return max(self.links, key=parse_rate)

    def link(self, rate: str, curves: bool = False) -> LinkCost:
        """Return the cost of a link of ``rate``: of a measured one by its ``curves``, if wanted, else by alpha-beta."""
        bits = parse_rate(rate)
        known = {parse_rate(name): link for name, link in self.links.items()}
        if curves and bits in known:
            return known[bits]
        if not known:
            raise ConfigError(_NO_LINKS)
        return LinkCost.between(bits, known.items())

    def transfer(self, algorithm: str, workers: int) -> Cost | None:
        """Return measured seconds of a collective by bytes of a rank's message; None if that was not measured."""
        known = self.collectives.get("one_shot" if algorithm == "gather" else algorithm, {})
        return known.get(str(workers))

    def codec(self, name: str) -> CodecCost:
        """Return the costs of a codec; ``ConfigError`` if they were not measured."""
        if name not in self.codecs:
            raise ConfigError(f"profile has no costs of codec {name!r}; {nearest(name, sorted(self.codecs))}")
        return self.codecs[name]

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read a profile from a file; ``ConfigError`` names what is wrong with it, and where."""
        try:
            data = yaml.load(Path(path).read_text(), Loader=_Loader)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"profile {path} is no YAML: {' '.join(str(error).split())}") from error
        try:
            return _build(cls, data, "profile")
        except ConfigError as error:
            raise ConfigError(f"profile {path}: {error}") from None

    def to_yaml(self, path: str | Path, comment: str = "") -> None:
        """Write the profile to a file, led by a comment."""
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        text = yaml.dump(_plain(self), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
        Path(path).write_text(head + text)


# ---- between dataclasses and YAML -----------------------------------------------------------------------------------

# The C parser is many times faster where it is there; both make plain data alone.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):
    """Writes numbers with the digits that mean something."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _number(value)))


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    text = f"{value:.5g}"
    return text if "." in text else text.replace("e", ".0e")  # YAML 1.1 takes 1e-05 for a word


def _plain(value: Any) -> Any:
    """Return ``value`` as mappings, lists and scalars, what has its default left out."""
    if isinstance(value, Curve):
        return [[size, seconds] for size, seconds in value.points]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if not _is_default(value, f)}
        return {key: _plain(item) for key, item in given.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _is_default(value: Any, f: dataclasses.Field[Any]) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return bool(getattr(value, f.name) == default)


def _build(kind: type[T], data: object, where: str) -> T:
    """Return a dataclass made from a mapping whose keys and values fit its fields."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {data!r:.60}; expected keys and values")
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    for key in data:
        if key not in fields:
            raise ConfigError(f"{where} has an unknown key {key!r}; {nearest(str(key), list(fields))}")
    required = [name for name, f in fields.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in data]:
        raise ConfigError(f"{where} lacks {missing[0]!r}; it needs: {', '.join(required)}")
    hints = typing.get_type_hints(kind)
    values = {key: _value(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(hint: Any, data: object, where: str) -> Any:
    """Return ``data`` as what the type ``hint`` says."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _alternative(args, data, where)
    if hint is Curve:
        points = typing.cast(Any, _value(tuple[tuple[float, float], ...], data, where))
        try:
            return Curve(points)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), data, where)
    if origin is tuple:
        if not isinstance(data, list) or (args[-1] is not Ellipsis and len(data) != len(args)):
            length = "" if args[-1] is Ellipsis else f" of {len(args)}"
            raise ConfigError(f"{where} is {data!r:.60}; expected a list{length}")
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(_value(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, data, strict=True)))
    if origin is not None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where} is {data!r:.60}; expected keys and values")
        return {str(key): _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
    return _scalar(hint, data, where)


def _alternative(args: tuple[Any, ...], data: object, where: str) -> Any:
    """A list is a curve, a mapping is another dataclass, null is None where it may be."""
    if data is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    if Curve in choices:
        choices = [arg for arg in choices if (arg is Curve) == isinstance(data, list)]
    return _value(choices[0], data, where)


def _scalar(kind: type, data: object, where: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
        raise ConfigError(f"{where} is {data!r:.60}; expected {_WORDS[kind]}")
    return kind(data)


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
