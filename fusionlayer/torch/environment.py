"""Settings from Horovod's environment variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..base import config
from ..base.errors import ConfigError
from ..coordination import Patience

VARIABLES: Mapping[str, str] = {
    "HOROVOD_FUSION_THRESHOLD": "bytes of small tensors that are sent as one message; 8 MiB without it",
    "HOROVOD_CACHE_CAPACITY": "names that ranks remember of each other; 4096 without it",
    "HOROVOD_STALL_CHECK_DISABLE": "1: no warning when ranks wait for others",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "seconds of waiting until that warning; `stall_warning` without it",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "seconds of waiting for ranks (rank 0, too) until all fails; 0: never",
    "HOROVOD_TIMELINE": "file for a timeline, `.<rank>` appended; DYNAMIC: none before `start_timeline`",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "as `timeout`",
    "HOROVOD_ELASTIC_TIMEOUT": "seconds that ranks wait for each other after a failure before asking for a restart; 30",
    "HOROVOD_LOG_LEVEL": "trace, debug, info, warning, error or fatal, of the logger `fusionlayer`",
}
"""Horovod's variables that have an effect here, and which. fusionlayer's own variables and file win over them."""

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


@dataclass(frozen=True)
class Settings:
    """Settings of a job that uses Horovod's interface.

    Attributes:
        job: settings of every entry point.
        fusion_bytes: most bytes of tensors that are sent as one message of direct operations.
        cache_capacity: number of names that ranks remember of each other.
        patience: seconds that ranks wait for a rank that does not call an operation that the others have called.
    """

    job: config.Config
    fusion_bytes: int
    cache_capacity: int
    patience: Patience


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of this process. The level of the logger is set, too.

    Raises:
        ConfigError: a variable has a value that cannot be used.
    """
    job = config.load(environ)
    untouched = config.Config()
    found: dict[str, Any] = {}
    stall = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", job.stall_warning)
    if stall > 0 and job.stall_warning == untouched.stall_warning:
        found["stall_warning"] = stall
    if job.timeout == untouched.timeout:
        found["timeout"] = _number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", job.timeout)
    timeline = environ.get("HOROVOD_TIMELINE", "")
    if timeline and timeline != "DYNAMIC" and job.timeline is None:
        found["timeline"] = timeline
    job = replace(job, **found)
    level = environ.get("HOROVOD_LOG_LEVEL", "").lower()
    if level:
        if level not in _LEVELS:
            raise ConfigError(f"HOROVOD_LOG_LEVEL={level!r}; expected one of: {', '.join(_LEVELS)}")
        logging.getLogger("fusionlayer").setLevel(_LEVELS[level])
    limit = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)
    silent = is_set(environ, "HOROVOD_STALL_CHECK_DISABLE")
    return Settings(
        job,
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 8 << 20)),
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", 4096)),
        patience=Patience(None if silent else job.stall_warning, limit if limit > 0 and not silent else None),
    )


def elastic_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that ranks wait for each other after a failure, before they ask their agent for a restart."""
    return _number(environ, "HOROVOD_ELASTIC_TIMEOUT", 30)


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable of Horovod's is set to something else than 0."""
    return environ.get(name, "") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name)
    if given is None:
        return default
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if number < 0:
        raise ConfigError(f"{name}={given!r}; expected a number of at least 0: {VARIABLES[name]}")
    return number
