"""Replaces methods of one of DeepSpeed's objects by functions that know more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...base.errors import ConfigError


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace ``owner.name`` so that a call of it calls ``function`` with the original method and the arguments."""
    original = getattr(owner, name, None)
    if original is None:
        import deepspeed

        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} with a {type(owner).__name__} that has no method {name.lstrip('_')!r}; "
            "fusionlayer knows DeepSpeed 0.19, and no offloading variants of ZeRO: use those, or set "
            '"gradients": "raw" in the section "fusionlayer"'
        )

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replaced)
