"""Settings of a job: one dataclass, filled from the file that ``FUSIONLAYER_CONFIG`` names and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError
from .registry import nearest

__all__ = ["Config", "load"]


@dataclass(frozen=True)
class Config:
    """Defaults of every entry point; an argument given in code wins."""

    codec: str = "raw"
    """Codec of gradients: a name of ``fusionlayer.codecs.names()``."""

    codec_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that codec."""

    algorithm: str | None = None
    """Collective: a name of ``fusionlayer.collectives.names()``; null chooses by codec and number of ranks."""

    planner: str = "horovod"
    """Planner that fuses gradients into buckets: a name of ``fusionlayer.planners.names()``."""

    planner_options: Mapping[str, Any] = field(default_factory=lambda: {"threshold": 8 << 20})
    """Options of that planner; sizes in bytes."""

    error_feedback: bool | None = None
    """Keep what a codec lost and send it with the next gradient; null: where the codec is biased and coarse."""

    checksum: bool = False
    """Put a header with a checksum on every message and verify it before decoding."""

    timeout: float = 300.0
    """Seconds that a collective waits for its peers before it fails. ``FUSIONLAYER_TIMEOUT`` overrides it."""

    stall_warning: float = 60.0
    """Seconds of waiting after which the late ranks are named in a warning."""

    timeline: str | None = None
    """File for a timeline in Chrome's trace format; ``.rank`` is appended. ``FUSIONLAYER_TIMELINE`` overrides it."""

    threads: int | None = None
    """Threads of one codec call on the CPU; null: as many as torch uses, at most 8."""

    def __post_init__(self) -> None:
        kinds = {
            "codec": str,
            "codec_options": Mapping,
            "algorithm": (str, type(None)),
            "planner": str,
            "planner_options": Mapping,
            "error_feedback": (bool, type(None)),
            "checksum": bool,
            "timeout": (int, float),
            "stall_warning": (int, float),
            "timeline": (str, type(None)),
            "threads": (int, type(None)),
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool and kind[0] is not bool):
                raise ConfigError(f"config: {name}={value!r} has type {type(value).__name__}; see docs/config.md")
        for name in ("timeout", "stall_warning"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"config: {name}={getattr(self, name)!r}; expected seconds above 0")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"config: threads={self.threads}; expected at least 1, or null")


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of this process: the file, then single variables over it.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or a value of the wrong kind.
    """
    values: dict[str, Any] = {}
    path = environ.get("FUSIONLAYER_CONFIG")
    if path:
        values = _read(Path(path))
    if environ.get("FUSIONLAYER_TIMEOUT"):
        try:
            values["timeout"] = float(environ["FUSIONLAYER_TIMEOUT"])
        except ValueError:
            given = environ["FUSIONLAYER_TIMEOUT"]
            raise ConfigError(f"FUSIONLAYER_TIMEOUT={given!r}; expected a number of seconds") from None
    if environ.get("FUSIONLAYER_TIMELINE"):
        values["timeline"] = environ["FUSIONLAYER_TIMELINE"]
    return Config(**values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"FUSIONLAYER_CONFIG={path}: {error}; expected a YAML file of settings") from error
    known = [f.name for f in fields(Config)]
    if not isinstance(values, dict):
        raise ConfigError(f"FUSIONLAYER_CONFIG={path}: holds a {type(values).__name__}, expected keys: {known}")
    for key in values:
        if key not in known:
            raise ConfigError(f"FUSIONLAYER_CONFIG={path}: unknown key {key!r}; {nearest(str(key), known)}")
    return values
