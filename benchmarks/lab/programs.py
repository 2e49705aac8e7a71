"""Finds the system's programs where the PATH of an ordinary user does not look."""

from __future__ import annotations

import os

__all__ = ["search_system_folders"]

_FOLDERS = ("/usr/sbin", "/sbin")


def search_system_folders() -> None:
    """Append /usr/sbin and /sbin, where Debian has ``ip`` and ``tc``, to the PATH of this process and its children."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*path, *(folder for folder in _FOLDERS if folder not in path)])
