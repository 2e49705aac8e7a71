"""The switcher takes the faster form, agrees over ranks, and follows network and data. Clocks are made up."""

import logging
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs.lossless.zip import Zip
from fusionlayer.collectives import switching
from fusionlayer.collectives._alpha_beta import AlphaBeta, Costs, describe
from fusionlayer.collectives.switching import Switcher, switcher_of
from fusionlayer.process import clock as clocks
from fusionlayer.transport import Transport, local
from tests.codecs.conformance import same_bits
from tests.fake_device import FakeDevice
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

from .conformance import same_everywhere

LIKE = torch.zeros(1)
SLOW = Costs(AlphaBeta(1e-4, 8e-8), AlphaBeta(3e-4, 8e-8), 0.7)  # 100 Mbit/s
FAST = Costs(AlphaBeta(1e-4, 1e-10), AlphaBeta(3e-4, 1e-10), 0.7, codec=2e-10)


class Clock(threading.local):
    """A clock for each rank, which stands still but for what a test lets pass."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (switching, clocks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@looped("late", [False, True], ids=["in time", "late"])
def test_on_a_device_the_host_reads_what_the_device_has_done_before(late: bool) -> None:
    """In the next call of this size; only where the device lags further behind the host waits for it."""

    def body(transport: Transport) -> tuple[list[bool], int]:
        device = FakeDevice()
        switcher = Switcher(transport, clock=device)
        chosen = []
        for _ in range(2 * switching.SAMPLES + 4):
            native, zipped = (partial(device.work, seconds) for seconds in (3.0 + transport.rank, 2.0))
            chosen.append(switcher.run("all_gather", 1 << 20, native, zipped, like=LIKE))
            device.now += 1.0 if late else 10.0
        (decision,) = switcher.decisions
        assert (decision.native, decision.zipped) == (4.0, 2.0), "the slowest rank counts"
        return chosen, device.waits

    for chosen, waits in over_threads(2, body):
        assert chosen == [False, True] * switching.SAMPLES + [True] * 4
        assert waits == int(late)


class Network:
    """Calls that take what ``costs`` say, on each rank a little more or less."""

    def __init__(self, clock: Clock, transport: Transport, costs: Costs, noise: float = 0.0) -> None:
        self.costs = costs
        self._clock, self._transport = clock, transport
        self._noise, self._random = noise, random.Random(transport.rank)

    def call(self, switcher: Switcher, nbytes: int, kind: str = "all_gather") -> bool:
        return switcher.run(kind, nbytes, lambda: self._pass(0, nbytes), lambda: self._pass(1, nbytes), like=LIKE)

    def _pass(self, form: int, nbytes: int) -> None:
        self._clock.now += self.costs.seconds(nbytes)[form] * (1 + self._random.uniform(0, self._noise))
        self._transport.bytes_sent += int(nbytes * self.costs.factor) if form else nbytes


Body = Callable[[Switcher, Network, Clock], Any]


def played(clock: Clock, costs: Costs, body: Body, *, world: int = 3, noise: float = 0.0, **options: Any) -> list[Any]:
    def rank_main(transport: Transport) -> Any:
        clock.now = 100.0 * transport.rank
        return body(Switcher(transport, **options), Network(clock, transport, costs, noise), clock)

    return over_threads(world, rank_main)


@pytest.mark.parametrize("costs, nbytes", [(SLOW, 1 << 12), (SLOW, 1 << 22), (FAST, 1 << 22)])
def test_the_faster_form_is_used_and_looking_costs_little(clock: Clock, costs: Costs, nbytes: int) -> None:
    calls = 3000

    def body(switcher: Switcher, network: Network, clock: Clock) -> tuple[int, float]:
        start = clock.now
        used = sum(network.call(switcher, nbytes) for _ in range(calls))
        return used, clock.now - start

    best = min(costs.seconds(nbytes))
    for used, seconds in played(clock, costs, body, noise=0.02):
        assert seconds < 1.03 * 1.02 * best * calls
        assert used > 0.95 * calls if costs.seconds(nbytes)[1] == best else used < 0.05 * calls


def test_all_ranks_choose_alike_whatever_they_measure(clock: Clock) -> None:
    even = Costs(AlphaBeta(0.0, 1e-8), AlphaBeta(0.0, 1e-8), 1.0)

    def body(switcher: Switcher, network: Network, clock: Clock) -> list[bool]:
        return [network.call(switcher, size) for size in (100, 5000, 100_000) for _ in range(300)]

    first, *others = played(clock, even, body, world=5, noise=0.5)
    assert all(other == first for other in others)


def test_it_does_not_flap(clock: Clock) -> None:
    """Forms that differ by less than noise: the first choice stays."""
    even = Costs(AlphaBeta(0.0, 1e-8), AlphaBeta(0.0, 1e-8), 1.0)

    def body(switcher: Switcher, network: Network, clock: Clock) -> int:
        changes, before = 0, None
        for _ in range(5000):
            network.call(switcher, 1 << 20)
            (choice,) = switcher.decisions
            changes += before is not None and choice.zips != before
            before = choice.zips if choice.native is not None else None
        return changes

    assert played(clock, even, body, noise=0.015) == [0, 0, 0]


def test_it_follows_data_and_network(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    nothing_saved = Costs(SLOW.native, SLOW.zipped, 1.0, codec=8e-9)

    def body(switcher: Switcher, network: Network, clock: Clock) -> list[bool]:
        seen = []
        for costs in (SLOW, nothing_saved, SLOW, FAST, SLOW):
            network.costs = costs
            for _ in range(3500):
                network.call(switcher, 1 << 20)
            seen.append(switcher.decisions[0].zips)
        return seen

    with caplog.at_level(logging.INFO, logger=switching.__name__):
        assert played(clock, SLOW, body) == [[True, False, True, False, True]] * 3
    told = [record.getMessage() for record in caplog.records]
    assert ["1048576 bytes: zipped" in line for line in told] == [True, False, True, False, True]


def test_sizes_not_seen_before_are_predicted(clock: Clock) -> None:
    """Equations 6 and 7 through two sizes tell a third one's form at its first call."""

    def body(switcher: Switcher, network: Network, clock: Clock) -> tuple[bool, bool, Costs | None]:
        for size in (1 << 14, 1 << 17):
            for _ in range(10):
                network.call(switcher, size)
        return network.call(switcher, 1 << 20), network.call(switcher, 1 << 10), switcher.costs("all_gather")

    for large, small, costs in played(clock, SLOW, body):
        assert large and not small
        assert costs is not None and costs.factor == pytest.approx(0.7, rel=1e-3)
        for line, exact in ((costs.native, SLOW.native), (costs.zipped, SLOW.zipped)):
            assert line.alpha == pytest.approx(exact.alpha, rel=1e-3)
            assert line.beta == pytest.approx(exact.beta, rel=1e-3)


def test_expected_costs_count_until_measurements_do(clock: Clock) -> None:
    def body(switcher: Switcher, network: Network, clock: Clock) -> tuple[bool, bool]:
        first = network.call(switcher, 1 << 20)
        for _ in range(2000):
            network.call(switcher, 1 << 20)
        return first, switcher.decisions[0].zips

    assert played(clock, FAST, body, expected={"all_gather": SLOW}) == [(True, False)] * 3


def test_precision_counts(clock: Clock) -> None:
    """A native sum of f32 is beaten by zipped bf16 even where bytes do not get fewer."""
    costs = Costs(AlphaBeta(0.0, 1e-8), AlphaBeta(0.0, 1e-8), 1.0)
    assert costs.seconds(1e6, precision=0.5) == (1e-2, 5e-3)
    assert costs.zips_from(0.5) == 0.0 and costs.zips_from() == math.inf

    def body(switcher: Switcher, network: Network, clock: Clock) -> bool:
        return switcher.run("reduce_scatter", 1 << 20, lambda: None, lambda: None, like=LIKE, precision=0.5)

    assert played(clock, costs, body, expected={"reduce_scatter": costs}) == [True] * 3


def test_a_library_s_reduce_scatter_is_what_zipping_has_to_beat() -> None:
    """It is used where it takes less time. What is zipped is rounded to ``wire``, and its bytes are s of equation 7."""
    costs = [Costs(AlphaBeta(0, native), AlphaBeta(0, 3), 1.0) for native in (1, 2)]  # s = 0.5 is between them

    def body(transport: Transport) -> None:
        rank, world, n = transport.rank, transport.size, 4096
        rows = [gradient(world * n, 70 + r) for r in range(world)]
        for expected, zips in zip(costs, (False, True), strict=True):
            switcher, out = Switcher(transport, expected={"reduce_scatter": expected}), torch.zeros(n)
            switcher.reduce_scatter(rows[rank], out, native=lambda out=out: out.fill_(7), wire=torch.bfloat16)
            total = sum(row.view(world, -1)[rank].bfloat16().float() for row in rows)
            assert torch.equal(out, total if zips else torch.full((n,), 7.0))
        switcher = Switcher(transport)
        for size in (n, n // 8):
            for _ in range(2 * switching.SAMPLES):
                part = rows[rank][: world * size]
                switcher.reduce_scatter(part, torch.empty(size), wire=torch.bfloat16)
        found = switcher.costs("reduce_scatter")
        assert found is not None and 0.6 < found.factor < 1, "of the bytes in bf16"

    over_threads(3, body)


def test_equations_say_from_which_size_on_zipping_pays() -> None:
    assert SLOW.zips_from() == pytest.approx(2e-4 / (0.3 * 8e-8))
    below, above = SLOW.seconds(0.99 * SLOW.zips_from()), SLOW.seconds(1.01 * SLOW.zips_from())
    assert below[0] < below[1] and above[1] < above[0]
    assert "zipped from 8.3 kB on" in describe(SLOW) and "never zipped" in describe(FAST)
    assert "native 0.100 ms + 80.000 ns per byte" in describe(SLOW) and "codec 0.200 ns" in describe(FAST)


def test_a_line_has_no_negative_part() -> None:
    line = AlphaBeta.through([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)])
    assert (line.alpha, line.beta) == pytest.approx((1.0, 2.0))
    assert AlphaBeta.through([(1.0, 1.0), (2.0, 3.0)]).alpha == 0
    falling = AlphaBeta.through([(1.0, 2.0), (2.0, 1.0)])
    assert falling.beta == 0 and 1 <= falling.alpha <= 2


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count calls of the codec."""
    counted: list[int] = []
    encode = Zip._encode_rows

    def counting(self: Zip, *arguments: Any) -> None:
        counted.append(1)
        encode(self, *arguments)

    monkeypatch.setattr(Zip, "_encode_rows", counting)
    return counted


def test_native_means_that_no_codec_runs(encodings: list[int]) -> None:
    never = dict.fromkeys(switching.KINDS, Costs(AlphaBeta(0, 1), AlphaBeta(0, 2), 1.0))
    always = dict.fromkeys(switching.KINDS, Costs(AlphaBeta(0, 2), AlphaBeta(0, 1), 1.0))
    for expected, uses in ((never, False), (always, True)):
        encodings.clear()

        def body(transport: Transport, expected: dict[str, Costs] = expected) -> None:
            everything(Switcher(transport, expected=expected), transport)

        over_threads(3, body)
        assert bool(encodings) == uses


def everything(switcher: Switcher, transport: Transport) -> None:
    """Make each call once and compare its bits."""
    rank, world = transport.rank, transport.size
    lengths = [(3 * r * 500) % 2000 for r in range(world)]
    parts = [gradient(n, r).bfloat16() for r, n in enumerate(lengths)]
    out = torch.empty(sum(lengths), dtype=torch.bfloat16)
    switcher.all_gather(parts[rank], out, lengths=lengths)
    assert same_bits(out, torch.cat(parts))
    mine = out.split(lengths)[rank]
    switcher.all_gather(mine, out, lengths=lengths)
    assert same_bits(out, torch.cat(parts)), "the input may be a part of the output"

    def piece(source: int, to: int) -> Tensor:
        return gradient((source * 700 + to * 300) % 1500, 10 * source + to)

    x, into = torch.cat([piece(rank, to) for to in range(world)]), [piece(source, rank) for source in range(world)]
    received = torch.empty(sum(map(len, into)))
    sends, recvs = [len(piece(rank, to)) for to in range(world)], list(map(len, into))
    switcher.all_to_all(x, received, sends, recvs)
    assert same_bits(received, torch.cat(into))

    rows = [gradient(world * 900, 50 + r).half() for r in range(world)]
    scattered = torch.empty(900, dtype=torch.float16)
    switcher.reduce_scatter(rows[rank], scattered)
    total = sum(row.view(world, -1)[rank].float() for row in rows)
    assert isinstance(total, Tensor) and torch.equal(scattered, total.half())

    x = gradient(3001, 90 + rank)
    switcher.all_reduce(x)
    exact = sum(gradient(3001, 90 + r).double() for r in range(world))
    assert float((x - exact).abs().max()) < 1e-5 and same_everywhere(transport, x)


@looped("world", [1, 2, 3, 8])
def test_bits_do_not_depend_on_the_choice(world: int) -> None:
    def body(transport: Transport) -> str:
        switcher = Switcher(transport)
        for _ in range(2 * switching.SAMPLES + 2):
            everything(switcher, transport)
        return str(switcher)

    for told in over_threads(world, body):
        if world == 1:
            assert told == "no call yet"
        else:
            assert all(f"{kind} of " in told for kind in switching.KINDS)
            assert "of the bytes; " in told and "calls)" in told


def test_functions_take_auto() -> None:
    def body(rank: int) -> str:
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(2 * switching.SAMPLES + 1):
                x = gradient(3000, rank, dtype).view(-1, 10)
                assert same_bits(fl.all_gather(x, "auto"), fl.all_gather(x))
                assert same_bits(fl.all_to_all(x, codec="auto"), fl.all_to_all(x))
                assert torch.equal(fl.reduce_scatter(x, "auto"), fl.reduce_scatter(x))
                total = fl.all_reduce(x.clone(), "auto")
                torch.testing.assert_close(total, fl.all_reduce(x.clone()), rtol=0.02, atol=1e-3)
                fl.all_reduce(x.clone(), "zip", "switched")
        for shape in ((0, 10), (3, 0)):
            assert fl.all_gather(torch.zeros(shape), "auto").numel() == 0
        assert fl.all_reduce(torch.tensor([rank + 1]), "auto", op=fl.Sum).item() == 6
        with pytest.raises(ConfigError, match="codec 'auto' with algorithm='ring'"):
            fl.all_reduce(x, "auto", "ring")
        with pytest.raises(fl.PlanMismatch):
            fl.all_gather(x, "auto" if rank else "zip")
        return str(fl.switcher())

    for told in local.run(body, 3):
        assert "all_to_all of 4000 bytes: " in told and "all_to_all of 8000 bytes" in told


@on_threads(1)
def test_other_codecs_are_refused(transport: Transport) -> None:
    for name in ("raw", "bf16", "topk"):
        with pytest.raises(ConfigError, match=f"got {name}"):
            Switcher(transport, codecs.get(name))
        with pytest.raises(ConfigError, match=f"'switched'.*cannot use {name}.*choose another"):
            fl.collectives.get("switched")(torch.zeros(3), codecs.get(name), transport)
    assert switcher_of(transport) is switcher_of(transport, codecs.get("zip").bare)
