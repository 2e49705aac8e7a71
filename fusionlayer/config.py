"""Settings of a job, from the file that ``FUSIONLAYER_CONFIG`` names and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import yaml

from . import records
from .errors import ConfigError
from .registry import nearest

__all__ = ["TRANSPORTS", "VARIABLES", "Config", "describe", "load", "unknown_variables"]

TRANSPORTS = ("c10d", "mpi", "horovod")

VARIABLES: Mapping[str, str] = {
    "FUSIONLAYER_CONFIG": "file with settings",
    "FUSIONLAYER_TIMEOUT": "seconds that a collective waits for its peers",
    "FUSIONLAYER_STALL_WARNING": "seconds until late ranks are named; `inf`: never",
    "FUSIONLAYER_TIMELINE": "file for a timeline",
    "FUSIONLAYER_TRANSPORT": "what moves bytes between processes: `c10d`, `mpi` or `horovod`",
    "FUSIONLAYER_ELASTIC_DIR": "folder for the commits of elastic jobs; without it one in shared memory",
    "FUSIONLAYER_ISA": "instruction set of the CPU core: avx512, avx2, baseline, auto (default)",
    "FUSIONLAYER_CUDA": "when building: auto (default), 1 (fail without nvcc), 0",
    "FUSIONLAYER_NVCC": "when building: the nvcc to use",
    "FUSIONLAYER_CUDA_ARCHS": 'when building: GPUs to compile for, as "80 90"',
    "FUSIONLAYER_WERROR": "when building: 1 makes warnings of the compiler errors",
}
"""The environment variables of fusionlayer, and what each does."""


def _setting(help: str, default: Any = MISSING, factory: Any = MISSING) -> Any:
    return field(default=default, default_factory=factory, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """Defaults of every entry point. An argument given in code wins over them. docs/config.md describes each."""

    codec: str = _setting(
        "codec of gradients: a name of `fusionlayer.codecs.names()`, or `auto` in an optimizer", "raw"
    )
    codec_options: Mapping[str, Any] = _setting("options of that codec", factory=dict)
    algorithm: str | None = _setting(
        "collective: a name of `fusionlayer.collectives.names()` or, ahead of fusion, of `gather_names()`; null "
        "chooses by codec and number of ranks",
        None,
    )
    ahead: bool | None = _setting(
        "encode each gradient by itself as it arrives, ahead of fusion; null: algorithm and codec decide", None
    )
    planner: str = _setting(
        "planner that fuses gradients into buckets: a name of `fusionlayer.planners.names()`", "tapered"
    )
    planner_options: Mapping[str, Any] = _setting("options of that planner; sizes in bytes", factory=dict)
    profile: str | None = _setting(
        "file with measured costs of the model, for planning by costs; null: the first steps are measured", None
    )
    policy: str | None = _setting("file with rules that give each gradient a codec, in place of `codec`", None)
    fidelity: str = _setting(
        "what `auto` may choose codecs from: `lossless`, `near_lossless` (changes at most 1e-4 of a Gaussian's energy) "
        "or `aggressive`",
        "near_lossless",
    )
    replan: bool = _setting("when planning by costs: measure and plan again when steps have drifted", True)
    autotune: bool = _setting(
        "while training runs, search for the number and sizes of buckets with the shortest measured steps", False
    )
    autotune_options: Mapping[str, Any] = _setting(
        "`steps`, `every`, `drift`, `log`: the fields of `fusionlayer.Autotune`", factory=dict
    )
    error_feedback: bool | None = _setting(
        "send what a codec lost with the next gradient; null: where the codec is biased and coarse", None
    )
    check_replicas: int = _setting(
        "compare parameters over ranks, so that a difference is found within this many steps; 0: never", 200
    )
    checksum: bool | None = _setting(
        "send a checksum with every message and compare it before use; with true CUDA tensors travel through host "
        "memory, as NCCL carries none; null: between nodes, except by NCCL and in uncompressed sums from 1 MiB on",
        None,
    )
    transport: str = _setting(
        "what moves bytes between processes: `c10d` (gloo and NCCL), `mpi` (mpi4py; start by mpirun) or `horovod`; "
        "`FUSIONLAYER_TRANSPORT` overrides it",
        "c10d",
    )
    timeout: float = _setting(
        "seconds that a collective waits for its peers; `FUSIONLAYER_TIMEOUT` overrides it", 300.0
    )
    stall_warning: float = _setting(
        "seconds of waiting after which late ranks are named in a warning; `FUSIONLAYER_STALL_WARNING` overrides it",
        60.0,
    )
    timeline: str | None = _setting(
        "file for a timeline in Chrome's trace format, `.<rank>` appended; `FUSIONLAYER_TIMELINE` overrides it", None
    )
    ranks_per_node: int | None = _setting(
        "ranks that share a node, counted in rank order; null: those that share a host and its network", None
    )
    lanes: int | None = _setting(
        "buckets of an optimizer that are under way at once; null: 2 on the CPU, 1 on a GPU", None
    )
    backend: Mapping[str, Any] | None = _setting(
        "`rules` and `min_bytes` of the process-group backend `fusionlayer`, see docs/backend.md; null compresses "
        "nothing",
        None,
    )
    threads: int | None = _setting("threads of one codec call on the CPU; null: as many as torch uses, at most 8", None)

    def __post_init__(self) -> None:
        records.check(self)
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"unknown transport {self.transport!r}; {nearest(self.transport, [*TRANSPORTS])}")
        for name in ("timeout", "stall_warning"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected seconds above 0")
        if self.check_replicas < 0:
            raise ConfigError(f"check_replicas={self.check_replicas}; expected a number of steps, or 0 for never")
        for name in ("ranks_per_node", "lanes", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1, or null")


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of this process: those of the file, with those of single variables over them.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or a value of the wrong kind.
    """
    values: dict[str, Any] = {}
    for variable, key in (("FUSIONLAYER_TIMEOUT", "timeout"), ("FUSIONLAYER_STALL_WARNING", "stall_warning")):
        if environ.get(variable):
            try:
                values[key] = float(environ[variable])
            except ValueError:
                raise ConfigError(f"{variable}={environ[variable]!r}; expected a number of seconds") from None
    if environ.get("FUSIONLAYER_TIMELINE"):
        values["timeline"] = environ["FUSIONLAYER_TIMELINE"]
    if environ.get("FUSIONLAYER_TRANSPORT"):
        values["transport"] = environ["FUSIONLAYER_TRANSPORT"]
    path = environ.get("FUSIONLAYER_CONFIG")
    try:
        given = (records.read(path, "config") or {}) if path else {}
    except ConfigError as error:
        raise ConfigError(f"FUSIONLAYER_CONFIG={path}: {error}") from None
    settings = records.build(Config, given, f"config {path}")
    return records.build(Config, {**vars(settings), **values}, "config in the environment")


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that begin as fusionlayer's do and mean nothing, each with the known one that is nearest."""
    return {
        name: nearest(name, [*VARIABLES])
        for name in sorted(environ)
        if name.startswith("FUSIONLAYER_") and name not in VARIABLES
    }


def describe() -> str:
    """Return the text of docs/config.md. ``make docs`` writes it to the file."""
    defaults = vars(Config())
    rows = []
    for f in fields(Config):
        default = yaml.safe_dump(defaults[f.name], default_flow_style=True).splitlines()[0]
        rows.append(f"| `{f.name}` | {str(f.type).replace(' | None', ' or null')} | {default} | {f.metadata['help']} |")
    return "\n".join(
        [
            "# Configuration",
            "",
            "`FUSIONLAYER_CONFIG` names a YAML file with any of these keys. Arguments given in code win over it, and",
            "so do [environment variables](variables.md). An unknown key is an error.",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
