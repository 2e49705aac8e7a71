"""How several interfaces share what a job sends, while one of them goes down and comes back.

    python -m benchmarks.interfaces [--interfaces 30mbit,100mbit] [--down eth1] [--connections 8] [--out FOLDER]

Two hosts exchange all-reduces without a pause over connections of our own: two at a time, as an optimizer's lanes do,
so one travels while the result of the other is compared. After a while an interface of the second host goes down, and
later it comes back. A row is a phase: before, while the interface is down, and after. "of the
rates" is what the first host's devices have sent, headers included, as a share of the rates of the interfaces that
were up. Every result is compared with the sum that it must be, on both ranks, to the last bit.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import fusionlayer as fl
from benchmarks import driver, lab_driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Flap, Network
from benchmarks.lab.flaps import EVENTS
from examples.wire import sent_bytes
from fusionlayer import config
from fusionlayer.cli import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "main", "phases"]

BEGUN = "begun"
_SAMPLE = 0.1
"""Seconds between two looks at what the devices have sent."""

_UNDER_WAY = 2
"""Calls under way at a time."""

_SETTLING = 0.5
"""Seconds after a change that count for no phase."""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("interfaces", __doc__)
    parser.add_argument(
        "--interfaces", type=comma_separated(str), default=("30mbit", "100mbit"), help="default 30mbit,100mbit"
    )
    parser.add_argument("--down", default="eth1", help="the interface that goes down (default eth1)")
    parser.add_argument("--connections", type=count(2, 64), default=8, help="default 8")
    parser.add_argument("--rtt", default="1ms", help="of a round trip (default 1ms)")
    parser.add_argument("--megabytes", type=count(), default=16, help="of f32 in an all-reduce (default 16)")
    parser.add_argument("--codec", default="raw", help="default raw")
    parser.add_argument("--phase", type=float, default=12.0, help="seconds of each of the three phases (default 12)")
    options = lab_driver.parse(parser, _work)
    if options is None:
        return 0
    if options.smoke:
        options.phase, options.megabytes = 1.5, 1
    flap = Flap(1, options.down, options.phase, 2 * options.phase, BEGUN)

    def make() -> Network:
        delay = f"{float(options.rtt.removesuffix('ms')) / 2:g}ms"
        network = Network(2, delay=delay, interfaces=options.interfaces)
        flap.check(network)
        return network

    network, environment = lab_driver.begin(parser, options, make)
    job = {
        "devices": network.devices,
        "connections": options.connections,
        "numel": options.megabytes << 18,
        "codec": options.codec,
        "seconds": 3 * options.phase,
    }
    found = lab_driver.run("benchmarks.interfaces", job, network, 3 * options.phase + 90, [flap])
    rows = phases(found, network, flap, 3 * options.phase)
    title = (
        f"Two hosts with interfaces of {' and '.join(options.interfaces)}: {options.down} of one goes down for a while"
    )
    driver.finish(
        options,
        "interfaces",
        title,
        environment,
        [{**row, "samples": found["samples"]} if number == 0 else row for number, row in enumerate(rows)],
        rows,
        pictures={"interfaces": lambda: draw(found["samples"], network, flap)},
    )
    return 0


def _work(job: Mapping[str, Any]) -> None:
    """Exchange until the time is up, as one of two ranks; rank 0 prints samples and calls as JSON."""
    settings = config.load()
    given = {"transport": "sockets", "connections": job["connections"], "interfaces": tuple(job["devices"])}
    fl.init(settings=config.Config(**{**vars(settings), **given}))
    values = [torch.randn(job["numel"], generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    mine = values[fl.rank()]
    first = fl.all_reduce(mine.clone(), codec=job["codec"], op=fl.Sum)
    groups = [dist.new_group() for _ in range(_UNDER_WAY)]
    samples: list[list[float]] = []
    ended = threading.Event()
    begin = time.monotonic()

    def look() -> None:
        while not ended.wait(_SAMPLE):
            samples.append([time.monotonic() - begin, *map(sent_bytes, job["devices"])])

    watcher = threading.Thread(target=look)
    watcher.start()
    if fl.rank() == 0:
        Path(os.environ[EVENTS], BEGUN).touch()
    calls: list[list[float]] = []

    def exchange(group: dist.ProcessGroup) -> bool:
        """Call until the time is up; return whether all results were those of the first call."""
        equal, going = True, torch.ones(1)
        while going.item():
            at = time.monotonic() - begin
            tensor = fl.all_reduce(mine.clone(), codec=job["codec"], op=fl.Sum, group=group)
            calls.append([at, time.monotonic() - begin])
            equal = equal and torch.equal(tensor, first)
            going[0] = float(time.monotonic() - begin < job["seconds"]) if fl.rank() == 0 else 0.0
            fl.all_reduce(going, op=fl.Sum, group=group)
        return equal

    with ThreadPoolExecutor(_UNDER_WAY) as pool:
        equal = all(list(pool.map(exchange, groups)))
    ended.set()
    watcher.join()
    if job["codec"] == "raw":
        equal = equal and torch.equal(first, values[0] + values[1])
    both = fl.all_gather(torch.tensor([float(equal), first.double().sum().float().item()])).view(2, 2)
    if fl.rank() == 0:
        alike = bool((both[:, 0] == 1).all() and both[0, 1] == both[1, 1])
        print(json.dumps({"samples": samples, "calls": calls, "equal": alike}), flush=True)
    fl.shutdown()


def phases(found: Mapping[str, Any], network: Network, flap: Flap, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each phase: before, down, after."""
    assert flap.up is not None
    rows = []
    for name, begin, end in (
        ("both up", 0.0, flap.down),
        (f"{flap.device} down", flap.down, flap.up),
        ("both up again", flap.up, seconds),
    ):
        inside = [sample for sample in found["samples"] if begin + _SETTLING <= sample[0] < end]
        first, last = (inside[0], inside[-1]) if inside else ([0.0] * (len(network.devices) + 1),) * 2
        passed = last[0] - first[0] or 1.0
        rates = [8 * (after - before) / passed for before, after in zip(first[1:], last[1:], strict=True)]
        up = [number for number, device in enumerate(network.devices) if device != flap.device or "down" not in name]
        possible = sum(network.rate_of(0, number) or 0.0 for number in up)
        took = [end - begin for begin, end in found["calls"]]
        during = [one for one, (start, _) in zip(took, found["calls"], strict=True) if begin <= start < end]
        rows.append(
            {
                "phase": name,
                **{
                    f"{device}, Mbit/s": round(rate / 1e6, 1)
                    for device, rate in zip(network.devices, rates, strict=True)
                },
                "together, Mbit/s": round(sum(rates) / 1e6, 1),
                "of the rates": f"{sum(rates) / possible:.1%}",
                "calls": len(during),
                "longest call, s": round(max(during, default=0.0), 2),
                "bits equal": found["equal"],
            }
        )
    return rows


def draw(samples: Sequence[Sequence[float]], network: Network, flap: Flap) -> Figure:
    """Return what each interface sends over time."""
    assert flap.up is not None
    figure = drawing.figure(7.0, 2.8)
    axes = figure.subplots()
    step = 5
    times = [sample[0] for sample in samples[step::step]]
    for number, device in enumerate(network.devices, 1):
        pairs = zip(samples[::step], samples[step::step], strict=False)
        rates = [8e-6 * (after[number] - before[number]) / (after[0] - before[0]) for before, after in pairs]
        rate = (network.rate_of(0, number - 1) or 0.0) / 1e6
        axes.plot(times, rates, label=f"{device}, {rate:g} Mbit/s", color=drawing.PALETTE[number - 1])
    axes.axvspan(flap.down, flap.up, color="#eeeeee", label=f"{flap.device} of the other host is down")
    axes.set(xlabel="seconds", ylabel="Mbit/s that leave the host", ylim=(0, None))
    axes.legend(loc="best")
    return figure


if __name__ == "__main__":
    driver.leave(main)
