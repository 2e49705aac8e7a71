"""A planner's costs from a profile: the phases of the simulation, sorted by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import collectives
from ..scheduler.planners import StepCosts
from .cost_model import FREE, CodecCost, Cost, LinkCost
from .profile import Profile, Tensor
from .simulation import Cluster, message_phases

__all__ = ["backward_seconds", "step_costs"]

_NO_LINK = LinkCost(0.0, 0.0, 0.0, FREE, FREE)


def step_costs(
    profile: Profile, codec: CodecCost, algorithm: str, cluster: Cluster, transfer: Cost | None = None
) -> StepCosts:
    """Return what a step of the profile's model costs on ``cluster``.

    Args:
        profile: costs of the model and of copies.
        codec: that encodes every bucket.
        algorithm: a key of ``ALGORITHMS``; if it gathers, gradients are encoded ahead, straight into their messages.
        cluster: the ranks.
        transfer: measured seconds of the collective by bytes of a rank's message, in place of what links cost.
    """
    ahead = algorithm in collectives.gather_names()
    copy: Cost = FREE if ahead else profile.copy
    offline = replace(cluster, between=_NO_LINK, inside=_NO_LINK)
    free = replace(codec, encode=FREE, decode=FREE, sum=FREE, recode=FREE)
    encoding = replace(free, encode=codec.encode)
    decoding = replace(free, decode=codec.decode, sum=codec.sum)
    between = replace(free, recode=codec.recode)

    def seconds(elements: float, of: CodecCost, where: Cluster, copying: Cost) -> float:
        return sum(phase.seconds for phase in message_phases(algorithm, elements, of, where, copying, unpack=False))

    def encode(elements: float) -> float:
        return seconds(elements, encoding, offline, copy)

    def decode(elements: float) -> float:
        unpacking = copy(elements) if cluster.workers > 1 else 0.0
        return seconds(elements, decoding, offline, FREE) + unpacking

    def communicate(elements: float) -> float:
        if transfer is None:
            return seconds(elements, between, cluster, FREE)
        return transfer(codec.nbytes(elements)) + seconds(elements, between, offline, FREE)

    backward = backward_seconds(profile.model.tensors)
    disturbance = profile.disturbance * (2 if algorithm == "two_shot" else 1)
    return StepCosts(backward, encode, decode, communicate, communicate(1), ahead, disturbance)


def backward_seconds(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Return the seconds of backward for each tensor, by name: since the one before it arrived."""
    arrivals = [0.0, *(tensor.ready for tensor in tensors)]
    return {t.name: max(0.0, t.ready - before) for t, before in zip(tensors, arrivals, strict=False)}
