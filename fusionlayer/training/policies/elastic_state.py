"""The state that all members of an elastic job share, as a newcomer receives it, and results that a member lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ... import context
from ...base.config import flat
from ...base.errors import ConfigError
from ...base.plan import FusionPlan
from ...elastic import Members
from ...native.wire import digest
from ...transport import Transport
from ..parameters import local_part
from ..reducer import Reducer
from ..step_state import StepState
from . import handover
from .handover import Fingerprint


class _Elastic(Protocol):
    """The part of an ``ElasticStepPolicy`` that these functions use."""

    reducer: Reducer
    facts: tuple[object, ...]
    at: int

    @property
    def members(self) -> Members: ...
    def more(self) -> Any: ...
    def begin_with(self, more: Any) -> None: ...


def own_fingerprints(policy: _Elastic) -> dict[str, Fingerprint]:
    """Return the fingerprints of what a newcomer has already, for ``receive_state``."""
    return handover.fingerprints(handover.parted(state_of(policy))[1])


def send_results(results: Mapping[str, Tensor], transport: Transport, to: int) -> None:
    """Send the results of a step, by name, to rank ``to``, which calls ``receive_results``."""
    handover.send({"results": dict(results)}, {}, transport, to)


def receive_results(transport: Transport, source: int) -> dict[str, Tensor]:
    """Return the results that rank ``source`` sends; on the CPU.

    Raises:
        WireError: a message was damaged.
        TransportError: the sender was lost.
    """
    results: dict[str, Tensor] = handover.receive({}, transport, source)["results"]
    return results


_COMPLETE_WHEN_SENT = ("one_shot", "two_shot", "two_level", "grid")
"""Collectives after which ranks have the error feedback of the step before the last message is sent."""


def without_unsure(memory: Mapping[str, Any], plan: FusionPlan | None) -> dict[str, Any]:
    """Return a memory's state after a step whose results this rank lacked, without possibly older state.

    All messages of this rank have arrived, or no rank would have results. So its error feedback is right if it is
    complete before the last message is sent. Otherwise error feedback restarts, so that nothing is sent twice.
    """
    buckets = () if plan is None else plan.buckets
    unsure = {
        name for each in buckets if not each.ahead and each.algorithm not in _COMPLETE_WHEN_SENT for name in each.names
    }
    return {key: {name: x for name, x in kept.items() if name not in unsure} for key, kept in memory.items()}


def tensors_of(policy: _Elastic) -> list[Tensor]:
    """Return the tensors that all members hold alike, in the same order on all of them."""
    replicas = policy.reducer.replicas
    every = (*replicas.named.values(), *replicas.buffers.values())
    return [local_part(x.detach()).as_subclass(Tensor) for x in every]


def facts_of(policy: _Elastic) -> Tensor:
    """Return (32,) uint8 that differ where a newcomer's first step with the members would be a ``PlanMismatch``."""
    settings = flat(context.settings())
    facts = [policy.facts, *(settings[key] for key in _AGREED), policy.reducer.replicas.lines]
    return torch.frombuffer(bytearray(digest(*facts)), dtype=torch.uint8)


def state_of(policy: _Elastic) -> dict[str, Any]:
    """Return the state that all members share: parameters, buffers, states of the optimizer and of objects."""
    members, reducer = policy.members, policy.reducer
    return {
        "tensors": tensors_of(policy),
        "optimizer": reducer.base.state_dict(reducer.optimizer()),
        "shared": members.states(),
        "more": policy.more(),
        "step": members.step,
        "at": policy.at,
    }


def send_state(policy: _Elastic, transport: Transport, to: int) -> None:
    """Send a newcomer the state, as far as it has another one."""
    transport.send(facts_of(policy), to)
    theirs = json.loads(handover.receive_bytes(transport, to))
    known = {name: Fingerprint(*each) for name, each in theirs.items()}
    handover.send(state_of(policy), known, transport, to)


def receive_state(policy: _Elastic, transport: Transport, source: int, own: Mapping[str, Fingerprint]) -> None:
    """Receive what ``send_state`` sends.

    Args:
        policy: the policy of this process.
        transport: over the members.
        source: rank of the sender.
        own: fingerprints of the tensors that it has.

    Raises:
        ConfigError: this process has another model, or shares other objects.
    """
    reducer = policy.reducer
    members, tensors, mine = policy.members, tensors_of(policy), facts_of(policy)
    theirs = torch.empty_like(mine)
    transport.recv(theirs, source)
    if not torch.equal(mine, theirs):
        raise ConfigError(
            f"this process has other parameters, options or settings than the members ({len(tensors)} parameters and "
            f"buffers of {sum(x.numel() for x in tensors)} elements); start it with their script and environment"
        )
    handover.send_bytes(json.dumps(own).encode(), transport, source)
    told = handover.receive(handover.parted(state_of(policy))[1], transport, source)
    with torch.no_grad():
        for x, came in zip(tensors, told["tensors"], strict=True):
            if came.data_ptr() != x.data_ptr():
                x.copy_(came)
    reducer.base.load_state_dict(reducer.optimizer(), told["optimizer"])
    members.load_states(told["shared"])
    members.step, policy.at = told["step"], told["at"]
    policy.begin_with(told["more"])
    reducer.state = StepState.IDLE
    reducer.base.zero_grad(reducer.optimizer())


_AGREED = (
    "codec",
    "codec_options",
    "algorithm",
    "ahead",
    "planner",
    "planner_options",
    "error_feedback",
    "feedback_bits",
    "lanes",
    "checksum",
)
"""Settings that are the same on all members."""
