"""Rank 0 is stopped while those that a launcher has started meet for an elastic job."""

import signal
from pathlib import Path
from typing import Any

import pytest

from fusionlayer import launch
from fusionlayer.elastic import Members
from tests.harness import checkpoint, outcomes_of
from tests.tiers import exhaustive

from .worker import begin

pytestmark = pytest.mark.medium


def meet(rank: int, world: int, folder: str, amid: str) -> None:
    """Begin an elastic job; rank 0 reaches the checkpoint "stopped" while ranks count, or members meet."""

    def stop(*given: Any) -> Any:
        checkpoint("stopped")

    if rank == 0:
        owner, name = (launch, "node_name") if amid == "count" else (Members, "_open_next")
        setattr(owner, name, stop)
    begin(rank, folder, world, timeout="4")


@exhaustive(guarded_by="tests/transport/test_connecting.py::test_a_rank_that_is_lost_while_ranks_connect_is_named")
@pytest.mark.parametrize("amid", ["count", "members"])
def test_a_rank_that_is_stopped_while_they_meet_is_told_in_time(tmp_path: Path, amid: str) -> None:
    outcomes = outcomes_of(meet, 2, str(tmp_path), amid, signals={(0, "stopped"): signal.SIGSTOP}, backend=None)
    assert [o.kind for o in outcomes] == ["hung", "raised"], outcomes
    assert outcomes[1].error[0] == "TransportError", outcomes[1]
    assert ("the store by which the ranks meet" if amid == "count" else "while they met") in outcomes[1].error[1]
