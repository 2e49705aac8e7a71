"""Settings of a job, from the file that ``FUSIONLAYER_CONFIG`` names and from the environment."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import yaml

from . import records
from .errors import ConfigError
from .registry import closest, nearest

TRANSPORTS = ("c10d", "sockets", "auto", "mpi")
MOST_CONNECTIONS = 64


def _setting(help: str, default: Any = MISSING, factory: Any = MISSING) -> Any:
    return field(default=default, default_factory=factory, metadata={"help": help})


@dataclass(frozen=True)
class PlanningSettings:
    """The settings of the key `planning`: how an optimizer fuses gradients and chooses their codecs."""

    ahead: bool | None = _setting("encode each gradient by itself, ahead of fusion; null: by algorithm and codec", None)
    planner: str = _setting("a name of `fusionlayer.planners.names()`", "tapered")
    planner_options: Mapping[str, Any] = _setting("options of that planner; sizes in bytes", factory=dict)
    plan: str | None = _setting("file with an optimizer's fusion plan, which replaces `planner` and `codec`", None)
    profile: str | None = _setting(
        "file with measured costs, for planners that need costs; null: measure the first steps", None
    )
    policy: str | None = _setting("file with rules that choose a codec for each gradient, instead of `codec`", None)
    fidelity: str = _setting(
        "codecs of `auto`: `lossless`, `near_lossless` (change at most 1e-4 of a Gaussian's energy) or `aggressive`",
        "near_lossless",
    )

    fallback: str | None = _setting(
        "codec of a bucket, such as `raw`, after its own has lost more than 0.8 of the values; null: only a warning",
        None,
    )

    def __post_init__(self) -> None:
        records.check(self)


@dataclass(frozen=True)
class Config:
    """Defaults of every entry point. An argument given in code wins over them. docs/config.md describes each."""

    codec: str = _setting(
        "codec of gradients: a name of `fusionlayer.codecs.names()`; in an optimizer also `auto`", "raw"
    )
    codec_options: Mapping[str, Any] = _setting("options of that codec", factory=dict)
    algorithm: str | None = _setting(
        "a name of `fusionlayer.collectives.names()`, ahead of fusion of `gather_names()`; null: by codec and nodes",
        None,
    )
    planning: PlanningSettings = _setting("buckets and their codecs: see below", factory=PlanningSettings)
    error_feedback: bool | None = _setting(
        "add a codec's error to the next gradient; null: if the codec is biased and coarse", None
    )
    feedback_bits: int = _setting("bits of each element of the error feedback: 32 or 8", 32)
    check_replicas: int = _setting("steps within which a difference of parameters over ranks is found; 0: never", 200)
    checksum: bool | None = _setting(
        "a checksum in every message; true sends CUDA tensors through host memory, as NCCL has none; null: between "
        "nodes, except over NCCL and in uncompressed sums from 1 MiB on",
        None,
    )
    transport: str = _setting(
        "`c10d` (gloo and NCCL), `sockets` (several TCP connections to each rank), `auto` (the faster of gloo and "
        "`sockets`, measured at the start) or `mpi` (mpi4py, under mpirun)",
        "c10d",
    )
    connections: int = _setting("TCP connections of `sockets` to each rank, over all interfaces together", 4)
    interfaces: tuple[str, ...] = _setting(
        "this host's interfaces for `sockets` and for all ports that fusionlayer opens; none: the one that other ranks "
        "can reach",
        (),
    )
    congestion: str | None = _setting("congestion control of `sockets`, such as `bbr`; null: that of the host", None)
    authenticate: bool | None = _setting(
        "tags in frames of `sockets`, so no program between ranks can change or repeat a frame; null: between hosts",
        None,
    )
    encrypt: bool = _setting("TLS 1.3 for `sockets`, instead of tags; needs OpenSSL 3", False)
    peer_memory_mb: int = _setting(
        "MiB of each GPU that ranks of one host share for messages, if measured to be faster than NCCL, and as much "
        "again for sums in one launch; 0: NCCL alone",
        0,
    )
    rates: tuple[str, ...] = _setting(
        "rates of the ranks' links, such as `[1gbit, 1gbit, 500mbit]`, or `[measured]`: in `two_shot` each rank sums a "
        "share by its rate; none: equal shares",
        (),
    )
    timeout: float = _setting("seconds that a collective waits for its peers", 300.0)
    stall_warning: float = _setting("seconds until a warning names stragglers; `inf`: never", 60.0)
    watch: bool | None = _setting(
        "log stragglers and their lines on rank 0: true in `fl.init()`, false never; null: if the default group "
        "has the backend `fusionlayer`",
        None,
    )
    status: str | None = _setting(
        "file for `fusionlayer status`, in which rank 0 keeps a job's state; null: in a folder of this user", None
    )
    timeline: str | None = _setting("file for a timeline, `.<rank>` appended", None)
    ranks_per_node: int | None = _setting(
        "ranks of a node, in rank order; null: those that share a host and its network", None
    )
    lanes: int | None = _setting("buckets of an optimizer in flight at once; null: 2; over NCCL always 1", None)
    backend: Mapping[str, Any] | None = _setting(
        "`rules` and `min_bytes` of the backend `fusionlayer` (docs/backend.md); null compresses nothing", None
    )
    threads: int | None = _setting("threads of a codec call on the CPU; null: as many as torch, at most 8", None)

    def __post_init__(self) -> None:
        records.check(self)
        if self.transport == "horovod":
            raise ConfigError("transport 'horovod' was removed; leave it out: horovodrun starts jobs over gloo or NCCL")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"unknown transport {self.transport!r}; {nearest(self.transport, [*TRANSPORTS])}")
        for name in ("timeout", "stall_warning"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected seconds above 0")
        if self.check_replicas < 0:
            raise ConfigError(f"check_replicas={self.check_replicas}; expected a number of steps, or 0 for never")
        if self.feedback_bits not in (32, 8):
            raise ConfigError(f"feedback_bits={self.feedback_bits}; expected 32 or 8")
        if self.peer_memory_mb < 0:
            raise ConfigError(f"peer_memory_mb={self.peer_memory_mb}; expected a number of MiB, or 0 for none")
        if not 1 <= self.connections <= MOST_CONNECTIONS:
            raise ConfigError(f"connections={self.connections}; expected a number from 1 to {MOST_CONNECTIONS}")
        if self.connections < len(self.interfaces):
            raise ConfigError(
                f"connections={self.connections} for {len(self.interfaces)} interfaces; expected one for each at least"
            )
        for name in ("ranks_per_node", "lanes", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1, or null")


_OTHERS: Mapping[str, str] = {
    "FUSIONLAYER_CONFIG": "file with settings",
    "FUSIONLAYER_ELASTIC_DIR": "folder for commits of elastic jobs (default: in shared memory)",
    "FUSIONLAYER_JOB_KEY": "job key: a secret of the job's processes, at least 16 bytes; `fusionrun` makes one",
    "FUSIONLAYER_JOB_KEY_FILE": "file with the job key, which other users cannot read",
    "FUSIONLAYER_JOIN": "for a process that joins an elastic job: host:port of a member, or the file of members",
    "FUSIONLAYER_MEMBERS": "for an elastic job: file in which joining processes find its members",
    "FUSIONLAYER_PUBLISH_SECRET_FILE": "file with the secret of `fl.publish` and `fl.subscribe`",
    "FUSIONLAYER_ISA": "instruction set of the CPU core: avx512, avx2, baseline, auto (default)",
    "FUSIONLAYER_CUDA": "when building: auto (default: for the GPUs present), 1 (fail without nvcc), 0",
    "FUSIONLAYER_NVCC": "when building: the nvcc to use",
    "FUSIONLAYER_CUDA_ARCHS": 'when building: GPUs to compile for, as "80 90", or all',
    "FUSIONLAYER_OBJECTS": "when building: folder that keeps compiled files for builds in other folders",
    "FUSIONLAYER_WERROR": "when building: 1 makes warnings of the compiler errors",
}
REMOVED: Mapping[str, str] = {
    "grace": "it did not make runs faster; ranks wait for each other less often with sync=fl.Local(...)",
    "autotune": "it did not make steps faster than the default planner; codec='auto' chooses codecs by measured costs",
    "autotune_options": "autotune did not make steps faster than the default planner",
    "replan": "a plan by costs is made once, after the first steps",
    "roster": "FUSIONLAYER_MEMBERS names the file of members now",
}
"""Settings and arguments that were removed: the reason, or the replacement."""

_PLANNING = tuple(f.name for f in fields(PlanningSettings))
_HINTS = typing.get_type_hints(Config) | typing.get_type_hints(PlanningSettings)
_FIELDS = [f for f in (*fields(Config), *fields(PlanningSettings)) if f.name != "planning"]
_KEYS = {f"FUSIONLAYER_{f.name.upper()}": f.name for f in _FIELDS}
VARIABLES: Mapping[str, str] = {**_OTHERS, **{f"FUSIONLAYER_{f.name.upper()}": f.metadata["help"] for f in _FIELDS}}
"""The environment variables of fusionlayer, and their meanings. Every setting has one."""

# A variable also replaces these keys of the file, which would not fit its value or would take precedence over it.
_REPLACED = {
    "codec": ("codec_options", "policy", "plan"),
    "policy": ("plan",),
    "planner": ("planner_options", "plan"),
}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of this process: those of the file, replaced by those of single variables.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, or a value is of the wrong kind or out of range.
    """
    path = environ.get("FUSIONLAYER_CONFIG")
    try:
        given = (records.read(path, "config") or {}) if path else {}
    except ConfigError as error:
        raise ConfigError(f"FUSIONLAYER_CONFIG={path}: {error}") from None
    for key, why in REMOVED.items():
        source = f"FUSIONLAYER_{key.upper()}"
        keys = {*given, *(given.get("planning") or ())} if isinstance(given, Mapping) else ()
        if environ.get(source) or key in keys:
            where = source if environ.get(source) else f"FUSIONLAYER_CONFIG={path}: {key}"
            raise ConfigError(f"{where}: this setting was removed: {why}; leave it out")
    settings = records.build(Config, _nested(given, f"config {path}"), f"config {path}")
    chosen = {key: environ[variable] for variable, key in _KEYS.items() if environ.get(variable)}
    replaced = {key for name in chosen for key in _REPLACED.get(name, ())}
    default = flat(Config())
    values = flat(settings) | {key: default[key] for key in replaced}
    for key, text in chosen.items():
        variable = f"FUSIONLAYER_{key.upper()}"
        values[key] = _value(variable, text, _HINTS[key])
        settings = records.build(Config, _nested(values, ""), f"{variable}={text}")
    return settings


def flat(settings: Config) -> dict[str, Any]:
    """Return all settings in one mapping, those of `planning` under their own names, which no other setting has."""
    values = {**vars(settings), **vars(settings.planning)}
    del values["planning"]
    return values


def _nested(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the settings of a file, with all settings of `planning` below that key."""
    if not isinstance(values, Mapping) or not (inner := {key: values[key] for key in _PLANNING if key in values}):
        return values
    others = {key: value for key, value in values.items() if key not in _PLANNING}
    given = values.get("planning", {})
    if not isinstance(given, Mapping):
        return others  # in which `planning` is refused for its type
    if twice := sorted({*inner} & {*given}):
        raise ConfigError(f"{where}: {twice[0]} stands below `planning` and outside of it; write it once")
    return {**others, "planning": {**given, **inner}}


def _value(variable: str, text: str, hint: Any) -> Any:
    """Return the value of the ``text`` of a variable for a setting of the type ``hint``."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text == "null" and type(None) in kinds:
        return None
    if str in kinds:
        return text
    try:
        if bool in kinds:
            return _WORDS[text.lower()]
        if float in kinds or int in kinds:
            return int(text) if int in kinds else float(text)
        if typing.get_origin(hint) is tuple:
            return [name.strip() for name in text.strip("[]").split(",")]
        return records.parse(text)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{variable}={text!r}: {error.problem}") from None
    except (ValueError, KeyError, yaml.YAMLError):
        # Every setting with a fraction is a time.
        expected = {bool: "1 or 0", int: "a whole number", float: "a number of seconds"}
        what = next((text for kind, text in expected.items() if kind in kinds), "keys and values, as YAML")
        raise ConfigError(f"{variable}={text!r}; expected {what}") from None


@contextmanager
def blame(settings: Config, *keys: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Let a ``ConfigError`` of the block begin with where the settings ``keys`` come from, such as a variable.

    Otherwise a user with a variable set and no such argument in the script would not know the cause.
    """
    try:
        yield
    except ConfigError as error:
        mine, found, default = flat(settings), flat(load(environ)), flat(Config())
        set_here = [key for key in keys if mine[key] == found[key] != default[key]]
        names = [f"FUSIONLAYER_{key.upper()}" for key in set_here]
        names = [name for name in names if environ.get(name)] or ["FUSIONLAYER_CONFIG"] * bool(set_here)
        if not names:
            raise
        raise ConfigError(": ".join([*(f"{name}={environ.get(name)}" for name in names), str(error)])) from None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that begin as fusionlayer's do and mean nothing, each with the known one that is nearest."""
    return {
        name: f"{closest(name, [*VARIABLES])}docs/config.md lists all"
        for name in sorted(environ)
        if name.startswith("FUSIONLAYER_") and name not in VARIABLES
    }
