"""What TCP connections carry over a long and lossy way, and what steps make of it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Cluster, Scenario
from fusionlayer.planning.collective_phases import message_phases
from fusionlayer.planning.connections import Connections, tcp_rate
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.projection import Method, project
from fusionlayer.planning.simulation import Compute, Load, Resources, run_local_steps, run_step
from tests.planning.profiles import write_example

LINK = LinkCost(0.025, 0.0, 0.0, AlphaBeta(0.025, 8e-8), AlphaBeta(0.05, 8e-8))
"""Of 100 Mbit/s."""

RENO = Connections(0.05, 0.0005, "reno", 16, 1e8)
CODEC = CodecCost(32.0, FREE, FREE, FREE, FREE, lossless=True)


def test_a_connection_carries_what_mathis_says() -> None:
    # 1448 bytes in 50 ms, times sqrt(1.5 / 0.0005) = 54.77
    assert tcp_rate(0.05, 0.0005) == pytest.approx(12.69e6, rel=1e-3)
    assert tcp_rate(0.1, 0.0005) == pytest.approx(tcp_rate(0.05, 0.002)) == pytest.approx(tcp_rate(0.05, 0.0005) / 2)
    assert tcp_rate(0.05, 0.0) == tcp_rate(0.0, 0.01) == tcp_rate(0.1, 0.001, "bbr") == float("inf")


def test_connections_add_up_until_they_fill_the_link() -> None:
    for count, bits in ((None, 12.69e6), (1, 12.69e6), (4, 4 * 12.69e6), (8, 1e8), (64, 1e8)):
        more = replace(RENO, count=count).seconds(2e12) - replace(RENO, count=count).seconds(1e12)
        assert 8e12 / more == pytest.approx(bits, rel=1e-3)


def test_a_connection_begins_with_ten_segments_after_a_pause_and_doubles() -> None:
    one = Connections(0.05, 0.0, "reno", 1, 1e8, measured=12e6, rested=True)
    assert one.seconds(14_480) == pytest.approx(14_480 * 8 / 12e6)
    # 10, 20 and 40 segments in three round trips; then it carries what losses allow.
    assert one.seconds(100 * 1448) == pytest.approx(3 * 0.05 + 30 * 1448 * 8 / 12e6)
    for warm in (replace(one, congestion="bbr"), replace(one, rested=False)):
        assert warm.seconds(100 * 1448) == pytest.approx(100 * 1448 * 8 / 12e6)
    assert replace(one, measured=None, link_rate=math.inf).seconds(14_480) == 0


def _times(segments: int, loss: float, rtt: float, used: int, seed: int, calls: int = 1000) -> np.ndarray:
    """Return the seconds of messages, one after the other, over windows of reno that random losses halve."""
    random, windows, found = np.random.default_rng(seed), np.full(used, 10.0), []
    for _ in range(calls):
        left, seconds = float(segments), 0.0
        while left > 0:
            trip = min(1.0, left / windows.sum())
            seconds, left = seconds + rtt * trip, left - windows.sum()
            lost = random.random(used) < 1 - (1 - loss) ** (windows * trip)
            windows = np.where(lost, np.maximum(windows / 2, 2), windows + trip)
        found.append(seconds)
    return np.array(found)


@pytest.mark.parametrize(("segments", "used"), [(450, 1), (4000, 1), (450, 4)])
def test_an_exchange_lasts_as_long_as_the_slower_of_its_directions(segments: int, used: int) -> None:
    one, other = (_times(segments, 0.0005, 0.05, used, seed) for seed in (1, 2))
    slower = np.maximum(one, other).mean() / one.mean()
    assert slower > 1.1, "so a projection by means alone fails here"
    by_means = 8 * 1448 * segments / (used * tcp_rate(0.05, 0.0005))
    assert Connections(0.05, 0.0005, "reno", used).seconds(1448 * segments) == pytest.approx(
        slower * by_means, rel=0.05
    )


@given(st.floats(1, 1e9), st.floats(1, 1e9), st.sampled_from(["reno", "cubic", "bbr"]), st.integers(1, 64))
def test_more_bytes_and_fewer_connections_never_take_less(a: float, b: float, congestion: str, count: int) -> None:
    some, more = (Connections(0.05, 0.0005, congestion, k, 1e8) for k in (count, count + 1))
    low, high = sorted((a, b))
    assert some.seconds(low) <= some.seconds(high) * (1 + 1e-9) + 0.05, "at most a round trip: of chunks that fit"
    assert more.seconds(high) <= some.seconds(high) * (1 + 1e-9)


def test_a_lost_segment_comes_a_round_trip_later() -> None:
    """Of 1000 segments a second both ways at 0.1 %, the last lost one is a second before the end in the mean."""
    rate = 8 * 1448 * 500.0
    lossy = Connections(0.1, 0.001, "bbr", 1, rate)
    many, often = 1448e6, 1.0
    left = 0.1 * (1 - math.exp(-often * 0.1)) - ((1 - math.exp(-often * 0.1)) / often - 0.1 * math.exp(-often * 0.1))
    assert lossy.seconds(many) - 8 * many / rate == pytest.approx(left, rel=1e-3)
    assert replace(lossy, loss=0.0).seconds(many) == pytest.approx(8 * many / rate)
    assert 0 < lossy.seconds(1448) - 8 * 1448 / rate < 1e-3, "one segment, lost once in 500 both ways"


def test_shares_by_rates_take_less_of_the_slowest_link(tmp_path: Path) -> None:
    profile = Profile.from_yaml(write_example(tmp_path))
    slow = Scenario("500mbit", rates=("1gbit", "1gbit", "1gbit", "500mbit"))
    assert slow.cluster(profile, 4).two_shot == pytest.approx((1 / 5e8) / (1.5 / 5e8))
    assert replace(slow, rates=("500mbit",) * 4).cluster(profile, 4).two_shot == pytest.approx(1.0)
    assert replace(slow, rates=("500mbit", "1gbit")).cluster(profile, 2).two_shot == 1.0
    with pytest.raises(ConfigError, match="4 rates for 8 workers, 1 on each host"):
        slow.cluster(profile, 8)
    with pytest.raises(ConfigError, match="expected the slowest of them"):
        replace(slow, rate="1gbit")


def test_ddp_has_one_connection_and_an_engine_one_for_each_lane(tmp_path: Path) -> None:
    profile = Profile.from_yaml(write_example(tmp_path))
    far = Scenario("1gbit", rtt=0.05, loss=0.0005, cores=8.0)
    alone = 8 * 4 * sum(tensor.numel for tensor in profile.model.tensors) / tcp_rate(0.0502, 0.0005)
    ddp = project(profile, Method.named("ddp", profile), far, 2).seconds
    buckets = Method.named("raw", profile, "dense", "wfbp")
    assert ddp > alone > project(profile, buckets, far, 2).seconds


def test_lanes_fill_what_one_leaves_of_the_link() -> None:
    cluster = Cluster(2, LINK, connections=replace(RENO, count=1))
    loads = [Load(0.0, 0.0, 1, message_phases("one_shot", 1e6, CODEC, cluster, FREE)) for _ in range(2)]
    alone = run_step(Compute(0, 0, 0), loads[:1]).seconds
    assert run_step(Compute(0, 0, 0), loads, Resources(lanes=2)).seconds == pytest.approx(alone), (
        "12 + 12 of 100 Mbit/s"
    )
    assert run_step(Compute(0, 0, 0), loads, Resources(lanes=1)).seconds == pytest.approx(2 * alone)
    one = replace(cluster, connections=Connections(0.05, 0.0005, "reno", None, 1e8, shared=True))
    shared = [Load(0.0, 0.0, 1, message_phases("one_shot", 1e6, CODEC, one, FREE)) for _ in range(2)]
    assert run_step(Compute(0, 0, 0), shared, Resources(lanes=2)).seconds == pytest.approx(2 * alone - 0.025)
    full = [replace(load, phases=[replace(phase, share=1.0) for phase in load.phases]) for load in loads]
    assert run_step(Compute(0, 0, 0), full, Resources(lanes=2)).seconds == pytest.approx(2 * alone - 0.025)
    assert run_local_steps(Compute(0, 0, 0), loads, [[0, 1]], Resources(lanes=2)).seconds == pytest.approx(alone)
