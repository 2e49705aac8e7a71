"""Tensors of more elements than 32 bits count, once for each kind of kernel: what lies behind is right, too."""

import pytest
import torch

import fusionlayer as fl
from tests.gpu.place import GPU, ON
from tests.synthetic import gradient

NUMEL = (1 << 31) + 4097 if ON == "cuda" else (1 << 18) + 4097
PERIOD = 8192  # whole blocks of every codec, so that equal parts are encoded alike


def periodic(dtype: torch.dtype) -> torch.Tensor:
    """Return (NUMEL,) values that repeat."""
    return gradient(PERIOD, 1, dtype).to(GPU).repeat(-(-NUMEL // PERIOD))[:NUMEL]


@pytest.mark.parametrize("name", ["raw", "int8", "int4", "taco", "mxfp4", "fp8_block", "zip"])
def test_dense_codecs(name: str) -> None:
    """Without random rounding every period has the same codes, which one period alone has on the CPU."""
    codec = fl.codecs.get(name).bare
    x = periodic(torch.bfloat16)
    payload = torch.empty(codec.wire(NUMEL, x.dtype).capacity, dtype=torch.uint8, device=GPU)
    codec.encode(x, payload)
    codec.decode(payload, x)  # in the place of what it was made from: there is no room for many such tensors
    one = gradient(PERIOD, 1, torch.bfloat16)
    expected = codec.decompress(codec.compress(one), one.shape, one.dtype).to(GPU)
    whole = x[: NUMEL // PERIOD * PERIOD].view(-1, PERIOD)
    for rows in whole.split(1 << 14):
        assert torch.equal(rows.view(torch.int16), expected.view(torch.int16).expand_as(rows))
    tail = x[whole.numel() :].cpu()
    again = codec.decompress(codec.compress(one[: len(tail)]), tail.shape, tail.dtype)
    assert torch.equal(tail.view(torch.int16), again.view(torch.int16))


def test_sparse_messages() -> None:
    """Few values are larger than all others, most of them behind 2^31; they alone travel, and the rest stays."""
    places = torch.tensor([0, 65_535, NUMEL // 2, NUMEL - 4097, NUMEL - 4096, NUMEL - 1])
    values = torch.tensor([2.0, -3.0, 5.0, -7.0, 11.0, 13.0])
    acc = torch.full((NUMEL,), 2.0**-10, device=GPU)
    acc[places.to(GPU)] = values.to(GPU)
    count = len(places)
    codec = fl.codecs.get("topk", density=(count + 0.5) / NUMEL).bare
    payload = torch.empty(codec.wire(NUMEL).capacity, dtype=torch.uint8, device=GPU)
    codec.encode(acc, payload)
    codec.decode(payload, acc)
    assert acc.count_nonzero() == count and torch.equal(acc[places.to(GPU)].cpu(), values)
