"""``fusionlayer explain``: the buckets of a plan, when each is predicted to travel, and why."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import codecs
from ..plan import Bucket, FusionPlan
from ..planning.bucket_costs import BucketCosts, codec_cost, codec_of, costs_of, short_name
from ..planning.cluster import Scenario
from ..planning.prediction import plan_costs, predict_plan
from ..planning.profile import Profile
from ..planning.simulation import Step
from ..planning.zipped_costs import expected_costs
from ..scheduler.fusing import check_pairs
from .arguments import add_cluster, check_file, scenario_of
from .tables import print_table

__all__ = ["add_parser"]

_ZIP = "zip"
_SWITCH_SIZES = (1 << 20, 16 << 20)

_EPILOG = """\
Times are seconds after the start of backward, predicted for one communication thread with a core of its own. F and C
are SAFusion's (section 3.3): until the bucket's gradients are there, encoded if that is done ahead; and on the
communication thread. Idle is its W: the communication thread had nothing to send before the bucket was ready.
Where the profile has costs of codec zip, a last table has what lossless collectives take as they are and zipped.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "explain",
        help="print a plan's buckets, tensors, codecs and predicted timeline",
        description="Explain a fusion plan by a measured profile of its model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml", help="as `fusionlayer plan` writes it")
    add_cluster(parser)
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the timeline (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what ``options`` ask for."""
    if options.plot:
        check_file(options.plot, "--plot")
    profile = Profile.from_yaml(options.profile)
    plan = FusionPlan.from_yaml(options.plan)
    check_pairs(plan)
    scenario = scenario_of(options, profile)
    measured = options.rate is None
    costs = plan_costs(profile, plan, scenario, measured)
    found = predict_plan(profile, plan, scenario, measured)
    network = f"{plan.world_size} workers, {scenario.rate}"
    _show_buckets(f"{profile.title}: {network}", profile, plan, found)
    _show_tensors(profile, plan, costs, _alone(profile, scenario, plan.world_size, measured))
    _show_switch(profile, scenario, plan.world_size)
    print(
        f"Backward, with what is encoded in it: {_ms(found.alone)} ms. Last result: {_ms(found.seconds)} ms. The "
        f"optimizer waits {_ms(found.waiting)} ms{_disturbed(costs)}; communication is idle for {_ms(found.idle)} ms "
        "between buckets."
    )
    if options.plot:
        from .lanes import draw

        draw(options.plot, f"{profile.title}: {network}", profile, plan, costs, found)
        print(options.plot)


def _disturbed(costs: Sequence[BucketCosts]) -> str:
    seconds = sum(cost.disturbance for cost in costs[:-1])  # nothing is computed after the last bucket
    return f", {_ms(seconds)} ms of that because buckets disturb backward" if seconds else ""


def _show_buckets(title: str, profile: Profile, plan: FusionPlan, found: Step) -> None:
    rows = []
    computed = 0.0
    for number, (bucket, span) in enumerate(zip(plan.buckets, found.spans, strict=True)):
        elements = sum(slot.numel for slot in bucket.slots)
        nbytes = codec_cost(profile, codec_of(bucket)).nbytes(elements)
        rows.append(
            (
                str(number),
                str(len(bucket.slots)),
                str(elements),
                f"{nbytes / 1e3:.1f}",
                short_name(codec_of(bucket)),
                f"{bucket.algorithm}, {'ahead' if bucket.ahead else 'behind'}",
                *map(_ms, (span.ready - computed, span.end - span.start)),
                *map(_ms, (span.ready, span.start, span.end, span.idle)),
            )
        )
        computed = span.ready
    columns = ["bucket", "tensors", "elements", "kB", "codec", "travels by", "F ms", "C ms", "ready", "start", "end"]
    print_table(title, [*columns, "idle"], rows, right=(0, 1, 2, 3, 6, 7, 8, 9, 10, 11))


def _show_tensors(profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], raw: BucketCosts | None) -> None:
    bucket_of = {name: i for i, bucket in enumerate(plan.buckets) for name in bucket.names}
    rows = []
    for tensor in profile.model.tensors:
        index = bucket_of[tensor.name]
        bucket = plan.buckets[index]
        why = _why(tensor.numel, bucket, costs[index], profile, raw)
        rows.append((tensor.name, str(tensor.numel), str(index), short_name(codec_of(bucket)), why))
    print_table("Tensors, in order of arrival", ("tensor", "elements", "bucket", "codec", "why"), rows, right=(1, 2))


def _show_switch(profile: Profile, scenario: Scenario, workers: int) -> None:
    """Print the size from which zipping is predicted to make lossless collectives faster."""
    if _ZIP not in profile.codecs or workers < 2:
        return
    rows = []
    for kind, costs in expected_costs(profile, scenario, workers, _ZIP).items():
        threshold = costs.zips_from()
        sizes = [f"{_ms(seconds)}" for size in _SWITCH_SIZES for seconds in costs.seconds(size)]
        rows.append((kind, *sizes, "never" if threshold == math.inf else f"{threshold / 1e3:.1f} kB"))
    columns = [f"{size >> 20} MiB {form}" for size in _SWITCH_SIZES for form in ("native", "zipped")]
    title = (
        f"Lossless collectives of f32, native or by {_ZIP}: ms by bytes that a worker sends (ZipCCL, equations 6, 7)"
    )
    print_table(title, ("collective", *columns, "zipped from"), rows, right=range(1, 2 + len(columns)))


def _alone(profile: Profile, scenario: Scenario, workers: int, measured: bool) -> BucketCosts | None:
    """Return the costs of sending values uncompressed, if the profile has them."""
    if "raw" not in profile.codecs:
        return None
    return costs_of(profile, codecs.get("raw"), "dense", scenario, workers, measured)


def _why(elements: int, bucket: Bucket, cost: BucketCosts, profile: Profile, raw: BucketCosts | None) -> str:
    """Return a text: the codec's bits, and its cost for the tensor by itself, compared with raw."""
    bits = codec_cost(profile, codec_of(bucket)).bits
    words = f"{bits:.3g} bits an element; alone {_ms(cost.alone(elements))} ms"
    if raw is None or bucket.codec == "raw":
        return words
    saved = raw.alone(elements) - cost.alone(elements)
    return f"{words}, {_ms(abs(saved))} ms {'less' if saved >= 0 else 'MORE'} than raw"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
