"""What ranks that are processes are told when they wait for each other in vain."""

import atexit
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusionlayer.torch as hvd
from fusionlayer import coordination
from fusionlayer.transport import local
from tests.harness import checkpoint, outcomes_of, run_ranks


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def stall(rank: int, world: int) -> tuple[str, list[str]]:
    os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="0.5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3")
    lines = Lines()
    logging.getLogger("fusionlayer").addHandler(lines)
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="together").tolist() == [world] * 3
    text = ""
    try:
        hvd.allreduce(torch.ones(1000), name="only.rank.0" if rank == 0 else "not.rank.0")
    except hvd.HorovodInternalError as error:
        text = str(error)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} knows", "")
    store.wait([f"rank {other} knows" for other in range(world)])  # what a rank is told comes from rank 0
    hvd.shutdown()
    return text, lines.lines


@pytest.mark.medium
def test_stalls_are_named_and_end() -> None:
    found = run_ranks(stall, 3)
    for text, _ in found:
        assert "waited longer than 3 s" in text
        assert "allreduce 'only.rank.0' (ranks [1, 2] missing" in text
        assert "allreduce 'not.rank.0' (ranks [0] missing" in text
    assert any("stalled for more than 0.5 s" in line and "only.rank.0" in line for line in found[0][1])


def test_ranks_in_different_operations_hear_of_it_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination.session, "_BLOCKED_AFTER", 0.2)

    def rank_main(rank: int) -> None:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 in barrier .*, rank 1 in allreduce 'x'; make the"):
            hvd.barrier() if rank == 0 else hvd.allreduce(torch.ones(1), name="x")
        assert hvd.allreduce(torch.ones(1), name="y", op=hvd.Sum).item() == 2
        hvd.shutdown()

    local.run(rank_main, 2)


def lose(rank: int, world: int) -> None:
    hvd.init()
    first = int(hvd.broadcast(torch.tensor(os.getpid()), 0))
    hvd.allreduce(torch.ones(1 << 16), name="before")
    checkpoint("now")
    while rank == 2 and Path(f"/proc/{first}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    try:
        while True:
            hvd.allreduce(torch.ones(1 << 16), name="after")
    except hvd.HorovodInternalError:
        atexit._run_exitfuncs()  # what a program runs that this error ends
        raise


@pytest.mark.medium
def test_a_rank_that_is_killed_ends_the_others_operations() -> None:
    found = outcomes_of(lose, 3, signals={(1, "now"): signal.SIGKILL})
    assert found[1].kind == "died"
    for rank in (0, 2):  # rank 2 asks when rank 0, which coordinates, has left because of rank 1
        assert found[rank].attributes["ranks"] == (1,) and "rank 1 is lost" in found[rank].error[1], found[rank]


def ask_in_vain(rank: int, world: int) -> None:
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    checkpoint("now")
    hvd.allreduce(torch.ones(3), name="after")


@pytest.mark.medium
def test_a_coordinator_that_is_stopped_is_named_where_waits_have_a_limit() -> None:
    found = outcomes_of(ask_in_vain, 2, signals={(0, "now"): signal.SIGSTOP})
    assert found[1].attributes["ranks"] == (0,), found
    assert "rank 1: rank 0, which coordinates, has not answered for 2 s" in found[1].error[1], found


def leave(rank: int, world: int) -> str:
    hvd.init()
    if rank == 1:
        hvd.shutdown()
        return ""
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(2), name="without.1")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.join()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not initialized"):
        hvd.rank()
    return str(error.value)


@pytest.mark.medium
def test_a_rank_that_leaves_is_named() -> None:
    found = run_ranks(leave, 3)
    assert "rank 1 has shut down" in found[0] and "rank 1 has shut down" in found[2]


def again(rank: int, world: int) -> list[float]:
    found = []
    for _ in range(3):
        hvd.init()
        found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.barrier()
        hvd.shutdown()
    return found


@pytest.mark.medium
def test_a_job_may_begin_again() -> None:
    assert run_ranks(again, 2) == [[2.0] * 3] * 2
