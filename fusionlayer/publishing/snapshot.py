"""All tensors of one version at one moment, with digests that identify them at every end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import ConfigError, kind_of
from .tensors import memory

__all__ = ["Box", "Shard", "Snapshot", "check_tensor", "copied", "digest_of", "identity", "tied"]

_DIGEST_BYTES = 16

Box = tuple[tuple[int, int], ...]
"""Start and length in each dimension of a tensor."""


class Shard(NamedTuple):
    """Where a tensor lies in the whole one, of which other ranks have the rest.

    Attributes:
        box: what this one is of it.
        shape: of the whole tensor.
    """

    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The tensors of one version by name, on the CPU and contiguous. Nobody changes them.

    Tensors that are tied are one object under several names.

    Attributes:
        run: identifies the publisher that made it, from its start to its end.
        version: number of the version; each is larger than the one before in the same run.
        tensors: by name.
        shards: of the tensors that are parts of whole ones, where they lie in them.
        places: addresses where other ranks publish the other parts, if this one is rank 0's.
    """

    run: str
    version: int
    tensors: Mapping[str, Tensor]
    shards: Mapping[str, Shard] = field(default_factory=dict)
    places: tuple[str, ...] = ()

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each tensor, by name. The first look takes a pass over all bytes."""
        found: dict[int, str] = {}
        for x in self.tensors.values():
            if id(x) not in found:
                found[id(x)] = digest_of(x)
        return {name: found[id(x)] for name, x in self.tensors.items()}

    @cached_property
    def digest(self) -> str:
        """The digest of all names and tensors: two versions are equal if their digests are, whatever made them."""
        text = json.dumps(sorted(self.digests.items()))
        return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES].hex()


def digest_of(x: Tensor) -> str:
    """Return the digest of a tensor's type, shape and bytes: 16 bytes of SHA-256, as 32 digits."""
    seen = hashlib.sha256(f"{x.dtype} {list(x.shape)}\n".encode())
    seen.update(memory(x.view(-1)))
    return seen.digest()[:_DIGEST_BYTES].hex()


def copied(x: Tensor) -> Tensor:
    """Return a contiguous copy of ``x`` on the CPU, with the same bits; ``x`` may be on any device."""
    with torch.no_grad(), torch.inference_mode(False):
        return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)


def identity(x: Tensor) -> tuple[object, ...]:
    """Return the common key of tied tensors: one memory, seen in one way."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


def check_tensor(name: object, x: object) -> None:
    """Raise ``ConfigError`` unless ``x`` is a tensor that a version can hold, by a name that it can have."""
    if not isinstance(name, str):
        raise ConfigError(f"publish: a tensor's name is {name!r}; expected a text")
    if not isinstance(x, Tensor):
        raise ConfigError(f"publish: {name!r} is {kind_of(x)}; expected tensors alone: publish a mapping without it")
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        what = "quantized" if x.is_quantized else "on no device" if x.is_meta else f"a tensor of {x.layout}"
        raise ConfigError(f"publish: {name!r} is {what}; expected dense tensors: publish a mapping without it")


def tied(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return, for each name whose tensor an earlier name has too, that earlier name."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, x in named:
        if first.setdefault(id(x), name) != name:
            names[name] = first[id(x)]
    return names
