"""Scales that ranks agree on: the same everywhere, no overflow at first, a headroom that follows what overflows."""

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.codecs import Codec
from fusionlayer.codecs.quantized.auto_scale import Headroom
from fusionlayer.codecs.quantized.mx import MXFP4, MXFP6, MXFP8
from fusionlayer.collectives.halves import reduce_scatter
from fusionlayer.transport import Transport
from tests.collectives.conformance import conform, same_everywhere
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

CODECS = [MXFP8(scale="auto"), MXFP8("e5m2", "auto"), MXFP6(scale="auto"), MXFP6("e3m2", "auto"), MXFP4("auto")]
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}


def fresh(codec: Codec) -> Codec:
    """Return an equal codec with a headroom of its own."""
    return codecs.get(codec.name, **codec.options, header=False)


def vnmse(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).square().sum() / exact.square().sum())


@looped("codec", CODECS, ids=str)
def test_by_itself_it_is_the_codec_with_bf16_scales(codec: Codec) -> None:
    plain = codecs.get(codec.name, **{**codec.options, "scale": "bf16"}).bare
    x = gradient(1000, 1)
    assert torch.equal(fresh(codec).compress(x), plain.compress(x))


@looped("world", [1, 2, 5])
@looped("codec", CODECS, ids=str)
def test_scales_are_the_largest_of_all_ranks_times_their_number(codec: Codec, world: int) -> None:
    n = 1000

    def body(transport: Transport) -> Tensor:
        x, residual = gradient(n, transport.rank), torch.zeros(n)
        residual[64:96] = transport.rank
        mine = fresh(codec).agree(x, transport, residual=residual)
        assert isinstance(mine, MXFP8 | MXFP6 | MXFP4) and mine == codec.bare and mine.scales is not None
        assert same_everywhere(transport, mine.scales)
        return mine.scales

    scales = over_threads(world, body)[0]
    wanted = torch.stack([gradient(n, rank) for rank in range(world)])
    wanted[:, 64:96] += torch.arange(world)[:, None]
    most = torch.nn.functional.pad(wanted.abs().amax(0), (0, 24)).view(-1, 32).amax(1)
    exact = most * world / LARGEST[str(codec.options.get("format", "e2m1"))]
    assert (scales.float() >= exact).all() and (scales.float() <= exact * (1 + 2**-6)).all()


@looped("codec", CODECS, ids=str)
@on_threads(1)
def test_messages_have_the_scales_that_were_agreed_on(transport: Transport, codec: Codec) -> None:
    """Codes are what rounding x / scale gives, saturating; the message decodes without the agreement."""
    n = 32 * 9
    x = gradient(n, 3)
    agreed = fresh(codec).agree(4 * x.abs().clamp(min=0.3), transport)
    assert isinstance(agreed, MXFP8 | MXFP6 | MXFP4) and agreed.scales is not None
    for first in (0, 96):
        part = x[first:]
        payload = torch.zeros(agreed.wire(n - first).capacity, dtype=torch.uint8)
        agreed.encode(part, payload, offset=first)
        scales = agreed.wire(n - first).views(payload)[0]
        assert torch.equal(scales, agreed.scales[first // 32 :])
        out = torch.empty_like(part)
        fresh(codec).decode(payload, out)
        assert (out.abs() <= part.abs() * 1.5 + scales.float().repeat_interleave(32)).all()
        assert vnmse(out, part.double()) < 0.2


@looped("name, codec", zip(["one_shot", "two_shot"] * 3, CODECS, strict=False))
@on_threads(4)
def test_collectives_conform_with_it(transport: Transport, name: str, codec: Codec) -> None:
    conform(transport, name, fresh(codec), torch.device("cpu"), (0, 1, 33, 1000), [torch.float32])


@on_threads(8)
def test_at_first_no_sum_overflows(transport: Transport) -> None:
    """Equal summands add up to the largest sum that there can be."""
    worst = {"mxfp8": 0.01, "mxfp6": 0.1, "mxfp4": 0.4}
    for codec in CODECS:
        mine, x = fresh(codec), gradient(4096, 1)
        out = x.clone()
        collectives.get("two_shot")(out, mine, transport)
        assert isinstance(mine, MXFP8 | MXFP6 | MXFP4) and mine.headroom.factor == 8
        if codec.name == "mxfp8":
            most, wanted = (each.abs().view(-1, 32).amax(1) for each in (out, 8 * x))
            assert (most > 0.93 * wanted).all()
        assert vnmse(out, 8 * x.double()) < worst[codec.name]


def test_headroom_follows_what_overflows() -> None:
    headroom = Headroom()
    assert headroom.adapt(False, 8) == 8
    for _ in range(1000):
        headroom.adapt(False, 8)
    assert headroom.factor == pytest.approx(4, rel=1e-9)
    assert headroom.adapt(True, 8) == pytest.approx(8, rel=1e-9)
    assert headroom.adapt(True, 8) == 8, "more than the number of ranks is of no use"
    for _ in range(4000):
        headroom.adapt(False, 8)
    assert headroom.factor == 1, "less would cut off the summands"

    headroom.count(1, 1 << 20)
    assert not headroom.overflowed()
    headroom.count(2, 1 << 10)
    assert headroom.overflowed() and not headroom.overflowed()


def test_one_rank_that_overflows_is_enough_for_all() -> None:
    """Only the owner of the first piece sums equal values; all ranks make room after that."""

    def body(transport: Transport) -> tuple[float, float]:
        mine, x = MXFP4("auto").bare, torch.zeros(256)
        x[:64] = 1.0
        assert isinstance(mine, MXFP4)
        mine.headroom.factor = 2.0
        out = x.clone()
        collectives.get("two_shot")(out, mine, transport)
        assert mine.headroom.factor < 2 and (out[:64] < 3).all(), "it saturated"
        saturated = float(out[0])
        collectives.get("two_shot")(x, mine, transport)
        assert mine.headroom.factor is not None and mine.headroom.factor > 3.9
        return saturated, float(x[0])

    for saturated, later in over_threads(4, body):
        assert saturated < 3 and later == pytest.approx(4, rel=0.02)


@looped("numel", [96, 100])
@on_threads(3)
def test_reduce_scatter_finds_the_scales_of_its_rows(transport: Transport, numel: int) -> None:
    """Rows of very different size: each is scaled by its own blocks, aligned or not."""
    sizes = torch.tensor([1.0, 1000.0, 0.001])[:, None]
    every = [gradient(3 * numel, rank).view(3, numel) * sizes for rank in range(3)]
    out = torch.empty(numel)
    reduce_scatter(every[transport.rank], out, MXFP8(scale="auto").bare, transport)
    exact = torch.stack(every).double().sum(0)[transport.rank]
    assert vnmse(out, exact) < 0.01
