import torch

from fusionlayer import codecs
from tests.loops import looped
from tests.synthetic import bit_patterns

from .conformance import DTYPES, as_bits, decoded, encoded, same_bits

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@looped("dtype", DTYPES)
@looped("name", NARROW)
def test_values_are_those_of_torchs_cast(name: str, dtype: torch.dtype) -> None:
    codec = codecs.get(name).bare
    x = bit_patterns(dtype)
    if dtype is torch.float32:  # as they come, then at and around every tie of a narrow type
        bits = x.view(torch.int32)
        ties = [(bits & ~mask) | half for mask, half in ((0xFFFF, 0x8000), (0x1FFF, 0x1000), (0x1FFF, 0x1001))]
        x = torch.cat([bits, *ties]).view(torch.float32)
    payload = encoded(codec, x)
    (sent,) = codec.wire(x.numel(), dtype).views(payload)
    expected = x.to(NARROW[name])
    assert torch.equal(sent.isnan(), x.isnan())
    assert same_bits(sent[~x.isnan()], expected[~x.isnan()])
    canonical = as_bits(torch.tensor([float("nan")], dtype=sent.dtype))
    if dtype is not sent.dtype:
        assert (as_bits(sent[x.isnan()]) == canonical).all()
    for other in DTYPES:
        out = decoded(codec, payload, x.numel(), dtype, other)
        assert same_bits(out[~x.isnan()], expected.to(other)[~x.isnan()])
