"""Compares predicted with measured sums between hosts whose links have unequal rates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.unequal import BY_SHARES, EQUAL
from fusionlayer.errors import ConfigError
from fusionlayer.planning.bucket_costs import BucketCosts
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.cost_model import parse_rate
from fusionlayer.planning.prediction import PlannedBucket, Resources, predict
from fusionlayer.planning.profile import Gradient, Model, Profile
from fusionlayer.scheduler import LANES

from .validate import rtt_of

__all__ = ["predicted_sums", "read_sums"]

_NEEDED = ("rates", "buckets", "numel", "rtt", "seconds", "codec")


def read_sums(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file of ``benchmarks.unequal`` that are sums of an engine.

    Raises:
        ConfigError: it is no such file, or was written before rows had the rates.
    """
    try:
        rows = [row for row in json.loads(path.read_text())["rows"] if row["operation"] in (EQUAL, BY_SHARES)]
        if not rows or any(key not in row for row in rows for key in _NEEDED):
            raise ValueError(f"no row with {', '.join(_NEEDED)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no such sums: {error!r}; expected results of benchmarks.unequal") from error
    return rows


def predicted_sums(rows: Sequence[Mapping[str, Any]], profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield each row beside its prediction, for a table and a result file."""
    for row in rows:
        rates = tuple(row["rates"])
        scenario = Scenario(
            min(rates, key=parse_rate),
            cores=profile.machine.cores / len(rates),
            rtt=rtt_of(row),
            rates=rates if row["operation"] == BY_SHARES else (),
        )
        cluster = scenario.cluster(profile, len(rates))
        costs = BucketCosts.of(profile, profile.codec(row["codec"]), "two_shot", cluster)
        tensors = [Gradient(str(number), row["numel"] // row["buckets"], 0.0) for number in range(row["buckets"])]
        buckets = [PlannedBucket([tensor.name], costs) for tensor in tensors]
        resources = Resources(cluster.cores, 1, LANES)
        predicted = predict(Model("sums", 0.0, 0.0, 0.0, tuple(tensors)), buckets, resources).seconds
        measured = statistics.median(row["seconds"])
        yield {
            "rates": ", ".join(rates),
            "operation": row["operation"],
            "codec": row["codec"],
            "buckets": row["buckets"],
            "measured ms": round(measured * 1e3, 1),
            "predicted ms": round(predicted * 1e3, 1),
            "error": f"{predicted / measured - 1:+.1%}",
        }
