"""Describes the machine on which a profile was measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import sys
from pathlib import Path

import torch

from ...base.errors import ConfigError


def cpu_name() -> str:
    """Return the name of this machine's processor, as far as the system reports it."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", info, re.MULTILINE))
    if "EPYC" in fields.get("model name", ""):
        generation = {"25": "4" if int(fields["model"]) >= 16 else "3", "26": "5"}.get(fields["cpu family"])
        return f"{fields['model name']} Zen {generation}" if generation else fields["model name"]
    return fields.get("model name", platform.machine())


def device_name(device: torch.device) -> str:
    """Return the name of the processor that a device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def describe_machine(hardware: str | None = None) -> dict[str, str]:
    """Return hardware, load, versions, command and date, for a profile's ``environment``."""
    return {
        "hardware": hardware or cpu_name(),
        "load": f"{os.getloadavg()[0]:.2f}",
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def file_name(theme: str, environment: dict[str, str]) -> str:
    """Return ``<theme>_<hardware>_<date>``; other characters than letters and digits become hyphens."""
    words = [re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (theme, environment["hardware"])]
    if not all(words):
        raise ConfigError(f"no file name can be made of {theme!r} and {environment['hardware']!r}; name the hardware")
    return "_".join([*words, environment["date"]])
