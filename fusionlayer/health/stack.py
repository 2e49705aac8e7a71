"""The position and activity of a thread in the user's program, from its stack alone."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_COLLECTIVES = tuple(
    _TORCH + name for name in ("distributed/distributed_c10d.py", "distributed/_functional_collectives")
)
_LOADER = _TORCH + "utils/data/dataloader.py"
_BACKWARD = _TORCH + "autograd/graph.py"
_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
# Functions of these files that every call passes, and that say nothing.
_HELPERS = ("wrapper", "inner", "_coalescing_manager", "__exit__")


class Line(NamedTuple):
    """The position of a thread in the program.

    Attributes:
        doing: what it does, as a clause.
        where: line of the program, such as "train.py:31".
        peer: the rank that a ``send`` or ``recv`` waits for; None: it is in none.
    """

    doing: str
    where: str
    peer: int | None = None


def of_thread(thread: int) -> Line:
    """Return where the thread with this identifier is; an empty line if it has ended."""
    frames = _frames(thread)
    if not frames:
        return Line("", "")
    doing, peer = "is", None
    for each in frames:  # the outermost call counts: broadcast_object_list, and not the broadcast within it
        file, name = each.f_code.co_filename, each.f_code.co_name
        if file.startswith(_COLLECTIVES) and name not in _HELPERS:
            doing = f"is in {name}"
            peer = _peer(each) if name in ("send", "recv") else None
        elif file == _LOADER and name == "__next__":
            doing = "waits for data"
        elif file == _BACKWARD and doing == "is":
            doing = "is in backward"
    return Line(doing, of_frames((each.f_code.co_filename, each.f_lineno) for each in frames), peer)


def of_frames(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the user's program among file names and line numbers, from inside out."""
    second = ""
    for file, number in frames:
        if file.startswith((_TORCH, _OURS)) or file.startswith("<"):
            continue
        if not file.startswith(_OTHERS):
            return line_of(file, number)
        second = second or line_of(file, number)
    return second


def line_of(file: str, number: int) -> str:
    """Return a line as people name it, such as "train.py:31"."""
    return f"{_short(file)}:{number}"


@lru_cache(maxsize=256)
def _short(file: str) -> str:
    """Return a file name relative to the working directory, or its last two parts."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(Path(*path.parts[-2:]))


def _frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, from inside out; none if it has ended.

    The thread may run. Each step makes an object for a frame of the interpreter, under the GIL. In Python 3.11, to
    make an object can begin a collection of garbage. Its destructors can release the GIL, the thread returns from the
    frame, and the new object refers to memory that is free. So nothing is collected meanwhile. Without the GIL nothing
    keeps the thread in its frames, so they are not read.
    """
    if not _HAS_GIL:
        return []
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames
    finally:
        if collects:
            gc.enable()


def _peer(frame: FrameType) -> int | None:
    """Return the global rank in the arguments of ``send`` or ``recv``."""
    given = frame.f_locals.get("dst", frame.f_locals.get("src"))
    return given if type(given) is int else None
