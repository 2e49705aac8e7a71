"""What no encoder has made is decoded to something or refused; nothing else happens."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import WireError
from fusionlayer.codecs import Codec
from tests.codecs.conformance import DTYPES, encoded
from tests.synthetic import gradient

LOSSLESS = [codecs.get(name).bare for name in codecs.names() if codecs.get(name).zips]
GUARD = 32

messages = given(
    codec=st.sampled_from(LOSSLESS),
    dtype=st.sampled_from(DTYPES),
    numel=st.one_of(st.integers(0, 3000), st.sampled_from([65535, 65537, 70_001])),
    data=st.data(),
)


def fuzzed(codec: Codec, dtype: torch.dtype, numel: int, data: Any) -> Tensor:
    """Return a message of an encoder with some bytes changed, most often where lengths and tables are, or noise."""
    payload = encoded(codec, gradient(numel, numel, dtype))
    if not payload.numel():
        return payload
    front = min(payload.numel(), 1024)
    places = st.one_of(st.integers(0, front - 1), st.integers(0, payload.numel() - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)):
        payload[place] = value
    if data.draw(st.booleans()):
        noise = torch.tensor(list(data.draw(st.binary(max_size=200))), dtype=torch.uint8)[: payload.numel()]
        start = data.draw(st.integers(0, payload.numel() - noise.numel()))
        payload[start : start + noise.numel()] = noise
    return payload


@settings(max_examples=150)
@messages
def test_decoders(codec: Codec, dtype: torch.dtype, numel: int, data: Any) -> None:
    payload = fuzzed(codec, dtype, numel, data)
    before = payload.clone()
    target = data.draw(st.sampled_from(DTYPES))
    guarded = torch.full((numel + 2 * GUARD,), 3.0, dtype=target)
    out = guarded[GUARD : GUARD + numel]
    verbs: list[Callable[[], object]] = [
        lambda: codec.decode(payload, out, dtype=dtype),
        lambda: codec.decode_add(payload, out, dtype=dtype),
        lambda: codec.decode_sum(torch.stack([before, payload]), out, dtype=dtype),
        lambda: codec.recode(torch.stack([payload, before]), torch.empty_like(payload), numel, dtype=dtype),
    ]
    for verb in verbs:
        with suppress(WireError):
            verb()
    assert torch.equal(payload, before)
    assert (guarded[:GUARD] == 3).all() and (guarded[GUARD + numel :] == 3).all()


@settings(max_examples=150)
@messages
def test_sizes(codec: Codec, dtype: torch.dtype, numel: int, data: Any) -> None:
    """A head that may be believed names bytes that there are; what is expanded is what was compacted."""
    payload = fuzzed(codec, dtype, numel, data)
    try:
        (extent,) = codec.extents([payload], [numel], dtype)
        compact = codec.compact(payload, numel, dtype)
    except WireError:
        return
    assert codec.static_extent(numel, dtype) <= extent <= codec.wire(numel, dtype).capacity
    back = torch.full_like(payload, 0xA5)
    codec.expand(compact, back, numel, dtype)
    assert torch.equal(codec.compact(back, numel, dtype), compact)
    for wrong in (compact[:-1], torch.cat([compact, compact[:1]]), compact[: data.draw(st.integers(0, 20))]):
        if wrong.numel() != compact.numel():
            with pytest.raises(WireError):
                codec.expand(wrong, back, numel, dtype)
