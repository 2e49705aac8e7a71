"""two_shot sums rotated values as they are, where nothing asks for the values themselves."""

import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.codecs import Codec, TransformCodec
from fusionlayer.collectives._base import split_evenly
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

WORLD, N = 3, 20_011  # the last run is ragged: what rotation spreads over its padding stays in rotated sums alone
ROTATED = (
    *(codecs.get(name).bare for name in ("int4", "int2", "taco")),
    codecs.get("taco", format="int8", block_size=32).bare,
)


def summed(codec: Codec) -> list[Tensor]:
    def body(transport: Transport) -> Tensor:
        mine = gradient(N, transport.rank)
        collectives.get("two_shot")(mine, codec, transport)
        return mine

    return over_threads(WORLD, body)


def by_hand(codec: Codec, sums: Codec, run: int) -> Tensor:
    """Return the sum of all ranks: ``sums`` adds messages of ``codec`` up, in sums of whole runs."""
    chunk, parts = split_evenly(N, WORLD, codec.block), []
    for start in range(0, N, chunk):
        pieces = [gradient(N, rank)[start : start + chunk] for rank in range(WORLD)]
        payloads = torch.stack([codec.compress(piece) for piece in pieces])
        payload, n = torch.zeros_like(payloads[0]), len(pieces[0])
        sums.recode(payloads, payload, -(-n // run) * run)
        parts.append(codec.decompress(payload, n))
    return torch.cat(parts)


@looped("codec", ROTATED, ids=str)
def test_two_shot_sums_rotated_values(codec: Codec) -> None:
    assert isinstance(codec, TransformCodec)
    rotated, back = by_hand(codec, codec.untransformed, codec.transform_run), by_hand(codec, codec, 1)
    assert all(torch.equal(got, rotated) for got in summed(codec))
    assert not torch.equal(rotated, back)
    exact = torch.stack([gradient(N, rank) for rank in range(WORLD)]).sum(0)
    errors = [float((got - exact).norm() / exact.norm()) for got in (rotated, back)]
    assert abs(errors[0] - errors[1]) < 0.01 * errors[1], "the sums differ by rounding alone"


def test_what_cannot_sum_rotated_values() -> None:
    """An alpha is made of values; the header names the codec that encoded."""
    for codec in (codecs.get("taco", scales="dual").bare, codecs.get("taco", hadamard=False).bare):
        assert isinstance(codec, TransformCodec)
        assert codec.untransformed is codec and codec.transform_run == 1
    codec = codecs.get("int4").checked
    assert all(torch.equal(got, by_hand(codecs.get("int4").bare, codecs.get("int4").bare, 1)) for got in summed(codec))
