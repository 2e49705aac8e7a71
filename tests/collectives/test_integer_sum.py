"""``integer_sum``: one quantisation, exact sums, widths that follow the number of ranks, bytes."""

import math

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.codecs.research.thc import THC
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

from .conformance import conform, same_everywhere

integer_sum = collectives.get("integer_sum")


@looped("world", [1, 2, 3, 8, 9, 20])
def test_it_conforms_at_every_width(world: int) -> None:
    lengths = (0, 1, 1000, 2049) if world < 9 else (1000,)
    over_threads(world, lambda transport: conform(transport, "integer_sum", THC().bare, torch.device("cpu"), lengths))


@looped("world", [2, 4, 9])
def test_it_is_the_sum_of_what_ranks_sent(world: int) -> None:
    """A residual is what its rank's own message lost, and the results are the sum of the rest: no second rounding."""
    numel = 5000

    def body(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = gradient(numel, transport.rank), torch.zeros(numel)
        out = x.clone()
        integer_sum(out, THC().bare, transport, seed=4, residual=residual)
        assert same_everywhere(transport, out)
        return x, residual, out

    results = over_threads(world, body)
    sent = torch.stack([x.double() - residual.double() for x, residual, _ in results]).sum(0)
    for _, _, out in results:
        assert (out.double() - sent).abs().max() < 1e-6


def test_ranks_round_with_numbers_of_their_own() -> None:
    """Equal gradients: errors of stochastic rounding grow as the square root of the ranks, not with them."""
    x = gradient(1 << 14, 70)

    def body(transport: Transport) -> float:
        out = x.clone()
        integer_sum(out, THC(clip=4.0).bare, transport, seed=1)
        return float((out - transport.size * x).square().sum())

    (single,) = over_threads(1, body)
    for error in over_threads(8, body):
        assert 6 * single < error < 10 * single


@looped("world, bits", [(2, 8), (8, 8), (9, 12)])
def test_bytes_sent(world: int, bits: int) -> None:
    codec, n = THC().bare, 1 << 16
    chunk = -(-n // (world * 1024)) * 1024

    def body(transport: Transport) -> int:
        x = gradient(n, transport.rank)
        integer_sum(x, codec, transport)
        return transport.bytes_sent

    # More than eight ranks agree on scales by dissemination.
    messages = world - 1 if world <= 8 else math.ceil(math.log2(world))
    agreement, sums = 4 * (n // 1024) * messages, chunk * bits // 8
    expected = agreement + (world - 1) * (codec.wire(chunk).capacity + sums)
    assert over_threads(world, body) == [expected] * world


@on_threads(1)
def test_messages_with_headers_are_verified(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = transport.all_to_all

    def damaged(x: Tensor, out: Tensor) -> None:
        exchange(x, out)
        out[0, 200] ^= 1

    transport.all_to_all = damaged  # type: ignore[method-assign]
    with pytest.raises(WireError, match="checksum"):
        integer_sum(gradient(3000, 1), THC(), transport)
    transport.close()


@on_threads(1)
def test_other_codecs_and_too_many_ranks_are_refused(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="'integer_sum' adds codes as integers and cannot use int"):
        integer_sum(torch.ones(3), codecs.get("int8"), transport)
    transport.size = 2185
    with pytest.raises(ConfigError, match="at most 2184 ranks, these are 2185; choose another"):
        integer_sum(torch.ones(3), THC(), transport)
    transport.size = 1
    assert transport.bytes_sent == 0
