"""Shares that follow from rates, and rates as they are measured, by a clock that stands still but for messages."""

import random
import threading
from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor

from fusionlayer.base.errors import ConfigError
from fusionlayer.planning import rates
from fusionlayer.planning.rates import least_time, measure_rates, shares_by, shares_of
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads


@looped(
    "of, shares",
    [
        ((1.0, 1.0, 1.0, 0.5), (333, 333, 333, 0)),  # the slow link is full with its own messages
        ((1.0, 1.0, 1.0, 0.75), (300, 300, 300, 100)),
        ((1.0, 1.0, 1.0, 1.0), ()),
        ((1.0, 0.1), ()),  # two ranks send equally much whatever the shares
    ],
)
def test_shares_follow_rates(of: Sequence[float], shares: tuple[int, ...]) -> None:
    assert shares_of(of) == shares


def test_shares_take_the_least_time_and_equal_ones_take_more() -> None:
    choose = random.Random(1)
    for _ in range(200):
        of = [choose.choice((10.0, 30.0, 50.0, 100.0)) for _ in range(choose.randint(3, 8))]
        shares = shares_of(of) or (1,) * len(of)
        times = [(1 + (len(of) - 2) * w / sum(shares)) / r for w, r in zip(shares, of, strict=True)]
        assert max(times) <= 1.02 * least_time(of)
        assert least_time(of) <= 2 * (len(of) - 1) / len(of) / min(of) * (1 + 1e-9)


def measured(mbits: Sequence[float], monkeypatch: pytest.MonkeyPatch, ranks_per_node: int = 1) -> list[list[float]]:
    """Return the rates in Mbit/s that each rank measures between links of ``mbits``; only messages take time."""
    now = threading.local()
    monkeypatch.setattr(rates.time, "perf_counter", lambda: getattr(now, "seconds", 0.0))

    def body(transport: Transport) -> list[float]:
        exchange = transport.exchange

        def timed(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            # A rank is ready when its own link is; whose link is measured has the most messages.
            node = transport.rank // ranks_per_node
            sent = sum(m.numel() for to, (m, _) in messages.items() if to // ranks_per_node != node)
            now.seconds = getattr(now, "seconds", 0.0) + 8e-6 * sent * ranks_per_node / mbits[node] + 1e-4
            exchange(messages)

        monkeypatch.setattr(transport, "exchange", timed)
        return [round(rate / 1e6, 1) for rate in measure_rates(transport)]

    return over_threads(len(mbits) * ranks_per_node, body, ranks_per_node=ranks_per_node)


def test_measured_rates_are_those_of_the_links_and_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured([100, 97, 50, 99], monkeypatch)
    assert found == [found[0]] * 4
    fast, also_fast, slow, fast_too = found[0]
    assert fast == also_fast == fast_too == pytest.approx(100, rel=0.02), "what is about equal counts as equal"
    assert slow == pytest.approx(50, rel=0.02)


def test_ranks_of_a_host_share_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    (rates_of, *_) = measured([100, 50], monkeypatch, ranks_per_node=2)
    assert rates_of == pytest.approx([50, 50, 25, 25], rel=0.02)


def test_one_host_has_equal_shares() -> None:
    assert over_threads(3, lambda transport: shares_by(["measured"], transport)) == [()] * 3


@looped(
    "given, text",
    [
        (["100mbit"], r"rates=\['100mbit'\] for 3 ranks; expected the rate of each rank's link"),
        (["100mbit", "100mbit", "fast"], r"rate 'fast'; expected a number above 0 with bit, kbit, mbit or gbit"),
    ],
)
@on_threads(3)
def test_wrong_rates_are_refused(transport: Transport, given: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        shares_by(given, transport)
