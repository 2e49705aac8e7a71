"""The one way to warn that a name of fusionlayer is deprecated. docs/compatibility.md has the policy."""

from __future__ import annotations

import warnings


def deprecated(old: str, instead: str, *, gone: str | None = None, frames: int = 1) -> None:
    """Warn the user whose code uses ``old``, by a ``DeprecationWarning`` at that line.

    Args:
        old: the deprecated name, as users write it.
        instead: the replacement, as an imperative: "give groups=<number>".
        gone: the first version that may lack it; None: it stays, since another library has this name too.
        frames: functions of fusionlayer between the user's line and this function.
    """
    when = "" if gone is None else f" and may go in {gone}"
    warnings.warn(f"{old} is deprecated{when}; {instead}", DeprecationWarning, stacklevel=frames + 2)
