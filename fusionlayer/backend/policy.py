"""Which calls of a process group are sent compressed, and how: an ordered list of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from .. import codecs, collectives
from ..base import records
from ..base.errors import ConfigError, require
from ..base.registry import nearest
from ..codecs import Codec
from ..native.wire import DTYPE_CODES, WIRE_VERSION

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")
"""The operations that rules may name; a receive follows the rule for "send"."""

_UNLESS_ASKED = ("all_gather",)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}


@dataclass(frozen=True)
class CallRule:
    """A codec for the calls that fit all conditions of the rule.

    Attributes:
        codec: registered name; "raw" leaves the calls to the native backend, bit for bit.
        options: the options of that codec.
        op: name or names of ``OPS``; None: all of them except all_gather, which may gather weights.
        group: pattern, as of file names, of the group's description or name.
        dtype: element type or types, of float32, bfloat16 and float16; None: any of them.
        min_bytes: least size of the call; None: as in the policy.
        max_bytes: largest size of the call; None: any.
        algorithm: for all_reduce the name of a collective, for reduce_scatter "ring"; None: by codec and nodes.
        error_feedback: whether callers give a residual (``hint``) with every such all_reduce. Codecs that lose most of
            a tensor need one, and are refused without it.

    Raises:
        ConfigError: a value is invalid.
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    op: str | Sequence[str] | None = None
    group: str = "*"
    dtype: str | Sequence[str] | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    algorithm: str | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        records.check(self)
        for op in _listed(self.op):
            if op not in OPS:
                raise ConfigError(f"unknown op {op!r}; {nearest(str(op), list(OPS))}")
        for dtype in _listed(self.dtype):
            if dtype not in _DTYPES:
                raise ConfigError(f"unknown dtype {dtype!r}; {nearest(str(dtype), list(_DTYPES))}")
        low, high = self.min_bytes or 0, self.max_bytes
        if low < 0 or (high is not None and high < low):
            raise ConfigError(f"min_bytes={self.min_bytes}, max_bytes={high}; expected 0 <= min <= max")
        self._check_codec()

    def _check_codec(self) -> None:
        codec = self.make_codec()
        if codec.ahead:
            raise ConfigError(
                f"codec {self.codec!r} leaves most elements out and needs error feedback, for which the group "
                "would have to know the tensors; choose a codec that sends all, or wrap the optimizer"
            )
        if codec.needs_feedback and not (self.error_feedback and self.ops == ("all_reduce",)):
            raise ConfigError(
                f"codec {self.codec!r} loses most of a tensor and needs error feedback, which a process group "
                "has only where callers give it: say so in a rule for op all_reduce, with error_feedback true, choose "
                "another codec, or wrap the optimizer"
            )
        if self.algorithm is None:
            return
        if self.passes:
            raise ConfigError(f"algorithm={self.algorithm!r} with codec 'raw', which leaves calls as they are")
        ops = set(self.ops)
        if ops == {"reduce_scatter"}:
            if self.algorithm != "ring":
                raise ConfigError(f"algorithm={self.algorithm!r} for reduce_scatter; expected 'ring' or none")
        elif ops != {"all_reduce"}:
            raise ConfigError(
                f"algorithm={self.algorithm!r} for {', '.join(self.ops)}; give it in a rule with op: all_reduce "
                "or op: reduce_scatter alone"
            )
        else:
            collectives.choose(codec, (2,), self.algorithm)

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of ``OPS`` that the rule covers."""
        return _listed(self.op) or tuple(op for op in OPS if op not in _UNLESS_ASKED)

    @property
    def passes(self) -> bool:
        """Whether the rule leaves its calls to the native backend."""
        return self.codec == "raw"

    def make_codec(self) -> Codec:
        """Return the codec, with its options."""
        return codecs.get(self.codec, **self.options)

    def concerns(self, op: str, dtype: torch.dtype) -> bool:
        """Return whether calls of ``op`` with elements of ``dtype`` fit the rule, regardless of their size."""
        wanted = _listed(self.dtype)
        return op in self.ops and dtype in DTYPE_CODES and (not wanted or str(dtype).removeprefix("torch.") in wanted)

    def spans(self, nbytes: int, threshold: int) -> bool:
        """Return whether a call of ``nbytes`` fits; ``threshold`` is the least size if the rule gives none."""
        least = threshold if self.min_bytes is None else self.min_bytes
        return least <= nbytes and (self.max_bytes is None or nbytes <= self.max_bytes)

    def is_for(self, *names: str) -> bool:
        """Return whether the rule applies to a group with one of these names."""
        return any(fnmatchcase(name, self.group) for name in names)

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("codec", "options")}
        shown = [f"{name} {value}" for name, value in given.items() if value not in (None, False, "*")]
        return f"{self.make_codec()} for {', '.join(shown) or 'every call but all_gather'}"


@dataclass(frozen=True)
class CallPolicy:
    """An ordered list of rules. The first rule that fits a call decides; a call that fits no rule passes unchanged.

    These calls always pass: calls in groups of one rank, calls with types other than float32, bfloat16 and float16,
    reductions that are neither sums nor averages, and operations that are not in ``OPS``.

    The size of a call is that of the tensor of all_reduce and send, the input of reduce_scatter, the output of
    all_gather. For all_to_all, each pair of ranks has a size: the bytes that one sends the other, times the number of
    ranks.

    Attributes:
        rules: in order.
        min_bytes: smaller calls pass, unless a rule has its own ``min_bytes``.
    """

    rules: tuple[CallRule, ...] = ()
    min_bytes: int = 16384

    def __post_init__(self) -> None:
        records.check(self)
        if self.min_bytes < 0:
            raise ConfigError(f"min_bytes={self.min_bytes}; expected a number of bytes, 0 for none")

    @classmethod
    def of(cls, source: CallPolicy | Mapping[str, Any] | str | Path | None) -> CallPolicy:
        """Return the policy that ``source`` describes: a policy, a mapping of its attributes, or a YAML file with them.

        Rules are mappings of the attributes of ``CallRule``. None means that all calls pass.

        Raises:
            ConfigError: the file cannot be read, a key is unknown, or a value is invalid.
        """
        if source is None:
            return cls()
        if isinstance(source, CallPolicy):
            return source
        if isinstance(source, Mapping):
            return records.build(cls, source, "policy")
        expected = "a fusionlayer.backend.Policy, a mapping, or the path of a YAML file"
        require(source, (str, Path), "policy", expected)
        return records.load(cls, source, "policy")

    @property
    def facts(self) -> str:
        """The text that must be equal on all ranks of a group, one rule a line."""
        rules = [f"{number}: {rule}" for number, rule in enumerate(self.rules, 1)]
        return "\n".join([*rules, f"min_bytes {self.min_bytes}, wire version {WIRE_VERSION}"])


def _listed(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
