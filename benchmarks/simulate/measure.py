"""Measures a cost profile in the lab; nothing in it comes from a training step with communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.collective.options import Link
from benchmarks.lab import Network, launch, why_not
from benchmarks.report import Environment
from fusionlayer.planning.connections import way_name
from fusionlayer.planning.profile import PROFILE_VERSION, Machine, Profile
from fusionlayer.planning.profiler import as_codecs, as_curve, as_link, as_model

from .worker import Job

__all__ = ["FULL", "QUICK", "measure", "measure_connections"]

FULL = Job(
    model=None,
    elements=tuple(4**exponent for exponent in range(6, 12)),
    nbytes=tuple(4**exponent for exponent in range(6, 12)),
    steps=20,
    repeats=11,
)
QUICK = replace(FULL, elements=FULL.elements[::2], nbytes=FULL.nbytes[1:-1:2], steps=3, repeats=3)
"""For a look at whether everything works; its figures are rough."""

CROWD = 6
WAY_BYTES = (1 << 20, 4 << 20)
"""Sizes of transfers over a long way; the last one counts."""

TIMEOUT = 600.0


def measure(model: str, rates: Sequence[str], job: Job, environment: Environment) -> Profile:
    """Return the profile of ``model`` on this machine, measured by pairs of workers.

    Model, codecs and the link inside a host come from two workers on one host; then each rate from two hosts. What one
    more message costs comes from the CPU time of an exchange between more workers.

    Raises:
        SystemExit: the lab cannot be made, or the workers failed; the message, or stderr, says why.
    """
    if reason := why_not(Network(2, rates[0])):
        raise SystemExit(f"a profile needs a network between two hosts, which cannot be made here: {reason}")
    _say(f"{model}: step, codecs and the link inside a host")
    local = _run(Network(1), 2, replace(job, model=model))
    _say(f"the cost of a message, among {CROWD} workers")
    crowd = _run(Network(1), CROWD, replace(job, nbytes=()))
    overhead = max(0.0, crowd["call"]["cpu"] - local["call"]["cpu"]) / (CROWD - local["workers"])
    links = {}
    for rate in rates:
        _say(f"{rate}: transfers between two hosts")
        links[rate] = as_link(_run(Network(2, rate), 1, job)["link"], overhead)
    return Profile(
        version=PROFILE_VERSION,
        title=f"{model} on {environment.hardware}",
        environment={key: str(value) for key, value in asdict(environment).items()},
        machine=Machine(len(os.sched_getaffinity(0)), local["workers"], local["threads"]),
        model=as_model(model, local["model"]),
        copy=as_curve(local["copy"]),
        codecs=as_codecs(local["codecs"]),
        links=links,
        inside=as_link(local["link"], overhead),
        disturbance=local["disturbance"],
    )


def measure_connections(links: Sequence[Link], job: Job) -> dict[str, float]:
    """Return what one connection of gloo's carries each way over links, in bits per second, by ``way_name``.

    Raises:
        SystemExit: as for ``measure``.
    """
    found = {}
    for link in links:
        network = Network(2, link.rate, delay=link.delay, loss=link.loss, congestion=link.congestion)
        if reason := why_not(network):
            raise SystemExit(f"what connections carry needs two hosts, which cannot be made here: {reason}")
        _say(f"{network}: one connection")
        told = _run(network, 1, replace(job, nbytes=WAY_BYTES))["link"]
        nbytes, seconds = told["exchange"][-1]
        name = way_name(2 * network.delay_seconds, link.loss, link.congestion)
        found[name] = round(8 * nbytes / (seconds - told["latency"]), -3)
    return found


def _run(network: Network, workers: int, job: Job) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulate.worker", json.dumps(asdict(job))]
    with launch(command, network, workers=workers, timeout=TIMEOUT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        if process.wait() != 0:
            raise SystemExit(f"the workers ended with status {process.returncode}; above is what they said")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
