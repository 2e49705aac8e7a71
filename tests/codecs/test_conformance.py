from __future__ import annotations

import pytest
import torch

from fusionlayer.codecs import Codec, NativeCodec, TorchCodec
from tests.tiers import tiered

from .conformance import CHECKS, DTYPES, Check
from .variants import defaults, every, is_kind, is_variant_of_few_bits, repeats

pytestmark = pytest.mark.short


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


def is_fast(check: Check, codec: Codec, dtype: torch.dtype) -> bool:
    if dtype is not torch.float32:
        return is_kind(codec)
    if is_variant_of_few_bits(codec):
        return False
    return codec not in repeats() or check.__name__ in HARMLESS


DEFAULTS = defaults()
# Codecs in torch, which are slow, leave types to their base class: those of their options are not all tried.
CASES = [
    (check, codec, dtype)
    for check in CHECKS.values()
    for codec in every()
    for dtype in DTYPES
    if dtype is torch.float32
    or isinstance(codec, NativeCodec)
    or not isinstance(codec, TorchCodec)
    or codec in DEFAULTS
]


def name_of(parameter: Check | Codec | torch.dtype) -> str:
    return getattr(parameter, "__name__", str(parameter).removeprefix("torch."))


@pytest.mark.parametrize("check, codec, dtype", tiered(CASES, is_fast), ids=name_of)
def test_codec(check: Check, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    check(codec, dtype, device)
