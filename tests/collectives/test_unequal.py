"""Shares of a sum: the bits of equal ones, the bytes that they promise, and nothing lost."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from fusionlayer.collectives import _unequal
from fusionlayer.collectives._unequal import parts_of, two_shot_by_shares
from fusionlayer.collectives.two_shot import two_shot
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .conformance import given, same_everywhere, sum_over_ranks, takes

SHARES = [(1,), (3, 1), (333, 333, 0), (0, 0, 1), (333, 333, 334, 0), (1, 2, 3, 500)]
BLOCKWISE = [codecs.get(name) for name in ("raw", "bf16", "int8", "int4")]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of a small tensor."""
    monkeypatch.setattr(_unequal, "_LEAST", 700)


def test_parts_cover_everything_in_order_and_are_as_long_as_shares_say() -> None:
    for shares, numel, block in product(SHARES, (0, 1, 129, 5000, 100_000), (1, 32, 256)):
        parts = parts_of(numel, shares, block)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == numel
        for part, share in zip(parts, shares, strict=True):
            assert part.start == part.stop or part.start % block == 0
            assert abs(part.stop - part.start - numel * share / sum(shares)) <= 2 * block
            assert share or part.start == part.stop


@looped("codec", [form for codec in BLOCKWISE for form in (codec.bare, codec.checked)], ids=str)
@looped("shares", SHARES, ids=str)
def test_shares_do_not_change_a_sum(shares: Sequence[int], codec: Codec) -> None:
    def body(transport: Transport) -> None:
        for numel, dtype in product((0, 1, 129, 5000), (torch.float32, torch.bfloat16)):
            by_shares = given(transport.rank, 0, numel, dtype).clone()
            equally = by_shares.clone()
            two_shot_by_shares(by_shares, codec, transport, shares=shares, seed=3)
            two_shot(equally, codec, transport, seed=3)
            assert torch.equal(by_shares.view(torch.uint8), equally.view(torch.uint8)), (numel, dtype)

    over_threads(len(shares), body)


@looped("codec", [codec.bare for codec in defaults() if takes("two_shot", codec)], ids=str)
@on_threads(3)
def test_every_codec_sums_by_shares(transport: Transport, codec: Codec) -> None:
    """All ranks have the same bits, results and residuals are what was given, and the noise is no larger."""
    numel = 5000
    own = given(transport.rank, 0, numel, torch.float32)
    exact = sum_over_ranks(transport, own)
    errors = []
    for reduce in (two_shot, partial(two_shot_by_shares, shares=(2, 3, 0))):
        x, residual = own.clone(), torch.zeros(numel)
        fresh = type(codec)(**codec.options, header=False)
        reduce(x, fresh, transport, seed=5, residual=residual)
        assert same_everywhere(transport, x)
        kept = sum_over_ranks(transport, residual)
        lost = (x.double() + kept - exact).norm() / exact.norm()
        errors.append((float((x.double() - exact).norm()), float(lost)))
    (equal_error, equal_lost), (error, lost) = errors
    assert error <= 1.5 * equal_error + 1e-6 * float(exact.norm())
    assert lost <= 1.5 * equal_lost + 1e-6


def test_a_rank_sends_what_its_share_says_both_ways_at_once() -> None:
    codec, world, shares = codecs.get("int8").bare, 4, (1, 1, 1, 0)
    piece = 3 * codec.block * 128
    numel = 8 * piece
    message = codec.wire(numel).capacity

    def body(transport: Transport) -> tuple[int, int]:
        x = given(transport.rank, 0, numel, torch.float32).clone()
        two_shot_by_shares(x, codec, transport, shares=shares)
        return transport.bytes_sent, transport.sequence

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_unequal, "_LEAST", piece)
        told = over_threads(world, body)
    for share, (sent, calls) in zip(shares, told, strict=True):
        assert sent == pytest.approx(message * (1 + (world - 2) * share / sum(shares)), rel=0.01)
        assert calls == 8 + 1, "sums of a piece travel with the summands of the next one"


def test_only_two_shot_takes_shares() -> None:
    assert collectives.by_shares("ring", ()) is collectives.get("ring")
    with pytest.raises(ConfigError, match=r"shares=\[1, 2\] with algorithm 'ring'; only 'two_shot' takes shares"):
        collectives.by_shares("ring", (1, 2))
