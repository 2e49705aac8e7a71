from __future__ import annotations

import pytest
import torch

from fusionlayer.codecs import Codec, NativeCodec, TorchCodec
from tests.tiers import tiered

from .conformance import CHECKS, DTYPES, Check
from .variants import defaults, every, is_kind, is_variant_of_few_bits, repeats

pytestmark = pytest.mark.short

Types = tuple[torch.dtype, ...]

# What does no harm is shown for every codec; all else for those whose bytes differ, in the fast tier.
HARMLESS = (
    "damage_is_noticed",
    "garbage_does_no_harm",
    "messages_of_others_are_refused",
    "nothing_is_written_outside",
    "stale_buffers_leave_no_trace",
    "what_travels_is_enough",
    "wrong_arguments_are_refused",
)


def is_fast(check: Check, codec: Codec, dtypes: Types) -> bool:
    if dtypes != DTYPES[:1]:
        return is_kind(codec)
    if is_variant_of_few_bits(codec):
        return False
    return codec not in repeats() or check.__name__ in HARMLESS


DEFAULTS = defaults()


def types_of(codec: Codec, number: int) -> list[Types]:
    """Return the types with which a codec is tried: every name with all, variants in turn with one of 16 bits."""
    if codec in DEFAULTS or is_kind(codec):
        return [DTYPES[:1], DTYPES[1:]]
    # Codecs in torch, which are slow, leave types to their base class.
    slow = isinstance(codec, TorchCodec) and not isinstance(codec, NativeCodec)
    return [DTYPES[:1]] if slow else [DTYPES[:1], (DTYPES[1 + number % 2],)]


CASES = [
    (check, codec, dtypes)
    for check in CHECKS.values()
    for number, codec in enumerate(every())
    for dtypes in types_of(codec, number)
]


def name_of(parameter: Check | Codec | Types) -> str:
    if isinstance(parameter, tuple):
        return "+".join(str(dtype).removeprefix("torch.") for dtype in parameter)
    return getattr(parameter, "__name__", str(parameter))


@pytest.mark.parametrize("check, codec, dtypes", tiered(CASES, is_fast), ids=name_of)
def test_codec(check: Check, codec: Codec, dtypes: Types, device: torch.device) -> None:
    for dtype in dtypes:
        check(codec, dtype, device)
