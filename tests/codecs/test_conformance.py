"""Every codec passes every check of ``conformance.py``."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fusionlayer.codecs import Codec, NativeCodec, TorchCodec
from tests.tiers import exhaustive

from .conformance import CHECKS, DTYPES
from .variants import defaults, every, is_kind, is_variant_of_few_bits, repeats

# What does no harm is shown for every codec; all else for those whose bytes differ.
HARMLESS = (
    "damage_is_noticed",
    "garbage_does_no_harm",
    "messages_of_others_are_refused",
    "nothing_is_written_outside",
    "stale_buffers_leave_no_trace",
    "what_travels_is_enough",
    "wrong_arguments_are_refused",
)
DEFAULTS = defaults()
VARIANTS = {codec: number for number, codec in enumerate(codec for codec in every() if codec not in DEFAULTS)}


def fast(codec: Codec) -> set[tuple[str, torch.dtype]]:
    """Return the checks, by name, and types with which the fast tier tries a codec."""
    if codec in DEFAULTS:
        return set(product(CHECKS, DTYPES if is_kind(codec) else DTYPES[:1]))
    chosen = HARMLESS if codec in repeats() or is_variant_of_few_bits(codec) else CHECKS
    turns = [(name, VARIANTS[codec] + n) for n, name in enumerate(CHECKS) if name in chosen]
    return {(name, DTYPES[turn % 3]) for name, turn in turns if turn % 2}


def rest(codec: Codec) -> Iterator[tuple[str, torch.dtype]]:
    """Return the others; of a variant each check with the next type. Those in torch have one type."""
    slow = isinstance(codec, TorchCodec) and not isinstance(codec, NativeCodec)
    turns = [(name, DTYPES[0 if slow else (VARIANTS.get(codec, 0) + n + 1) % 3]) for n, name in enumerate(CHECKS)]
    every = product(CHECKS, DTYPES) if codec in DEFAULTS else turns
    return (pair for pair in every if pair not in fast(codec))


@pytest.mark.parametrize("codec", DEFAULTS, ids=lambda codec: codec.name)
def test_default(codec: Codec, device: torch.device) -> None:
    for name, dtype in sorted(fast(codec), key=str):
        print(name, dtype)
        CHECKS[name](codec, dtype, device)


@pytest.mark.parametrize("of", dict.fromkeys(codec.name for codec in VARIANTS))
def test_variants(of: str, device: torch.device) -> None:
    for codec in (codec for codec in VARIANTS if codec.name == of):
        for name, dtype in sorted(fast(codec), key=str):
            print(codec, name, dtype)
            CHECKS[name](codec, dtype, device)


@exhaustive(guarded_by="tests/codecs/test_conformance.py::test_default")
@pytest.mark.parametrize("of", dict.fromkeys(codec.name for codec in (*DEFAULTS, *VARIANTS)))
def test_in_other_types(of: str, device: torch.device) -> None:
    for codec in (codec for codec in (*DEFAULTS, *VARIANTS) if codec.name == of):
        for name, dtype in rest(codec):
            print(codec, name, dtype)
            CHECKS[name](codec, dtype, device)
