"""Names from papers for the ways of sending weights, and presets that name weights and gradients together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import codecs
from ..base.errors import ConfigError
from ..codecs import ChangeCodec, Codec
from ..functional import make_codec

_INT4: tuple[str, Mapping[str, Any]] = ("int4", {"hadamard": False, "group_size": 2048})
NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"qwd": _INT4, "qw": _INT4, "qwz": ("int8", {"group_size": 2048})}
"""Names for ``weights`` that are not names of codecs, with the codec and options of each."""

PRESETS = {"sdp4bit": ("qwd", "tlq_hs"), "zero++": ("qwz", "qgz"), "qsdp": ("qsdp", "qsdp_gradients")}
"""Presets, each with its weights and gradients: SDP4Bit, ZeRO++ (its qwZ and qgZ), and QSDP.

``qsdp`` is a codec too: next to it gradients may name another one.
"""


@dataclass(frozen=True)
class Weights:
    """How weights are sent from their owners to all ranks.

    Attributes:
        codec: the codec of the messages.
        differences: whether messages hold the owner's weights minus the copy that every rank keeps. Ranks add them to
            their copies. The next step's difference contains the loss of a message (SDP4Bit, section 3.1 and Algorithm
            2). ``delta``, a ``ChangeCodec``, loses nothing.
    """

    codec: Codec
    differences: bool

    @classmethod
    def of(cls, name: str | Codec | Weights | None) -> Weights:
        """Return the codec of a user's name: "qwd", "qw", "qwz", or a codec.

        "qwd" sends differences in int4 with groups of 2048 (SDP4Bit). "qw" sends weights in the same int4. "qwz" sends
        weights in int8, as ZeRO++ does.
        """
        if isinstance(name, Weights):
            return name
        if isinstance(name, str) and name in NAMES:
            codec_name, options = NAMES[name]
            return cls(codecs.get(codec_name, **options).bare, differences=name == "qwd")
        codec = make_codec("raw" if name is None else name, {}).bare
        if codec.needs_feedback:
            raise ConfigError(
                f"weights={codec}: sparse weights would be zeros, and other codecs that need error feedback lose too "
                "much of each weight; expected 'qwd' or a dense codec"
            )
        return cls(codec, differences=isinstance(codec, ChangeCodec))


def both_ways(
    weights: str | Codec | None, gradients: str | Codec | None, default: str | None
) -> tuple[str | Codec | None, str | Codec | None]:
    """Return the names for weights and for gradients, after a preset in ``weights`` is replaced by its two names.

    Args:
        weights: as a user gave it.
        gradients: as a user gave it.
        default: the value of ``gradients`` if the user gave none.

    Raises:
        ConfigError: ``weights`` is a preset and ``gradients`` names something else, or only ``gradients`` is a preset.
    """
    if isinstance(weights, str) and weights in PRESETS:
        preset = PRESETS[weights]
        if gradients not in (default, weights, preset[1]):
            if codecs.knows(weights):
                return weights, gradients
            raise ConfigError(
                f"weights={weights} names gradients too, as {preset[1]}, next to gradients={gradients}; leave one out, "
                f"or give weights={preset[0]}"
            )
        return preset
    if isinstance(gradients, str) and gradients in PRESETS and not codecs.knows(gradients):
        raise ConfigError(
            f"gradients={gradients} names weights too; give it as weights, or give gradients={PRESETS[gradients][1]}"
        )
    return weights, gradients
