"""The section ``"fusionlayer"`` of a DeepSpeed configuration: what it may say, and what it means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ... import codecs, collectives
from ...backend import CallPolicy
from ...backend.policy import CallRule
from ...codecs import Codec
from ...errors import ConfigError
from ...registry import nearest

__all__ = ["KEY", "ROUTERS", "DeepSpeedSection", "RoleCodec"]

KEY = "fusionlayer"
AUTO = "auto"
RAW = "raw"

ROUTERS = ("*.gate.wg.weight", "*.gate.weight", "*router*")
"""Names of the routers of DeepSpeed's own MoE layer, and of those in Hugging Face's models."""


@dataclass(frozen=True)
class RoleCodec:
    """What carries the tensors of one role.

    Attributes:
        codec: registered name; "raw" leaves them as they are.
        options: of that codec.
        algorithm: collective of all-reduces; None chooses by codec and number of ranks.
        min_bytes: smaller tensors travel as they are; of an all-gather what all ranks get counts.
    """

    codec: str = RAW
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str | None = None
    min_bytes: int = 16384

    @property
    def compresses(self) -> bool:
        """Whether anything but the elements themselves travels."""
        return self.codec != RAW

    def make(self) -> Codec:
        """Return the codec."""
        return codecs.get(self.codec, **self.options)


@dataclass(frozen=True)
class DeepSpeedSection:
    """What the section says, every "auto" resolved.

    Attributes:
        enabled: False: DeepSpeed runs as if there were no section.
        gradients: all-reduces and reduce-scatters.
        weights: all-gathers of ZeRO 1 to 3.
        activations: what pipeline stages send each other, in both directions, and all-to-alls of experts.
        exempt: patterns of parameter names, as of file names, whose gradients travel as they are.
        error_feedback: send what the codec lost with the next gradient.
        warmup_steps: optimizer steps at the beginning whose gradients travel as they are.
    """

    enabled: bool = True
    gradients: RoleCodec = RoleCodec("int8")
    weights: RoleCodec = RoleCodec()
    activations: RoleCodec = RoleCodec()
    exempt: tuple[str, ...] = ROUTERS
    error_feedback: bool = False
    warmup_steps: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeepSpeedSection | None:
        """Return the section of a whole DeepSpeed configuration; None if it has none.

        Raises:
            ConfigError: an unknown key, a value of the wrong kind, or one that the rest of the configuration forbids.
        """
        if KEY not in config:
            return None
        given = config[KEY]
        _known(given, (*(f.name for f in fields(cls)), "zero_plus_plus", "one_bit"), "")
        values = {key: value for key, value in given.items() if value != AUTO}
        stage = _stage(config)
        enabled = _read(values, "enabled", bool, True)
        plus, one_bit = (_read(values, key, bool, False) for key in ("zero_plus_plus", "one_bit"))
        if plus and one_bit:
            raise _error("zero_plus_plus and one_bit are both true; they are two ways to send gradients: choose one")
        if one_bit and stage == 3:
            raise _error("one_bit is true with ZeRO stage 3; signs need error feedback, which stages 0 to 2 have")
        gradients = _traffic(values, "gradients", "int4" if plus else "onebit" if one_bit else "int8")
        weights = _traffic(values, "weights", "int8" if plus else RAW)
        activations = _traffic(values, "activations", RAW)
        warmup = _read(values, "warmup_steps", int, 100 if one_bit else 0)
        if warmup < 0:
            raise _error(f"warmup_steps={warmup}; expected 0 or more")
        section = cls(
            enabled,
            gradients,
            weights,
            activations,
            _patterns(values),
            _feedback(values, gradients, stage),
            warmup,
        )
        if enabled:
            _check(section, config, stage)
        return section

    @property
    def digest(self) -> bytes:
        """32 bytes that are equal where sections are."""
        return hashlib.sha256(repr(self).encode()).digest()

    @property
    def policy(self) -> CallPolicy:
        """The rules of the backend: what it sees of a tensor's role is the operation."""
        with_residuals = self.error_feedback and self.gradients.make().needs_feedback
        roles = (
            (("all_reduce",) if with_residuals else ("all_reduce", "reduce_scatter"), self.gradients),
            (("all_gather",), self.weights),
            (("all_to_all", "send"), self.activations),
        )
        return CallPolicy(
            tuple(
                CallRule(
                    traffic.codec,
                    traffic.options,
                    op,
                    min_bytes=traffic.min_bytes,
                    algorithm=traffic.algorithm if op == "all_reduce" else None,
                    error_feedback=with_residuals and op == "all_reduce",
                )
                for ops, traffic in roles
                if traffic.compresses
                for op in ops
            )
        )


def _error(text: str) -> ConfigError:
    return ConfigError(f'section "{KEY}" of the DeepSpeed configuration: {text}')


def _known(values: object, known: Sequence[str], where: str) -> None:
    if not isinstance(values, Mapping):
        raise _error(f"{where or KEY}={values!r} is a {type(values).__name__}; expected keys and values")
    for key in values:
        if key not in known:
            raise _error(f"unknown key {f'{where}.' * bool(where)}{key!r}; {nearest(str(key), list(known))}")


def _read(values: Mapping[str, Any], key: str, kind: type, default: Any, where: str = "") -> Any:
    value = values.get(key, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _error(
            f'{where}{key}={value!r} is a {type(value).__name__}; expected {_WORDS[kind]}, or "auto" for {default!r}'
        )
    return value


_WORDS = {bool: "true or false", int: "a whole number", str: "a name", Mapping: "keys and values"}


def _traffic(values: Mapping[str, Any], role: str, default: str) -> RoleCodec:
    given = values.get(role, {})
    if isinstance(given, str):
        given = {"codec": given}
    if not isinstance(given, Mapping):
        raise _error(
            f"{role}={given!r} is a {type(given).__name__}; expected a codec's name, or keys and values with 'codec'"
        )
    _known(given, [f.name for f in fields(RoleCodec)], role)
    given = {key: value for key, value in given.items() if value != AUTO}
    where = f"{role}."
    algorithm = given.get("algorithm")
    if algorithm is not None and role != "gradients":
        raise _error(f"{where}algorithm={algorithm!r}; only all-reduces of gradients have a choice: leave it out")
    if algorithm is not None and algorithm not in collectives.names():
        raise _error(f"{where}algorithm={algorithm!r}; {nearest(str(algorithm), collectives.names())}")
    traffic = RoleCodec(
        _read(given, "codec", str, default, where),
        _read(given, "options", Mapping, {}, where),
        algorithm,
        _read(given, "min_bytes", int, RoleCodec.min_bytes, where),
    )
    if traffic.min_bytes < 0:
        raise _error(f"{where}min_bytes={traffic.min_bytes}; expected 0 or more")
    try:
        if traffic.compresses:
            # Which refuses what no process group can carry.
            CallRule(traffic.codec, traffic.options, "all_reduce", error_feedback=role == "gradients")
    except ConfigError as error:
        raise _error(f"{role}: {error}") from None
    return traffic


def _patterns(values: Mapping[str, Any]) -> tuple[str, ...]:
    given = values.get("exempt", ROUTERS)
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise _error(f"exempt={given!r}; expected a list of patterns of parameter names, such as {list(ROUTERS)}")
    return tuple(given)


def _stage(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _feedback(values: Mapping[str, Any], gradients: RoleCodec, stage: int) -> bool:
    codec = gradients.make()
    wanted: bool = _read(values, "error_feedback", bool, codec.feedback_pays and stage < 3)
    if wanted and stage == 3:
        raise _error(
            "error_feedback=true with ZeRO stage 3, whose ranks would each keep an f32 copy of all gradients; leave it "
            "out, and choose a codec that does without, such as int4 with its rotation"
        )
    return wanted and not codec.lossless


def _check(section: DeepSpeedSection, config: Mapping[str, Any], stage: int) -> None:
    """Refuse what DeepSpeed's own keys make impossible or send twice compressed."""
    given = config.get("zero_optimization")
    zero: Mapping[str, Any] = given if isinstance(given, Mapping) else {}

    def on(key: str, default: bool = False) -> bool:
        value = zero.get(key, default)
        return default if value == AUTO else bool(value)

    gradients, weights = section.gradients, section.weights
    if gradients.make().needs_feedback and not section.error_feedback:
        raise _error(
            f"gradients travel by {gradients.codec!r}, which loses most of them, without error_feedback, which ZeRO "
            "stages 0 to 2 have: set it, or choose another codec"
        )
    if weights.compresses and stage == 0:
        raise _error(f"weights travel by {weights.codec!r}, but only ZeRO 1 to 3 send weights: set a stage, or 'raw'")
    if gradients.compresses and stage in (1, 2) and not on("use_multi_rank_bucket_allreduce", True):
        raise _error(
            "zero_optimization.use_multi_rank_bucket_allreduce=false sends gradients by a reduce to each rank, which "
            "is not compressed; leave it out"
        )
    if gradients.compresses and stage == 3 and on("stage3_use_all_reduce_for_fetch_params"):
        raise _error(
            "zero_optimization.stage3_use_all_reduce_for_fetch_params=true sums weights, which cannot be told from "
            "gradients; leave it out"
        )
    for role, traffic in (("gradients", gradients), ("weights", weights)):
        if traffic.compresses and on(f"zero_quantized_{role}"):
            raise _error(
                f"{role} travel by {traffic.codec!r} and zero_optimization.zero_quantized_{role} is true; one of the "
                "two: leave the latter out"
            )
