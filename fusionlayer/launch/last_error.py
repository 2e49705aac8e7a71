"""Leaves the error that ends this process where torchrun looks for it: so the launcher knows whose was the first."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave_to_launcher() -> None:
    """Write an uncaught exception into torchrun's file for this process, in the form of ``elastic``'s ``record``."""
    if os.environ.get(_VARIABLE) and getattr(sys.excepthook, "func", None) is not _write:
        sys.excepthook = partial(_write, sys.excepthook)


def _write(show: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    lines = "".join(traceback.format_exception(kind, error, trace))
    about = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    with suppress(OSError, KeyError), open(os.environ[_VARIABLE], "w") as file:
        json.dump({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": about}}, file)
    show(kind, error, trace)
