"""What weights travel as, by the names that papers give it, and presets of weights and gradients together."""

from __future__ import annotations

from dataclasses import dataclass

from .. import codecs
from ..codecs import Codec
from ..errors import ConfigError
from ..functional import make_codec

__all__ = ["NAMES", "PRESETS", "Weights", "both_ways"]

NAMES = ("qwd", "qw", "qwz")
"""Names of weights that are no codecs."""

PRESETS = {"sdp4bit": ("qwd", "tlq_hs"), "zero++": ("qwz", "ulq")}
"""Names of weights and gradients together: SDP4Bit, and ZeRO++ (its qwZ and qgZ)."""


@dataclass(frozen=True)
class Weights:
    """How weights travel from their owners to all ranks.

    Attributes:
        codec: what travels.
        differences: what travels is what the owner's weight is more than every rank's copy, and is added to the copies;
            what a message lost is in the next step's difference (SDP4Bit, section 3.1 and Algorithm 2).
    """

    codec: Codec
    differences: bool

    @classmethod
    def of(cls, name: str | Codec | None) -> Weights:
        """Return what a user's name stands for: "qwd", "qw", "qwz", or a codec.

        "qwd" is differences in int4, groups of 2048 (SDP4Bit); "qw" weights in the same int4; "qwz" weights in int8, as
        in ZeRO++.
        """
        four = codecs.get("int4", hadamard=False, group_size=2048).bare
        if name == "qwd":
            return cls(four, differences=True)
        if name == "qw":
            return cls(four, differences=False)
        if name == "qwz":
            return cls(codecs.get("int8", group_size=2048).bare, differences=False)
        codec = make_codec("raw" if name is None else name, {}).bare
        if codec.needs_feedback:
            raise ConfigError(
                f"weights={codec}: sparse weights would be zeros, others far off; expected 'qwd' or a dense codec"
            )
        return cls(codec, differences=False)


def both_ways(
    weights: str | Codec | None, gradients: str | Codec | None, default: str | None
) -> tuple[str | Codec | None, str | Codec | None]:
    """Return what weights and what gradients travel as, of which ``weights`` may name both: a preset.

    Args:
        weights: as a user gave it.
        gradients: the same.
        default: what ``gradients`` is where the user gave none.

    Raises:
        ConfigError: a preset beside gradients of another name, or given for gradients alone.
    """
    if isinstance(weights, str) and weights in PRESETS:
        preset = PRESETS[weights]
        if gradients not in (default, weights, preset[1]):
            raise ConfigError(
                f"weights={weights} names gradients too, as {preset[1]}, beside gradients={gradients}; leave one out, "
                f"or give weights={preset[0]}"
            )
        return preset
    if isinstance(gradients, str) and gradients in PRESETS:
        raise ConfigError(
            f"gradients={gradients} names weights too; give it as weights, or give gradients={PRESETS[gradients][1]}"
        )
    return weights, gradients
