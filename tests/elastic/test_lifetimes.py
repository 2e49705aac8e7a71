"""What a generation of an elastic job has used is freed with it, by reference counts alone."""

import gc
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import TransportError
from tests.harness import checkpoint, outcomes_of

from .worker import begin

pytestmark = pytest.mark.medium


def train(rank: int, world: int, folder: str) -> list[list[str]]:
    """Lose rank 0; then a rank's links in the middle of backward, those of a call of the user, those at a step's end.

    Return what is still there of each generation that has ended, while Python's collector of cycles does not run.
    """
    begin(rank, folder, world)
    members = fl.membership()
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer: Any = fl.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model, codec="int4", error_feedback=True
    )
    agree = members.agree

    def step(in_backward: Callable[[], None] = _nothing, at_end: Callable[[], None] = _nothing) -> None:
        def at_the_end(number: int, transport: Any) -> None:
            at_end()
            agree(number, transport)

        hook = model[0].weight.register_hook(lambda gradient: in_backward())
        members.agree = at_the_end  # type: ignore[method-assign]
        model(torch.full((2, 40), rank + 1.0)).square().mean().backward()
        hook.remove()
        optimizer.step()
        members.agree = agree  # type: ignore[method-assign]
        optimizer.zero_grad()

    def lose_self() -> None:
        if rank == 0:
            checkpoint("lost")

    def lose_links() -> None:
        if rank == 1:
            for lane in optimizer.reducer.engine.lanes.all:
                lane.transport.close()

    def lose_a_call() -> None:
        if rank == 1:
            members.transport.close()
        with suppress(TransportError):
            fl.all_reduce(torch.ones(3))
        lose_links()

    left = []
    disturbances: list[dict[str, Any]] = [
        {"in_backward": lose_self},
        {"in_backward": lose_links},
        {"in_backward": lose_a_call},
        {"at_end": lose_links},
    ]
    for disturbed in disturbances:
        step()
        gc.collect()
        gc.disable()
        generation, known = members.generation, _used(optimizer)
        step(**disturbed)
        step()  # what fails at the end of a step is found in the next one
        assert members.generation > generation
        step()
        end = time.monotonic() + 180
        while any(each() is not None for each in known.values()) and time.monotonic() < end:
            time.sleep(0.01)  # a thread that has just asked the lost rank's store ends when it hears of that
        left.append([name for name, each in known.items() if each() is not None])
        gc.enable()
    return left


def _nothing() -> None:
    """Disturb nothing."""


def _used(optimizer: Any) -> dict[str, weakref.ref[Any]]:
    """Return references, by name, to what the present generation uses, which do not keep it."""
    engine = optimizer.reducer.engine
    transports = {f"lane {number}": lane.transport for number, lane in enumerate(engine.lanes.all)}
    transports["members"] = optimizer.reducer.policy.members.transport
    found = {"engine": engine, "memory": engine.memory, **transports}
    for name, transport in transports.items():
        found |= {f"watch of {name}": transport._watch, f"link of {name}": transport._links["cpu"]}
    return {name: weakref.ref(each) for name, each in found.items()}


def test_what_a_generation_has_used_is_freed_without_the_collector_of_cycles(tmp_path: Path) -> None:
    signals = {(0, "lost"): signal.SIGKILL}
    outcomes = outcomes_of(train, 3, str(tmp_path), signals=signals, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["died", "returned", "returned"], outcomes
    assert [outcome.value for outcome in outcomes[1:]] == [[[]] * 4] * 2
