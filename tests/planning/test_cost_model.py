from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.cost_model import AlphaBeta, Curve, LinkCost, parse_rate
from tests.loops import looped

sizes = st.floats(0, 1e12)
seconds = st.floats(0, 1e3)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw measured points, noise and all."""
    at = sorted(draw(st.sets(st.integers(1, 1 << 30), min_size=2, max_size=6)))
    return Curve(tuple((float(x), draw(st.floats(0, 10))) for x in at))


@looped("text", ["fast", "100", "-1mbit", "0mbit", "1 gbit", "1Gbit", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0 with bit"):
        parse_rate(text)


def test_a_curve_is_linear_between_points_clamped_below_and_goes_on_above() -> None:
    curve = Curve(((100.0, 1.0), (300.0, 5.0)))
    assert [curve(0), curve(1), curve(100), curve(200), curve(300)] == [0, 1, 1, 3, 5]
    assert curve(600) == 11 and curve(300_000) == pytest.approx(5 + 299_700 * 0.02)


def test_a_flat_end_makes_nothing_beyond_it_free() -> None:
    curve = Curve(((100.0, 1.0), (300.0, 5.0), (400.0, 4.0)))
    assert [curve(350), curve(400), curve(500)] == [5, 5, pytest.approx(7)]
    assert Curve(((1.0, 2.0), (2.0, 2.0)))(1000) == 2


@given(curves(), sizes, sizes)
def test_a_curve_never_falls(curve: Curve, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert curve(low) <= curve(high) * (1 + 1e-12)


@given(seconds, st.floats(1e-9, 1e-3), st.sets(st.integers(1000, 9999), min_size=2, max_size=5))
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float, at: set[int]) -> None:
    line = AlphaBeta(alpha, beta)
    fitted = Curve(tuple((float(x), line(x)) for x in sorted(at))).fit(alpha)
    assert fitted.alpha == alpha
    assert all(fitted(x) == pytest.approx(line(x), rel=1e-9) for x in at)


def test_a_fit_leaves_out_bursts() -> None:
    burst = Curve(((10.0, 1e-6), (1000.0, 1.0), (2000.0, 2.0)))
    assert burst.fit(0.0).beta == pytest.approx(1e-3)


@looped(
    "points, message",
    [
        ([(1.0, 1.0)], "expected at least 2"),
        ([(2.0, 1.0), (1.0, 1.0)], "expected sizes above 0, growing"),
        ([(0.0, 1.0), (1.0, 1.0)], "expected sizes above 0, growing"),
        ([(1.0, -1.0), (2.0, 1.0)], "expected numbers of at least 0"),
        ([(1.0, float("nan")), (2.0, 1.0)], "expected numbers of at least 0"),
    ],
)
def test_points_that_are_no_curve_are_refused(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Curve(tuple(points))


def link(beta: float, latency: float = 1e-4) -> LinkCost:
    return LinkCost(latency, 1e-5, 1e-10, AlphaBeta(latency, beta), AlphaBeta(2 * latency, beta))


def test_links_between_known_rates_are_interpolated_and_scaled_beyond() -> None:
    known = [(1e9, link(8e-9)), (1e7, link(8e-7))]
    for rate in (1e6, 1e7, 1e8, 1e9, 4e9):
        found = LinkCost.between(rate, known)
        assert isinstance(found.exchange, AlphaBeta) and isinstance(found.all_reduce, AlphaBeta)
        assert found.exchange.beta == pytest.approx(8 / rate)
        assert found.all_reduce.beta == pytest.approx(8 / rate)
        assert found.latency == pytest.approx(1e-4)


def test_no_transfer_over_a_slower_link_is_faster_than_its_rate() -> None:
    memory = replace(link(8e-9), all_reduce=AlphaBeta(2e-4, 1e-10))  # two ranks of one host sum in its memory
    for rate, seconds in ((1e9, 1e-10), (1e8, 8e-8)):
        found = LinkCost.between(rate, [(1e9, memory)])
        assert isinstance(found.all_reduce, AlphaBeta)
        assert found.all_reduce.beta == pytest.approx(seconds)


def test_gloo_asks_first_and_connections_of_our_own_do_not() -> None:
    near = link(8e-9, latency=1e-4)
    assert near.at_distance(0.05, asks=True).exchange(0.5e-300) == pytest.approx(0.0501)
    assert near.at_distance(0.05, asks=False).exchange(0.5e-300) == pytest.approx(0.0251)
    assert near.at_distance(0.05, asks=True).all_reduce(1e9) == pytest.approx(8 + 2 * 0.0501)
    assert near.at_distance(0.0, asks=True) == near


@looped(
    "wrong, message",
    [
        ({"rtt": -1.0}, "expected seconds and a chance below 1"),
        ({"loss": 1.0}, "expected seconds and a chance below 1"),
        ({"connections": 0}, "expected 1 or more"),
        ({"congestion": "vegas"}, "no formula for congestion control 'vegas'"),
        ({"connections": 2, "curves": True}, "cannot be put into measured curves"),
    ],
)
def test_ways_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scenario("1gbit", **wrong)  # type: ignore[arg-type]
