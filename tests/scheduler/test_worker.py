import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from fusionlayer.base.errors import FusionLayerError, PlanMismatch, TransportError, UsageError, WireError
from fusionlayer.base.plan import Bucket, Slot
from fusionlayer.scheduler import Worker, located
from fusionlayer.scheduler.lanes import Lane
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads

PATIENCE = 180


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_jobs_run_in_their_order_on_one_thread() -> None:
    worker, seen = Worker("in order"), []
    for number in range(20):
        job = worker.put(lambda number=number: seen.append((number, threading.current_thread().name)))
    job.wait()
    assert seen == [(number, "in order") for number in range(20)]
    worker.close()


def test_the_first_failure_is_the_last_job_that_runs() -> None:
    worker, gate, seen = Worker("failing"), threading.Event(), []

    def fail() -> None:
        assert gate.wait(PATIENCE)
        raise KeyError("first")

    before = worker.put(lambda: seen.append("before"))
    failing = worker.put(fail, lambda: seen.append("failing abandoned"))
    after = worker.put(lambda: seen.append("after"), lambda: seen.append("after abandoned"))
    gate.set()
    before.wait()
    for job in (failing, after, failing):
        with pytest.raises(KeyError, match="first"):
            job.wait()
    with pytest.raises(KeyError, match="first"):
        worker.put(lambda: seen.append("late"))
    assert seen == ["before", "failing abandoned", "after abandoned"]
    assert isinstance(worker.error, KeyError)
    worker.close()


def test_closing_lets_queued_jobs_end() -> None:
    worker, gate, seen = Worker("closing"), threading.Event(), []
    worker.put(lambda: gate.wait(PATIENCE))
    last = worker.put(lambda: seen.append("ran"))
    (thread,) = threads_named("closing")
    worker.close()
    worker.close()
    with pytest.raises(FusionLayerError, match="closing is closed"):
        worker.put(lambda: None)
    gate.set()
    last.wait()
    thread.join(PATIENCE)
    assert seen == ["ran"] and not thread.is_alive() and thread.daemon


def test_a_forked_child_does_not_wait_for_a_job_of_its_parent() -> None:
    worker, gate = Worker("of the parent"), threading.Event()
    job = worker.put(lambda: gate.wait(PATIENCE))
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends a child that waits
        try:
            job.wait()
        except UsageError as error:
            os._exit("a thread of its parent" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    job.wait()
    worker.close()


@on_threads(1)
def test_lanes_record_no_gradients(transport: Transport) -> None:
    lane, seen = Lane(transport, torch.device("cpu"), "a lane"), []
    lane.put(lambda _: seen.append(torch.is_grad_enabled())).wait()
    lane.close()
    assert seen == [False]


# A job of the first worker is in C++ when the program ends, and comes back soon; one of the second never comes back.
# The first is late on purpose: an exit that does not wait is over by then.
ENDS_AMID_JOBS = """
import atexit, datetime, os, sys, time
import torch.distributed as dist
from fusionlayer.scheduler import Worker

if "forked" in sys.argv and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
store, began = dist.HashStore(), dist.HashStore()

def come_back():
    began.set("0", "")
    store.wait(["the program ends"], datetime.timedelta(seconds=180))
    time.sleep(0.3)
    os.write(1, b"back")

def stay():
    began.set("1", "")
    dist.HashStore().wait(["never"], datetime.timedelta(seconds=60))

Worker("returning").put(come_back)
Worker("staying").put(stay)
began.wait(["0", "1"], datetime.timedelta(seconds=180))
atexit.register(store.set, "the program ends", "")
"""


@pytest.mark.medium
@looped("how", ["alone", "forked"])
def test_a_program_that_ends_waits_for_a_job_that_is_in_torch(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_AMID_JOBS, how], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "back"), done.stderr


# ---- errors told in the user's terms --------------------------------------------------------------------------------

BUCKET = Bucket(tuple(Slot(name, 1, i) for i, name in enumerate("abcde")), 5, "float32", "raw")


@on_threads(1)
def test_errors_say_where_they_belong(transport: Transport) -> None:
    transport.barrier()
    with pytest.raises(TransportError) as lost, located(7, 2, BUCKET, transport):
        raise TransportError("rank 1 left", ranks=[1])
    assert str(lost.value) == "step 7, bucket 2 (a, b, c and 2 more): rank 1 left"
    assert (lost.value.ranks, lost.value.bucket, lost.value.tensors) == ((1,), 2, tuple("abcde"))
    assert lost.value.sequence == transport.sequence == 1
    with pytest.raises(TransportError) as lost, located(7, 2, BUCKET, transport):
        raise TransportError("rank 1 left", sequence=5)
    assert lost.value.sequence == 5
    for kind in (WireError, PlanMismatch):
        where = r"step 0, bucket 1 \(a, b, c and 2 more\): damaged"
        with pytest.raises(kind, match=where), located(0, 1, BUCKET, transport):
            raise kind("damaged")
    with pytest.raises(ZeroDivisionError), located(0, 1, BUCKET, transport):
        raise ZeroDivisionError
