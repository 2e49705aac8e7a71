from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer import collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Cluster
from fusionlayer.planning.collective_phases import ALGORITHMS, Phase, message_phases, seconds_of
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.simulation import Compute, Load, Resources, SimulatedStep, run_step

COMPUTE = Compute(forward=1.0, backward=2.0, optimizer=0.5)


def wire(seconds: float, cpu: float = 0.0) -> Phase:
    return Phase(seconds, cpu, "between", 1.0)


def codec(seconds: float) -> Phase:
    return Phase(seconds, seconds)


def load(ready: float, *phases: Phase, used: float = 0.0) -> Load:
    return Load(ready, used, 1.0, phases)


def travels(step: SimulatedStep) -> tuple[tuple[float, float], ...]:
    """Return when each bucket began and ended to travel."""
    return tuple((span.start, span.end) for span in step.spans)


class TestByHand:
    def test_buckets_queue_for_the_lane(self) -> None:
        step = run_step(COMPUTE, [load(1, wire(3)), load(2, wire(1))])
        assert travels(step) == ((1, 4), (4, 5))
        assert step.seconds == 5 + 0.5 + 1
        assert (step.alone, step.communication, step.sent) == (3.5, 4, 2)
        assert (step.waiting, step.idle) == (3, 0)

    def test_a_bucket_disturbs_what_is_computed_after_it(self) -> None:
        loads = [replace(load(ready, wire(0.1)), disturbance=0.25) for ready in (1, 1.5, 2)]
        step = run_step(COMPUTE, loads)
        assert [span.ready for span in step.spans] == [1, 1.75, 2.5], "nothing of backward is left after the last"
        assert (step.alone, step.waiting) == (3.5, pytest.approx(0.6))

    def test_a_codec_takes_half_of_the_only_core(self) -> None:
        step = run_step(COMPUTE, [load(1, codec(1))], Resources(cores=1))
        assert travels(step) == ((1, 3),), "1 s of work on half a core"
        assert step.seconds == 3 + 0.5 + 1, "the last second of backward took two"
        assert run_step(COMPUTE, [load(1, codec(1))], Resources(cores=2)).seconds == 3.5

    def test_forward_waits_for_one_bucket_at_a_time(self) -> None:
        loads = [load(1, wire(3), used=0.5), load(2, wire(1))]
        assert run_step(COMPUTE, loads, Resources(overlap_forward=True)).seconds == 5 + 0.25 + 0.5 + 0.25 + 0.5
        loads = [load(2, wire(1)), load(1, wire(3), used=0.5)]
        step = run_step(COMPUTE, loads, Resources(overlap_forward=True))
        assert travels(step) == ((2, 3), (3, 6))
        assert step.seconds == 6 + 0.25 + 0.5, "the first half of forward ran while the second bucket was on its way"
        assert run_step(COMPUTE, loads).seconds == 6 + 0.5 + 1


LINK = LinkCost(1e-3, 1e-4, 1e-9, AlphaBeta(1e-3, 1e-6), AlphaBeta(2e-3, 1e-6))
FAST = LinkCost(1e-4, 1e-4, 1e-9, AlphaBeta(1e-4, 1e-7), AlphaBeta(2e-4, 1e-7))
HALF = CodecCost(16.0, *(AlphaBeta(0.0, beta) for beta in (1e-3, 2e-3, 3e-3, 4e-3)))
COPY = AlphaBeta(0.0, 1e-4)


def cost(algorithm: str, workers: int, codec: CodecCost = HALF, per_host: int = 1) -> tuple[float, float, float]:
    """Return seconds of codec and copies, other seconds, and bytes sent by a host, for 1200 elements."""
    inside = FAST if per_host > 1 else None
    phases = message_phases(algorithm, 1200, codec, Cluster(workers, LINK, per_host, inside), COPY)
    cpu = sum(phase.seconds for phase in phases if phase.cpu == phase.seconds)
    return cpu, sum(phase.seconds for phase in phases) - cpu, sum(phase.sent for phase in phases)


class TestCollectives:
    """Against formulas written out for 1200 elements: 2400 bytes as HALF."""

    PACK = 2 * 0.12
    ENCODE, DECODE, SUM, RECODE = 1.2, 2.4, 3.6, 4.8

    def check(self, found: tuple[float, float, float], cpu: float, seconds: float, sent: float) -> None:
        assert found == (pytest.approx(cpu), pytest.approx(seconds), pytest.approx(sent))

    def test_dense(self) -> None:
        cpu = self.PACK + self.ENCODE + self.DECODE
        self.check(cost("dense", 2), cpu, 2e-3 + 2.4e-3, 2400)
        self.check(cost("dense", 4), cpu, 6e-3 + 3.6e-3, 3600)
        self.check(cost("dense", 4, replace(HALF, lossless=True)), self.PACK, 6e-3 + 3.6e-3, 3600)

    def test_ring(self) -> None:
        cpu = self.PACK + (self.ENCODE + 3 * self.RECODE) / 4 + self.DECODE
        self.check(cost("ring", 4), cpu, 6e-3 + 3.6e-3, 3600)
        assert cost("ring", 4, per_host=2)[2] == 3600, "a ring crosses each link once"

    def test_butterfly(self) -> None:
        recode = 3 * self.RECODE / 4 + self.DECODE
        cpu = self.PACK + self.ENCODE / 2 + recode
        self.check(cost("butterfly", 4), cpu, 4e-3 + 3.6e-3, 3600)
        inside = 2 * (1e-4 + 1200e-7)
        self.check(cost("butterfly", 4, per_host=2), cpu, inside + 2 * (1e-3 + 1.2e-3), 2 * 2 * 600)
        cpu = self.PACK + self.ENCODE + self.RECODE + recode
        self.check(cost("butterfly", 5), cpu, 6e-3 + 3.6e-3 + 2 * 2.4e-3, 3600 + 2 * 2400)

    def test_half_of_a_long_tensor_is_recoded_while_the_other_travels(self) -> None:
        """With four ranks halves are worth their messages from 2^19 elements on."""
        cluster, numel = Cluster(4, LINK), 1 << 19

        def seconds(algorithm: str, recode: float, numel: int) -> float:
            codec = CodecCost(16.0, FREE, FREE, FREE, AlphaBeta(0.0, recode))
            return sum(phase.seconds for phase in message_phases(algorithm, numel, codec, cluster, FREE))

        for algorithm, hops in (("ring", 6), ("butterfly", 4)):
            link = 1.5 * 2e-6 * numel
            assert seconds(algorithm, 1e-7, numel) == pytest.approx(2 * hops * 1e-3 + link), "hidden"
            slow = 1e-3 * numel * 3 / 4
            assert seconds(algorithm, 1e-3, numel) == pytest.approx(slow + hops * 1e-3 + link / 2), "the gather is not"
            assert seconds(algorithm, 1e-3, numel // 2) == pytest.approx(slow / 2 + hops * 1e-3 + link / 2)

    def test_one_shot(self) -> None:
        self.check(cost("one_shot", 2), self.PACK + self.ENCODE + 2 * self.SUM, 1e-3 + 2.4e-3, 2400)
        self.check(cost("one_shot", 4), self.PACK + self.ENCODE + 4 * self.SUM, 1e-3 + 2e-4 + 7.2e-3, 7200)

    def test_omnireduce(self) -> None:
        """Two exchanges of a byte a block, then 1200 values of 2 bytes around a ring."""
        cpu = self.PACK + self.ENCODE + 3 * self.RECODE / 4 + self.DECODE
        union = 2 * (1e-3 + 2e-4) + 1.5 * 1200 / 256 * 1e-6
        self.check(cost("omnireduce", 4), cpu, union + 6e-3 + 3.6e-3, 3600 + 1.5 * 1200 / 256)

    def test_every_collective_is_simulated_and_no_other(self) -> None:
        assert set(ALGORITHMS) == {*collectives.names(), *collectives.gather_names()}

    def test_integer_sum(self) -> None:
        """2400 bytes of codes and 1200 of sums in quarters, an exchange of 4 bytes, nothing requantised."""
        cpu = 2 * 0.12 + 1.2 + 3.6 + 2.4
        self.check(cost("integer_sum", 4), cpu, 3 * (1e-3 + 2e-4) + (12 + 1800 + 900) * 1e-6, 12 + 1800 + 900)
        for workers, bits in ((8, 8), (9, 12), (136, 12), (137, 16), (2184, 16)):
            *_, sent = cost("integer_sum", workers)
            assert sent == pytest.approx((workers - 1) * (4 + (2400 + 1200 * bits / 8) / workers))
        with pytest.raises(ConfigError, match="at most 2184 ranks, these are 2185"):
            cost("integer_sum", 2185)

    def test_two_shot(self) -> None:
        cpu = self.PACK + self.ENCODE + self.RECODE + self.DECODE
        self.check(cost("two_shot", 4), cpu, 2 * (1e-3 + 2e-4 + 1.8e-3), 3600)

    def test_two_level(self) -> None:
        for bits, within in ((None, 1200), (32.0, 2400), (8.0, 600)):
            cpu, seconds, sent = cost("two_level", 4, replace(HALF, within_bits=bits), per_host=2)
            assert cpu == pytest.approx(self.PACK + self.ENCODE + 1.5 * self.RECODE + self.DECODE)
            assert sent == pytest.approx(2 * 2 * 600), "half of what two_shot sends"
            inside = 2 * 1e-4 + (within + 1200) * 1e-7
            assert seconds == pytest.approx(inside + 2 * (1e-3 + 2 * 600 * 1e-6))
        assert cost("two_level", 4) == cost("two_shot", 4)
        eight = replace(HALF, within_bits=8.0)
        assert cost("two_level", 4, eight, per_host=4) == cost("two_shot", 4, replace(HALF, bits=8.0), per_host=4)

    def test_grid(self) -> None:
        """Nine ranks in rows of three: thirds of a message along rows, ninths between them, each way."""
        cpu = self.PACK + self.ENCODE + self.RECODE * 4 / 3 + self.DECODE
        sent = 2 * (2 * 800 + 2 * 2400 / 9)
        self.check(cost("grid", 9), cpu, 4 * (1e-3 + 1e-4) + sent * 1e-6, sent)
        assert cost("grid", 2) == cost("two_shot", 2)
        assert cost("grid", 16, per_host=16)[2] == 0

    def test_a_ring_crosses_a_host_s_link_once_and_is_no_faster_than_the_link_inside(self) -> None:
        """Of eight ranks two cross: 14 hops, of which 3.5 between hosts and 10.5 inside."""
        lossless = replace(HALF, lossless=True)
        latency = 3.5 * 1e-3 + 10.5 * 1e-4
        self.check(cost("dense", 8, lossless, 4), self.PACK, 4.2e-3 + latency * 6 / 7 + 2e-3, 4200)
        slow_inside = Cluster(8, FAST, 4, LINK)
        phases = message_phases("dense", 1200, lossless, slow_inside, FREE)
        assert seconds_of(phases) > 4200 * 1e-6, "the link inside is the slower one"

    def test_nccl_takes_a_tree_where_a_ring_has_too_many_hops(self) -> None:
        """Up and down: 2 x 7 hops between 128 hosts and 2 x 7 inside them, and every byte twice."""
        raw = replace(HALF, lossless=True)
        ring, either = (Cluster(1024, LINK, 8, FAST, own=own) for own in (("ring",), ("ring", "tree")))
        assert seconds_of(message_phases("dense", 1200, raw, ring, FREE)) > 0.25
        found = message_phases("dense", 1200, raw, either, FREE)
        latency = 14 * 1e-3 + 14 * 1e-4
        assert seconds_of(found) == pytest.approx(2e-3 + 4800e-6 + latency * 26 / 28)
        many = 10**9
        assert message_phases("dense", many, raw, either, FREE) == message_phases("dense", many, raw, ring, FREE)

    def test_unknown_names_and_impossible_clusters_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="unknown algorithm 'star'; expected one of: dense"):
            message_phases("star", 1200, HALF, Cluster(2, LINK), COPY)
        with pytest.raises(ConfigError, match="3 workers, 2 on each host"):
            Cluster(3, LINK, 2, FAST)
        with pytest.raises(ConfigError, match="no costs of a link inside one"):
            Cluster(4, LINK, 2)
        with pytest.raises(ConfigError, match="0 cores"):
            Cluster(2, LINK, cores=0)


times = st.floats(0, 10)
costs = st.builds(AlphaBeta, st.floats(0, 1e-2), st.floats(0, 1e-5))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    """Draw a step: what computes, buckets as (ready, used, elements), and how they are sent."""
    return {
        "compute": Compute(draw(times), draw(times), draw(times)),
        "buckets": draw(st.lists(st.tuples(times, times, st.integers(1, 10**6)), max_size=5)),
        "algorithm": draw(st.sampled_from(sorted(ALGORITHMS))),
        "codec": CodecCost(draw(st.floats(0.1, 32)), *(draw(costs) for _ in range(4)), lossless=draw(st.booleans())),
        "cores": draw(st.floats(0.25, 4)),
        "lanes": draw(st.integers(1, 3)),
        "overlap_forward": draw(st.booleans()),
    }


def solve(
    compute: Compute,
    buckets: list[tuple[float, float, int]],
    algorithm: str,
    codec: CodecCost,
    cores: float,
    lanes: int,
    overlap_forward: bool,
    workers: int = 2,
    beta: float = 1e-6,
    copy: AlphaBeta = COPY,
) -> tuple[SimulatedStep, list[Load]]:
    link = LinkCost(1e-4, 1e-5, 1e-9, AlphaBeta(1e-4, beta), AlphaBeta(2e-4, beta))
    cluster = Cluster(workers, link, cores=cores)
    loads = [
        Load(ready, used, elements, message_phases(algorithm, elements, codec, cluster, copy))
        for ready, used, elements in buckets
    ]
    return run_step(compute, loads, Resources(cores=cores, lanes=lanes, overlap_forward=overlap_forward)), loads


MOST = 2184
"""Workers that every collective takes: sums of integers overflow above."""


@given(problems(), st.integers(2, MOST))
def test_a_step_takes_as_long_as_computing_and_as_the_link(problem: dict[str, object], workers: int) -> None:
    step, loads = solve(**problem, workers=workers)  # type: ignore[arg-type]
    carried = sum(phase.seconds for each in loads for phase in each.phases if phase.link == "between")
    assert step.seconds >= step.alone * (1 - 1e-9)
    assert step.seconds >= carried * (1 - 1e-9)


@given(problems(), st.integers(2, MOST))
def test_buckets_leave_in_order(problem: dict[str, object], workers: int) -> None:
    step, loads = solve(**problem, workers=workers)  # type: ignore[arg-type]
    lanes = problem["lanes"]
    assert isinstance(lanes, int)
    backward = problem["compute"].backward  # type: ignore[attr-defined]
    for i, (start, end) in enumerate(travels(step)):
        assert start <= end <= step.seconds
        assert start >= max(min(each.ready, backward) for each in loads[: i + 1]) * (1 - 1e-9)
        if i >= lanes:
            assert start >= step.spans[i - lanes].end, "its lane was busy"
