"""Compares what the model of a transfer says of long and lossy links with calls that were measured on them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusionlayer import collectives
from fusionlayer.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.collective_phases import Phase, exchange_phases, message_phases
from fusionlayer.planning.cost_model import FREE
from fusionlayer.planning.profile import Profile

from .validate import rtt_of

__all__ = ["predicted_calls", "read_calls"]

_NEGOTIATION_BYTES = 24
"""Of the record that ranks exchange before each call of a function: a digest, and a number for each of two ranks."""


def read_calls(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file of ``benchmarks.collective`` that are functions of ``fusionlayer`` with a codec.

    Raises:
        ConfigError: it is no such file, or has no such rows.
    """
    try:
        rows = [row for row in json.loads(path.read_text())["rows"] if re.search(" over ", row["operation"])]
        if not rows:
            raise ValueError("no row of a function over gloo or connections")
        for row in rows:
            if not (row["seconds"] and isinstance(row["rate"], str) and row["world"] >= 2):
                raise ValueError(f"rate={row['rate']!r}, world={row['world']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} has no calls over links of one rate: {error!r}; expected results of benchmarks.collective --links"
        ) from error
    return rows


def predicted_calls(rows: Sequence[Mapping[str, Any]], profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield each row beside its prediction, for a table and a result file."""
    for row in rows:
        function, way = row["operation"].split(" over ")
        connections = None if way == "gloo" else int(way.split()[0])
        rtt = rtt_of(row)
        congestion = way.partition(" of ")[2] or row["congestion"]
        scenario = Scenario(
            row["rate"], cores=1.0, rtt=rtt, loss=row["loss"], congestion=congestion, connections=connections
        )
        phases = _phases(function, row["codec"], row["size"] / 4, profile, scenario, row["world"])
        predicted, measured = sum(phase.seconds for phase in phases), statistics.median(row["seconds"])
        yield {
            "rate": row["rate"],
            "rtt, ms": f"{1e3 * rtt:g}",
            "loss": row["loss"],
            "congestion": congestion,
            "function": function,
            "over": way,
            "codec": row["codec"],
            "MB": f"{row['size'] / 2**20:g}",
            "measured ms": round(measured * 1e3, 1),
            "predicted ms": round(predicted * 1e3, 1),
            "error": f"{predicted / measured - 1:+.1%}",
        }


def _phases(
    function: str, name: str, elements: float, profile: Profile, scenario: Scenario, workers: int
) -> list[Phase]:
    """Return what a call of the function consists of: ranks agree first, then messages travel."""
    codec, cluster = profile.codec(name), scenario.cluster(profile, workers)
    assert cluster.connections is not None
    cluster = replace(cluster, connections=replace(cluster.connections, rested=True))  # calls come after pauses
    agreement = exchange_phases(cluster, _NEGOTIATION_BYTES)
    if function == "all_reduce":
        algorithm = collectives.choose(codec, workers, ahead=None)
        return [*agreement, *message_phases(algorithm, elements, codec, cluster, FREE)]
    piece = elements / workers
    encoded = codec.encode(piece if function == "all_gather" else elements)
    decoded = codec.decode(elements)
    work = [Phase(seconds, seconds) for seconds in (encoded, decoded)]
    return [*agreement, work[0], *exchange_phases(cluster, codec.nbytes(piece)), work[1]]
