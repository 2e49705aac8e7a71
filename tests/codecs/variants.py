"""The codecs to test: every registered name, with its defaults and with each option in turn at its other values."""

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.integer import Int
from tests.synthetic import awkward, gradient

KINDS = ("raw", "int4", "topk", "zip", "thc", "dynamiq", "powersgd", "tlq")
"""One codec of each kind: what the fast tier tries in all worlds and with all element types."""


def defaults() -> list[Codec]:
    """Return a codec for every registered name, each once: presets may say the same in other words."""
    return list(dict.fromkeys(codecs.get(name) for name in codecs.names()))


def every() -> list[Codec]:
    """Return the variants of every registered name, each once."""
    return list(dict.fromkeys(codec for name in codecs.names() for codec in variants(name)))


def variants(name: str) -> list[Codec]:
    """Return the codec ``name`` with its defaults, then with one option changed at a time."""
    default = codecs.get(name)
    hints = get_type_hints(type(default))
    found = [default]
    for option in default.options:
        accepted = [codec for value in _values(hints[option]) if (codec := _built(name, option, value))]
        whole = _is_choice(hints[option]) or option.endswith("bits")
        found += accepted if whole else [accepted[0], accepted[-1]] if accepted else []
    return list(dict.fromkeys(found))


@cache
def _kinds() -> frozenset[Codec]:
    return frozenset(codecs.get(name).bare for name in KINDS)


def is_kind(codec: Codec) -> bool:
    return codec.bare in _kinds()


def is_variant_of_few_bits(codec: Codec) -> bool:
    """Tell whether a codec has 2 or 3 bits and is no preset: its other options do what they do with 4 bits."""
    widths = [value for option, value in codec.options.items() if option.endswith("bits") and isinstance(codec, Int)]
    return any(width < 4 for width in widths) and codec.bare not in [each.bare for each in defaults()]


@cache
def repeats() -> frozenset[Codec]:
    """Return the variants that make, of a set of inputs, the bytes of an earlier variant of their class."""
    first: dict[tuple[type[Codec], bytes], Codec] = {}
    every_codec = [*defaults(), *every()]
    for codec in every_codec:
        first.setdefault((type(codec), fingerprint(codec)), codec)
    return frozenset(every_codec).difference(first.values(), defaults())


@cache
def fingerprint(codec: Codec) -> bytes:
    """Return a digest of messages, residuals and decoded values of some tensors: ties, zeros, huge and tiny ones."""
    codec, digest = codec.bare, hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (67, 4133):
            for seed, x in enumerate((gradient(numel, 1), gradient(numel, 2).sign(), awkward(numel, 32))):
                residual, out = gradient(numel, 9 + seed), torch.empty(numel, dtype=dtype)
                payload = torch.zeros(codec.wire(numel, dtype).capacity, dtype=torch.uint8)
                codec.encode(x.to(dtype), payload, seed=seed, offset=seed * codec.block, residual=residual)
                codec.decode(payload, out)
                for made in (payload, residual, out):
                    digest.update(made.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _values(hint: Any) -> Iterator[Any]:
    """Yield values worth trying for an option of this type; for numbers powers of two in their order."""
    if hint is bool:
        yield from (False, True)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint in (int, float):
        yield from (hint(2) ** exponent for exponent in range(17))


def _is_choice(hint: Any) -> bool:
    return hint is bool or get_origin(hint) is Literal


def _built(name: str, option: str, value: Any) -> Codec | None:
    try:
        return codecs.get(name, **{option: value})
    except ConfigError:
        return None
