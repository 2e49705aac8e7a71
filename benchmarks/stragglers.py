"""What a step costs while ranks stall at random, with and without a grace for late ranks, and where the loss ends.

    python -m benchmarks.stragglers [--rate 25mbit] [--stall 200] [--chance 0.02] [--grace 25] [--out FOLDER]

Each of four hosts trains the same GPT with int4 by two_shot. In each step each rank stalls with some chance before its
backward: it sleeps. The same ranks stall in the same steps of each run. "median" and "p99", the 99th percentile, are of
all steps of all ranks in which the rank itself did not stall: what the stalls of the others cost it. "whole run" is the
time until the last rank has made the last step. "loss" is the mean over all ranks of the last 20 steps' training
losses. "missed" are the sums of buckets that went on without a late rank, of all sums and ranks.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import fusionlayer as fl
from benchmarks import driver, lab_driver
from benchmarks.arguments import count
from benchmarks.lab import Network
from benchmarks.training.workloads import make_workload
from fusionlayer import metrics
from fusionlayer.cli import drawing
from fusionlayer.scheduler import planners

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["main", "picture", "steps_of", "table"]

HOSTS = 4
FIRST = 30
"""Steps that do not count: the first ones learn the plan and open windows. Nobody stalls in them."""
BUCKET = 512 << 10
"""Bytes of a bucket's gradients. A rank that comes in the middle of a step still has its part in the later buckets."""
LAST = 20
"""Steps whose losses are averaged."""
CALM, ALL_WAIT, GRACE = "no stalls", "stalls, all wait", "stalls, with grace"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("stragglers", __doc__)
    parser.add_argument("--rate", default="25mbit", help="of each host's link (default 25mbit)")
    parser.add_argument("--stall", type=count(), default=200, help="milliseconds of a stall (default 200)")
    parser.add_argument("--chance", type=float, default=0.02, help="of each rank to stall in a step (default 0.02)")
    parser.add_argument("--grace", type=count(), default=25, help="milliseconds (default 25)")
    parser.add_argument("--steps", type=count(), default=140, help="default 140")
    parser.add_argument("--transport", choices=("c10d", "sockets"), default="c10d", help="default c10d")
    options = lab_driver.parse(parser, _work)
    if options is None:
        return 0
    first = FIRST
    if options.smoke:
        first, options.steps, options.stall = 4, 8, 50
    network, environment = lab_driver.begin(parser, options, lambda: Network(HOSTS, rate=options.rate))
    job = {"first": first, "steps": options.steps, "chance": options.chance, "transport": options.transport}
    rows: list[dict[str, Any]] = []
    for run, stall, grace in ((CALM, 0, None), (ALL_WAIT, options.stall, None), (GRACE, options.stall, options.grace)):
        this = {**job, "stall": stall / 1000, "grace": grace and grace / 1000}
        rows.append({"run": run, **lab_driver.run("benchmarks.stragglers", this, network, 300)})
    title = (
        f"Steps of a GPT on {HOSTS} hosts with links of {options.rate}, int4, transport {options.transport}; each rank "
        f"stalls for {options.stall} ms in {options.chance:.0%} of its steps, grace {options.grace} ms"
    )
    shown = table(rows)
    results = [{**row, **line} for row, line in zip(rows, shown, strict=True)]
    name = f"stragglers-{100 * options.chance:g}-percent" + ("-sockets" if options.transport == "sockets" else "")
    driver.finish(options, name, title, environment, results, shown, pictures={"stragglers": lambda: picture(results)})
    return 0


def steps_of(row: Mapping[str, Any]) -> list[float]:
    """Return the seconds of all steps of all ranks in which the rank itself did not stall."""
    return [
        end - start
        for ends, stalled in zip(row["ends"], row["stalled"], strict=True)
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False))
        if number not in stalled
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each run; losses are compared with those of the first."""
    lines = []
    for row in rows:
        steps = steps_of(row)
        median, late = np.median(steps), np.percentile(steps, 99)
        whole = max(times[-1] for times in row["ends"]) - min(times[0] for times in row["ends"])
        lines.append(
            {
                "run": row["run"],
                "median ms": round(1e3 * float(median), 1),
                "p99 ms": round(1e3 * float(late), 1),
                "p99 / median": round(float(late / median), 3),
                "whole run": f"{whole:.1f} s",
                "stalls": sum(map(len, row["stalled"])),
                "missed %": round(100 * sum(row["missed"]) / sum(row["sums"]), 2),
                "loss": round(row["loss"], 4),
                "loss beside the first %": round(100 * (row["loss"] / rows[0]["loss"] - 1), 2),
                "bits equal": row["equal"],
            }
        )
    return lines


def picture(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the steps of each run, in ascending order, as lines."""
    figure = drawing.figure(7.0, 3.0)
    axes = figure.subplots()
    for row, colour in zip(rows, (drawing.GREY, drawing.PALETTE[1], drawing.PALETTE[0]), strict=True):
        steps = np.sort(steps_of(row))
        axes.plot(100 * (np.arange(len(steps)) + 0.5) / len(steps), 1e3 * steps, color=colour, label=row["run"])
    axes.set(
        xlabel="percent of the steps that are shorter, of ranks that do not stall themselves",
        ylabel="milliseconds",
        xlim=(0, 100),
        ylim=(0, None),
    )
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle("With a grace, the stalls of a rank hold up the others little", x=0.01, ha="left")
    return figure


def _work(job: Mapping[str, Any]) -> None:
    """Train as one of the workers; rank 0 prints what was found as JSON."""
    if job["grace"] is not None:
        os.environ["FUSIONLAYER_GRACE"] = str(job["grace"])
    torch.set_num_threads(1)
    fl.init(transport=job["transport"])
    workload = make_workload("gpt-small", 1, fl.rank())
    workload.batch_size = 1  # compute little: workers share cores, and would be late of themselves
    model = workload.model()
    fusing = planners.get("horovod", threshold=BUCKET)
    wrapped = workload.optimizer(model)
    optimizer = fl.DistributedOptimizer(wrapped, model, codec="int4", algorithm="two_shot", planner=fusing)
    chosen = random.Random(fl.rank())
    ends: list[float] = []
    losses: list[float] = []
    stalled: list[int] = []
    for step in range(job["first"] + job["steps"]):
        if step == job["first"] - 1:
            gc.collect()
            gc.freeze()  # a collection of all objects would take as long as a stall, on all ranks in the same step
        inputs, targets = workload.batch(step)
        loss = model(inputs, targets)
        if chosen.random() < job["chance"] and step >= job["first"] and job["stall"]:
            stalled.append(step - job["first"])
            time.sleep(job["stall"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.monotonic())
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    plan = optimizer.fusion_plan
    mine = {
        "ends": ends[job["first"] - 1 :],
        "loss": float(np.mean(losses[-LAST:])),
        "stalled": stalled,
        "digest": hashlib.sha256(parameters).hexdigest(),
        "missed": metrics.read().get("sums_missed", 0.0),
        "sums": len(ends) * (0 if plan is None else len(plan.buckets)),
    }
    every: list[Any] = [None] * fl.size()
    dist.all_gather_object(every, mine)
    if fl.rank() == 0:
        found: dict[str, Any] = {name: [each[name] for each in every] for name in ("ends", "stalled", "missed", "sums")}
        found["equal"] = len({each["digest"] for each in every}) == 1
        found["loss"] = float(np.mean([each["loss"] for each in every]))
        print(json.dumps(found), flush=True)
    optimizer.close()
    fl.shutdown()


if __name__ == "__main__":
    driver.leave(main)
