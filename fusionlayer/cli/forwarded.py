"""Which environment variables go to the processes on other hosts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ..base.errors import ConfigError
from ..base.job_key import FILE, KEY, looks_secret
from .spawn import without_launcher

FORWARDED = (
    *("FUSIONLAYER_*", "HOROVOD_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "HIP_*", "ROCR_*", "HSA_*", "OMP_*", "MKL_*", "KMP_*"),
    *("OPENBLAS_*", "NUMEXPR_*", "MALLOC_*", "PYTHON*", "CONDA_*", "VIRTUAL_ENV", "LC_*", "LANG", "TZ"),
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
)
"""Patterns of the variables that go to other hosts by default, except those whose names look like secrets."""

# Variables of this host or login: another host has its own, and no pattern sends them.
_OWN = (
    *("SSH_*", "XDG_*", "DBUS_*", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "SHLVL", "TERM", "DISPLAY", "HOSTNAME"),
    *("PWD", "OLDPWD", "TMPDIR", "_", "UID", "EUID", "PPID", "IFS", "BASHOPTS", "SHELLOPTS", "BASH_*"),
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATTERN = re.compile(r"[A-Za-z0-9_*]+")


def forwarded(environ: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that processes on other hosts get.

    Args:
        environ: the environment of this process.
        asked: more of them, each as NAME, as a pattern such as "WANDB_*", or as NAME=value.

    Raises:
        ConfigError: one is not set, or is no name.
    """
    here = {name: value for name, value in without_launcher(environ).items() if _NAME.fullmatch(name)}
    here.pop(KEY, None)  # the launcher sets it itself
    here.pop(FILE, None)
    others = {name: value for name, value in here.items() if not _fits(name, _OWN)}
    found = {name: value for name, value in others.items() if _fits(name, FORWARDED) and not looks_secret(name)}
    given = assigned(asked)
    for name in (text for text in asked if "=" not in text):
        if "*" in name:
            found |= {each: value for each, value in others.items() if fnmatchcase(each, name)}
        elif name in here:
            found[name] = here[name]
        else:
            raise ConfigError(f"-x {name}: this variable is not set; set it, or give -x {name}=value")
    return found | given


def assigned(asked: Sequence[str]) -> dict[str, str]:
    """Return the variables that are given as NAME=value, which processes on all hosts get.

    Raises:
        ConfigError: one of ``asked`` has none of the forms of ``forwarded``.
    """
    found = {}
    for text in asked:
        name, given, value = text.partition("=")
        if not (_NAME if given else _PATTERN).fullmatch(name):
            raise ConfigError(f"-x {text}; expected NAME, NAME=value or a pattern such as 'WANDB_*'")
        if given:
            found[name] = value
    return found


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def exports(variables: Mapping[str, str]) -> str:
    """Return lines of a shell that set environment variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items()))
