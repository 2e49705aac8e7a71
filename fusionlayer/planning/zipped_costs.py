"""The costs of zipped collectives from a profile, by equations 6 and 7 of ZipCCL."""

from __future__ import annotations

from ..collectives.switching import KINDS, Costs
from .cluster import Scenario
from .cost_model import AlphaBeta, CodecCost, Cost
from .profile import Profile

_MANY = 1 << 20
_F32 = 4


def expected_costs(profile: Profile, scenario: Scenario, workers: int, codec: str = "zip") -> dict[str, Costs]:
    """Return the costs of both forms, native and zipped, of every collective of f32.

    They are by bytes that a rank sends in the native form. For each exchange of the native form the zipped one takes a
    further latency. It sends the codec's share of the bytes, and encodes and decodes. ``Switcher`` takes the costs as
    ``expected``.
    """
    cost = profile.codec(codec)
    link = scenario.cluster(profile, workers).between.fitted()
    latency = link.latency + (workers - 2) * link.overhead
    exchange, reduce = _slope(link.exchange), _slope(link.all_reduce)
    others, share = workers - 1, (workers - 1) / workers
    encode, decode, total, recode = (_slope(verb) for verb in (cost.encode, cost.decode, cost.sum, cost.recode))
    # Seconds of the codec for each element that a rank sends.
    work = {
        "all_gather": encode / others + decode,
        "all_to_all": encode + decode,
        "reduce_scatter": (encode + total) / share,
        "all_reduce": (encode + recode + decode) / (2 * share),
    }
    native = {kind: AlphaBeta(latency, exchange) for kind in KINDS}
    native["all_reduce"] = AlphaBeta(2 * others * link.latency, reduce)
    exchanges = {kind: 4 if kind == "all_reduce" else 2 for kind in KINDS}
    zipped = {kind: AlphaBeta(exchanges[kind] * latency, exchange) for kind in KINDS}
    return {kind: Costs(native[kind], zipped[kind], _factor(cost), codec=work[kind] / _F32) for kind in KINDS}


def _slope(cost: Cost) -> float:
    return cost.beta if isinstance(cost, AlphaBeta) else cost(_MANY) / _MANY


def _factor(cost: CodecCost) -> float:
    return cost.bits / (8 * _F32)
