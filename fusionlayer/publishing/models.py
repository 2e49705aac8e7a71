"""The tensors of a model by name, and a version that is loaded into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError, kind_of
from ..base.plan import plain_name
from .snapshot import digest_of, identity

__all__ = ["check_model", "load", "named_tensors"]

_SHOWN = 5


def check_model(what: str, model: object) -> None:
    """Raise ``ConfigError`` unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what}: got {kind_of(model)} for a model; expected a torch.nn.Module")


def named_tensors(source: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model's state, or of a mapping, that a version holds, by name.

    Names are without the prefixes of DistributedDataParallel around the model, and of torch.compile at any depth.

    Raises:
        ConfigError: a mapping has two names that differ by such a prefix alone.
    """
    found: dict[str, Any] = {}
    for name, x in (_bare(source).state_dict() if isinstance(source, nn.Module) else source).items():
        plain = plain_name(name) if isinstance(name, str) else name
        if plain in found:
            raise ConfigError(f"publish: {name!r} and another name are both {plain!r} without torch.compile's prefix")
        found[plain] = x
    return found


def _bare(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def load(model: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy ``tensors`` into parameters and buffers of a model; nothing is written unless all fit.

    Raises:
        ConfigError: names or shapes differ, a value cannot be held by the type in the model, or a parameter is a
            DTensor.
    """
    targets = {name: x for name, x in named_tensors(model).items() if isinstance(x, Tensor)}
    problems = [f"{name!r} is missing" for name in targets.keys() - tensors.keys()]
    problems += [f"{name!r} is not in the model" for name in tensors.keys() - targets.keys()]
    for name in targets.keys() & tensors.keys():
        x, new = targets[name], tensors[name]
        if type(x).__name__ == "DTensor":
            problems.append(f"{name!r} is a DTensor, of which this rank has a part: take tensors() and cut them")
        elif x.shape != new.shape:
            problems.append(f"{name!r} has the shape {list(new.shape)}, and {list(x.shape)} in the model")
        elif not _holds(x.dtype, new):
            problems.append(f"{name!r} has values of {new.dtype} that {x.dtype} in the model cannot hold")
    problems += _untied(targets, tensors)
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = ", ".join(sorted(problems)[:_SHOWN])
        raise ConfigError(f"{what} does not fit the model: {shown}{more}; load it into a model like the publisher's")
    with torch.no_grad():
        for name, x in targets.items():
            x.copy_(tensors[name])


def _holds(kind: torch.dtype, x: Tensor) -> bool:
    """Return whether ``x`` can be converted to ``kind``: floats may be rounded, integers keep their value."""
    if kind == x.dtype or kind.is_complex:
        return True
    if kind.is_floating_point:
        return not x.is_complex()
    if x.is_complex() or x.is_floating_point():
        return False
    return torch.equal(
        x.to(kind).to(torch.int64), x.to(torch.int64)
    )  # in one type, as uint8 and int8 wrap around alike


def _untied(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a text for each tensor that is another one's in the model, and has other bits in the version."""
    first: dict[tuple[object, ...], str] = {}
    found = []
    for name in targets.keys() & tensors.keys():
        other = first.setdefault(identity(targets[name]), name) if targets[name].numel() else name
        a, b = tensors[other], tensors[name]
        if a is not b and (a.dtype != b.dtype or digest_of(a) != digest_of(b)):
            found.append(f"{min(name, other)!r} and {max(name, other)!r} differ, and are one tensor in the model")
    return found
