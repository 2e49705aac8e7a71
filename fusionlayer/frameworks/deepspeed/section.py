"""The section ``"fusionlayer"`` of a DeepSpeed configuration: its keys, their checks, and the resulting policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ... import codecs, collectives
from ...backend import CallPolicy
from ...backend.policy import CallRule
from ...base import records
from ...base.errors import ConfigError
from ...base.registry import nearest
from ...codecs import Codec
from ...scheduler.memory import FEEDBACK_BITS
from ...training.weights import NAMES, PRESETS, Weights, both_ways
from . import one_bit

KEY = "fusionlayer"
AUTO = "auto"
RAW = "raw"
ROLES = ("gradients", "weights", "activations")
_WHERE = f'section "{KEY}" of the DeepSpeed configuration'

ROUTERS = ("*.gate.wg.weight", "*.gate.weight", "*router*")
"""Names of the routers of DeepSpeed's own MoE layer, and of those in Hugging Face's models."""


@dataclass(frozen=True)
class RoleCodec:
    """The codec and collective for the tensors of one role.

    Attributes:
        codec: registered name; "raw" sends tensors uncompressed. For weights also "qwd", "qw" or "qwz".
        options: the options of that codec.
        algorithm: collective of all-reduces; None chooses by codec and nodes.
        min_bytes: smaller tensors are sent uncompressed. For an all-gather, the size of the output counts.
    """

    codec: str = RAW
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str | None = None
    min_bytes: int = 16384

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise ConfigError(f"min_bytes={self.min_bytes}; expected 0 or more")

    @property
    def compresses(self) -> bool:
        """Whether tensors are sent as messages of a codec other than "raw"."""
        return self.codec != RAW

    @property
    def registered(self) -> tuple[str, Mapping[str, Any]]:
        """The registered name of the codec, and its options, also where ``codec`` is a name for weights."""
        return NAMES.get(self.codec, (self.codec, self.options))

    def make(self) -> Codec:
        """Return the codec."""
        name, options = self.registered
        return codecs.get(name, **options)


@dataclass(frozen=True)
class DeepSpeedSection:
    """The values of the section, with every "auto" resolved.

    Attributes:
        enabled: if False, DeepSpeed runs as if there were no section.
        gradients: all-reduces and reduce-scatters.
        weights: all-gathers of ZeRO 1 to 3.
        activations: messages between pipeline stages, in both directions, and all-to-alls of experts.
        exempt: patterns of parameter names, in the style of file names; gradients of these are sent uncompressed.
        error_feedback: add the codec's loss to the next step's gradient.
        feedback_bits: bits that an element of it takes between two steps, 32 or 8.
        warmup_steps: number of first optimizer steps whose gradients are sent uncompressed.
    """

    enabled: bool = True
    gradients: RoleCodec = RoleCodec("int8")
    weights: RoleCodec = RoleCodec()
    activations: RoleCodec = RoleCodec()
    exempt: tuple[str, ...] = ROUTERS
    error_feedback: bool = False
    feedback_bits: int = 32
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.feedback_bits not in FEEDBACK_BITS:
            raise ConfigError(f"feedback_bits={self.feedback_bits}; expected 32 or 8")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps={self.warmup_steps}; expected 0 or more")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeepSpeedSection | None:
        """Return the section of a whole DeepSpeed configuration; None if it has none.

        A configuration that asks for the optimizer "OneBitAdam" has one, with defaults alone if none is written.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or does not fit the rest of the configuration.
        """
        momentum = one_bit.options_of(config) is not None
        if KEY not in config and not momentum:
            return None
        filled = _filled(config.get(KEY, {}), momentum)
        written = records.build(_Written, filled, _WHERE)
        stage = _stage(config)
        if written.zero_plus_plus and written.one_bit:
            raise _error("zero_plus_plus and one_bit are both true; they are two ways to send gradients: choose one")
        if written.one_bit and stage == 3:
            raise _error("one_bit is true with ZeRO stage 3; signs need error feedback, which stages 0 to 2 have")
        for role in ROLES:
            _check_role(role, getattr(written, role))
        section = cls(**{f.name: getattr(written, f.name) for f in fields(cls)})
        section = replace(section, error_feedback=_feedback(filled, section, stage))
        if section.enabled:
            _check(section, config, stage)
        if momentum:
            _check_momentum(section, stage)
        return section

    @property
    def differences(self) -> Codec | None:
        """The codec of differences of weights; None: whole weights are sent."""
        named = self.weights.codec in NAMES
        way = Weights.of(self.weights.codec if named else self.weights.make())
        return way.codec if way.differences else None

    @property
    def policy(self) -> CallPolicy:
        """The policy of the backend. It cannot see a tensor's role, so its rules distinguish roles by the operation."""
        with_residuals = self.error_feedback and self.gradients.make().needs_feedback
        roles = (
            (("all_reduce",) if with_residuals else ("all_reduce", "reduce_scatter"), self.gradients),
            # Differences are no rule's: only gathers into a copy can send them, and a hint marks these.
            (() if self.differences else ("all_gather",), self.weights),
            (("all_to_all", "send"), self.activations),
        )
        return CallPolicy(
            tuple(
                CallRule(
                    *traffic.registered,
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


@dataclass(frozen=True)
class _Written(DeepSpeedSection):
    """The section as the user wrote it, with the presets, which set defaults of other keys."""

    zero_plus_plus: bool = False
    one_bit: bool = False


def _error(text: str) -> ConfigError:
    return ConfigError(f"{_WHERE}: {text}")


def _filled(given: object, momentum: bool) -> object:
    """Return the section with the defaults that depend on its presets, and without keys that are "auto"."""
    if not isinstance(given, Mapping):
        return given
    values = _without_auto(given)
    said = {role: _as_role(values.get(role, {})) for role in ROLES}
    named = {role: each.get("codec") for role, each in said.items() if isinstance(each, Mapping)}
    preset = named.get("weights") in PRESETS
    try:
        weights, gradients = both_ways(named.get("weights"), named.get("gradients"), default=None)
    except ConfigError as error:
        raise _error(str(error)) from None
    if values.get("zero_plus_plus"):
        plus = PRESETS["zero++"]
        weights, gradients, preset = weights or plus[0], gradients or plus[1], True
    signs = bool(values.get("one_bit"))
    chosen = {"weights": weights or RAW, "gradients": gradients or ("onebit" if signs or momentum else "int8")}
    for role, each in said.items():
        values[role] = {**each, "codec": chosen.get(role, each.get("codec", RAW))} if role in named else each
    defaults = {"warmup_steps": 100 if signs and not momentum else 0}
    # Neither system has error feedback.
    return {**defaults, **({"error_feedback": False} if preset else {}), **values}


def _as_role(said: object) -> Any:
    """Return keys and values of a role without "auto", if ``said`` is a codec's name or keys and values."""
    said = {"codec": said} if isinstance(said, str) else said
    return _without_auto(said) if isinstance(said, Mapping) else said


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != AUTO}


def _check_role(role: str, traffic: RoleCodec) -> None:
    if (algorithm := traffic.algorithm) is not None:
        where = f"{role}.algorithm={algorithm!r}"
        if role != "gradients":
            raise _error(f"{where}; only all-reduces of gradients have a choice: leave it out")
        if not collectives.knows(algorithm):
            raise _error(f"{where}; {nearest(algorithm, collectives.names())}")
    if traffic.codec in NAMES:
        if role != "weights":
            raise _error(f"{role}: {traffic.codec!r} is a way to send weights; choose a codec, such as 'int4'")
        if traffic.options:
            name, options = traffic.registered
            raise _error(
                f"weights: {traffic.codec!r} has no options: it is {name!r} with {dict(options)}; leave options out"
            )
    try:
        if traffic.compresses:
            # The rule's own checks refuse codecs that no process group can use.
            feedback = role == "gradients"
            CallRule(*traffic.registered, "all_reduce", algorithm=traffic.algorithm, error_feedback=feedback)
    except ConfigError as error:
        raise _error(f"{role}: {error}") from None


def _stage(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _feedback(filled: Any, section: DeepSpeedSection, stage: int) -> bool:
    codec = section.gradients.make()
    said = "error_feedback" in filled
    wanted = section.error_feedback if said else codec.feedback_pays and stage < 3
    if wanted and stage == 3:
        raise _error(
            "error_feedback=true with ZeRO stage 3, whose ranks would each keep an f32 copy of all gradients; leave it "
            "out, and choose a codec that does without, such as int4 with its rotation"
        )
    return wanted and not codec.lossless


def _check_momentum(section: DeepSpeedSection, stage: int) -> None:
    """Raise ``ConfigError`` if the section does not fit an optimizer that sends momentum."""
    if not section.enabled:
        raise _error(
            'enabled=false, and the optimizer is "OneBitAdam", which DeepSpeed has dropped in 0.19.7; leave enabled '
            'out, or choose "Adam"'
        )
    if stage:
        raise _error(
            f'the optimizer is "OneBitAdam" with ZeRO stage {stage}; each rank needs whole gradients and momenta: set '
            "stage 0"
        )
    if section.warmup_steps:
        raise _error(
            f'warmup_steps={section.warmup_steps} with the optimizer "OneBitAdam", whose freeze_step ends the warm-up; '
            "leave warmup_steps out"
        )


def _check(section: DeepSpeedSection, config: Mapping[str, Any], stage: int) -> None:
    """Raise ``ConfigError`` if DeepSpeed's own keys rule the compression out, or would compress a second time."""
    given = config.get("zero_optimization")
    zero: Mapping[str, Any] = given if isinstance(given, Mapping) else {}

    def on(key: str, default: bool = False) -> bool:
        value = zero.get(key, default)
        return default if value == AUTO else bool(value)

    gradients, weights = section.gradients, section.weights
    if gradients.make().needs_feedback and not section.error_feedback:
        raise _error(
            f"gradients are sent by {gradients.codec!r}, which loses most of them, without error_feedback, which ZeRO "
            "stages 0 to 2 have: set it, or choose another codec"
        )
    if weights.compresses and stage == 0:
        raise _error(f"weights are sent by {weights.codec!r}, but only ZeRO 1 to 3 send weights: set a stage, or 'raw'")
    if section.differences is not None and stage == 3:
        raise _error(
            f"weights are sent by {weights.codec!r} with ZeRO stage 3, whose ranks would each keep a copy of all "
            "weights; set stage 1 or 2, whose ranks have all weights, or weights 'qwz'"
        )
    if gradients.compresses and stage in (1, 2) and not on("use_multi_rank_bucket_allreduce", True):
        raise _error(
            "zero_optimization.use_multi_rank_bucket_allreduce=false sends gradients by a reduce to each rank, which "
            "is not compressed; leave it out"
        )
    if gradients.compresses and stage == 3 and on("stage3_use_all_reduce_for_fetch_params"):
        raise _error(
            "zero_optimization.stage3_use_all_reduce_for_fetch_params=true sums weights, which look like "
            "gradients; leave it out"
        )
    for role, traffic in (("gradients", gradients), ("weights", weights)):
        if traffic.compresses and on(f"zero_quantized_{role}"):
            raise _error(
                f"{role} are sent by {traffic.codec!r} and zero_optimization.zero_quantized_{role} is true; one of the "
                "two: leave the latter out"
            )
