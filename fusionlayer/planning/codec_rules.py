"""Rules that choose a codec for each gradient, with a reason. A file of them is a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import codecs
from ..base import records
from ..base.errors import ConfigError
from ..base.plan import TensorInfo
from ..base.registry import nearest
from ..codecs import Codec
from .fidelities import AUTO, FIDELITIES, LOCAL

__all__ = ["AUTO", "FIDELITIES", "LOCAL", "CodecChoice", "CodecRules", "CodecRule", "Sending"]

NEAR_LOSSLESS_ERROR = 1e-4
"""Largest share of a Gaussian tensor's energy that a near-lossless codec may change."""
_SAMPLE = 1 << 16


class Sending(NamedTuple):
    """A codec, and the collective that sends its messages; None: the one that an engine takes."""

    codec: Codec
    algorithm: str | None = None


SecondsAlone = Callable[[Sending, TensorInfo], float]


@dataclass(frozen=True)
class CodecRule:
    """A codec for the tensors that meet all conditions.

    Attributes:
        codec: registered name, or "auto": of the codecs that the fidelity allows, the fastest by the cost model.
        options: the options of that codec; none for "auto".
        match: pattern of the tensor's name, as for file names.
        min_numel: least number of elements.
        dtype: element type, as "float32"; None: any.
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    match: str = "*"
    min_numel: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        records.check(self)
        if self.codec != AUTO:
            codecs.get(self.codec, **self.options)
        elif self.options:
            raise ConfigError(f"codec 'auto' takes no options, got {dict(self.options)}")

    def fits(self, tensor: TensorInfo) -> bool:
        """Return whether the rule is for this tensor."""
        return (
            fnmatchcase(tensor.name, self.match)
            and tensor.numel >= self.min_numel
            and self.dtype in (None, tensor.dtype)
        )

    def __str__(self) -> str:
        conditions = [f"match {self.match!r}"] if self.match != "*" else []
        conditions += [f"at least {self.min_numel} elements"] if self.min_numel else []
        conditions += [self.dtype] if self.dtype else []
        return ", ".join(conditions) or "every tensor"


@dataclass(frozen=True)
class CodecChoice:
    """The codec of a tensor, the reason, whether "auto" chose it by costs, and the collective; None: as usual."""

    codec: Codec
    reason: str
    auto: bool = False
    algorithm: str | None = None


@dataclass(frozen=True)
class CodecRules:
    """An ordered list of rules; the first that fits a tensor names its codec.

    Attributes:
        rules: in order.
        fidelity: which codecs "auto" may choose. "lossless": codecs that change no bit; "near_lossless": also codecs
            that change at most 1e-4 of a Gaussian tensor's energy, as rounding to 8 or 16 bits does; "aggressive": all;
            "local": all, and `fusionlayer plan` prints how often to exchange.
    """

    rules: tuple[CodecRule, ...]
    fidelity: str = "near_lossless"

    def __post_init__(self) -> None:
        records.check(self)
        if self.fidelity not in FIDELITIES:
            raise ConfigError(f"fidelity={self.fidelity!r}; {nearest(self.fidelity, [*FIDELITIES])}")

    @classmethod
    def from_yaml(cls, path: str | Path) -> CodecRules:
        """Read a policy from a file with ``fidelity`` and ``rules``.

        Raises:
            ConfigError: the file is not a valid policy.
        """
        return records.load(cls, path, "policy")

    def choose(self, tensor: TensorInfo, candidates: Mapping[str, Sending], seconds: SecondsAlone) -> CodecChoice:
        """Return the codec of a tensor.

        Args:
            tensor: the gradient.
            candidates: codecs that "auto" chooses from, each with a collective, by name.
            seconds: returns how long a tensor takes with one of them when it is sent alone.

        Raises:
            ConfigError: no rule fits, or the fidelity allows none of the candidates.
        """
        index, rule = self.rule_for(tensor)
        if rule.codec != AUTO:
            return CodecChoice(codecs.get(rule.codec, **rule.options), f"rules[{index}]: {rule}")
        allowed = {name: each for name, each in candidates.items() if self._allows(each.codec)}
        if not allowed:
            raise ConfigError(
                f"policy: 'auto' may choose only {self.fidelity} codecs; candidates: {', '.join(candidates) or 'none'}"
            )
        taken = {name: seconds(each, tensor) for name, each in allowed.items()}
        best, *others = sorted(taken, key=lambda name: (taken[name], name))
        beaten = f", {others[0]} {taken[others[0]] * 1e3:.2f} ms" if others else ""
        reason = f"rules[{index}]: auto, {self.fidelity}: {best} takes {taken[best] * 1e3:.2f} ms alone{beaten}"
        return CodecChoice(allowed[best].codec, reason, auto=True, algorithm=allowed[best].algorithm)

    def rule_for(self, tensor: TensorInfo) -> tuple[int, CodecRule]:
        """Return the first rule that fits a tensor, and its index; ``ConfigError`` if none fits."""
        for index, rule in enumerate(self.rules):
            if rule.fits(tensor):
                return index, rule
        raise ConfigError(f"policy: no rule fits {tensor.name!r} ({tensor.numel} elements); end with a rule for all")

    def allowed(self, candidates: Mapping[str, Codec]) -> dict[str, Codec]:
        """Return the candidates that the fidelity allows."""
        return {name: codec for name, codec in candidates.items() if self._allows(codec)}

    def _allows(self, codec: Codec) -> bool:
        if self.fidelity in ("aggressive", LOCAL):
            return True
        if codec.lossless or self.fidelity == "lossless":
            return codec.lossless
        return _error(codec.bare) <= NEAR_LOSSLESS_ERROR


@lru_cache
def _error(codec: Codec) -> float:
    """Return the vNMSE of a codec: the energy of its error on a Gaussian tensor, divided by the tensor's energy."""
    x = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0), device="cpu")
    kept = codec.decompress(codec.compress(x), _SAMPLE)
    return float((kept - x).square().sum() / x.square().sum())
