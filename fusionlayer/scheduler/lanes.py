"""Lanes: threads or streams with a transport each, the jobs that run on them, and the launch of buckets."""

from __future__ import annotations

import os
import threading
from _thread import allocate_lock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from weakref import WeakSet

import torch

from ..base.errors import FusionLayerError, again, forget
from ..base.seeds import derive_seed
from ..observe import counts
from ..observe.timeline import PROFILER_STATE, Timeline
from ..process import forks
from ..process.bounded import settle
from ..process.clock import Clock, Stamp
from ..transport import Transport
from ..transport._clocks import measure_clock
from ..transport.base import URGENT
from .buffers import Buffer, located
from .order import SendOrder
from .plan_controller import StepTimer

LANES = 2
"""How many lanes an optimizer has by default. Over NCCL an engine always has one."""


class Job:
    """One piece of work of a ``Worker``; any thread may ``wait`` for its end.

    Args:
        work: called once.
        abandoned: called if the work fails or never begins.

    Attributes:
        is_done: whether the job has ended, by success or failure.
        error: what it raised; None: nothing so far.
        ended: a lock that is held until the job has ended. The thread that runs the job writes ``error`` and the
            results before it releases the lock, and ``wait`` reads them after it has acquired it: this needs no
            interpreter lock.
    """

    def __init__(self, work: Callable[[], None], abandoned: Callable[[], object] | None) -> None:
        self.work: Callable[[], None] | None = work
        self.abandoned = abandoned
        self.error: BaseException | None = None
        self.is_done = False
        self._generation = forks.generation
        # A bare lock and not an Event, which takes ten calls.
        self.ended = allocate_lock()
        self.ended.acquire()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the job has ended, by success or failure."""
        if self.ended.acquire(timeout=max(0.0, seconds)):
            self.ended.release()
        return self.is_done

    def wait(self) -> None:
        """Wait until the job has ended; raise its exception."""
        if self._generation != forks.generation:
            raise forks.refuse("this work is done by a thread of its parent")
        with self.ended:
            pass
        if self.error is not None:
            raise again(self.error)


class Worker:
    """Runs jobs in the order of ``put``, on a daemon thread that the first job starts.

    After a job has failed, no other job runs: the peers of the transport are out of step by then. Every later job fails
    with the same error. The exit of the process waits 2 s for the jobs that were put before.

    Args:
        name: the name of the thread.
        context: returns the context of each job; if given, there is no thread: ``put`` runs the job on the thread of
            the caller, and callers put one job at a time. It is for work that never blocks.

    Attributes:
        error: of the first job that has failed; None: none has. Only the thread that runs the jobs writes it.
    """

    def __init__(self, name: str, context: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        self.error: BaseException | None = None
        self._name = name
        self._context = context
        self._generation = forks.generation
        self._queue: SimpleQueue[Job | None] = SimpleQueue()  # None ends the thread
        # Guards _thread and _closed, and the order of the queue: no job may follow the None, or nothing would end it.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs on this thread."""
        return threading.current_thread() is self._thread

    def put(self, work: Callable[[], None], abandoned: Callable[[], object] | None = None) -> Job:
        """Run ``work`` in its turn and return its job; ``abandoned`` is called if the work fails or never begins.

        If an earlier job has failed, this raises the same error. Any thread may call it.
        """
        if self.error is not None:
            raise again(self.error)
        if self._generation != forks.generation:
            raise forks.refuse(f"{self._name} runs in its parent")
        job = Job(work, abandoned)
        with self._lock:
            if self._closed:
                raise FusionLayerError(f"{self._name} is closed: nothing can be sent any more")
            if self._context is None:
                if self._thread is None:
                    self._begin()
                self._queue.put(job)
        if self._context is not None:
            with self._context():
                self.run(job)
        return job

    def close(self) -> None:
        """Take no more jobs. Let queued ones end, then the thread, without waiting. A second call does nothing."""
        if self._generation != forks.generation:
            return  # the thread is the parent's, and the lock may be held by a thread that this process lacks
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def join(self) -> None:
        """Wait until no job runs any more, and release the objects of a failed one; call ``close`` before."""
        if self._thread is not None:
            self._thread.join()
        forget(self.error)

    def run(self, job: Job) -> None:
        """Run a job on the calling thread, out of turn; it fails if an earlier job has failed. No other job may run."""
        try:
            if self.error is not None:
                raise self.error
            assert job.work is not None
            job.work()
        except BaseException as error:
            # Kept before the job ends: a thread that has waited for this job must not be able to put another one.
            job.error = error
            self.error = self.error or error
            if job.abandoned is not None:
                job.abandoned()
        finally:
            # The thread keeps its last job until the next one comes: do not keep its tensors alive so long.
            job.work = job.abandoned = None
            job.is_done = True
            job.ended.release()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()
        with _lock:
            _workers.add(self)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            self.run(job)


_workers: WeakSet[Worker] = WeakSet()  # those whose thread has begun
_lock = threading.Lock()  # guards _workers: any thread puts a worker's first job


def _end_all() -> None:
    # A job's end wakes the program, which may exit while the job's thread is still in torch. This comes last at exit: a
    # job that waits for other ranks fails when its transport ends, and those ranks see the exit without delay.
    with _lock:
        workers = list(_workers)
    for worker in workers:
        worker.close()
    settle(thread for worker in workers if (thread := worker._thread) is not None)


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()
    _workers.clear()


forks.at_exit(_end_all, last=True)
os.register_at_fork(after_in_child=_begin_child)


class Lane:
    """Runs work on its transport, one job after the other. With several lanes one sends while another computes.

    A job runs on the lane's own thread. If the transport only queues work on the device, as NCCL does, a job runs
    within ``put``, on the thread of the caller: on all ranks several communicators of a device get their work in the
    same order, independent of threads. On CUDA the lane has a stream of its own. No work records gradients.

    Attributes:
        worker: runs the jobs.
        is_at_once: whether jobs run within ``put``.
    """

    def __init__(self, transport: Transport, device: torch.device, name: str) -> None:
        self.transport = transport
        self.is_at_once = transport.only_queues(device)
        self._stream = torch.cuda.Stream(device, priority=URGENT) if device.type == "cuda" else None
        self.worker = Worker(name, partial(_on_stream, self._stream) if self.is_at_once else None)
        if not self.is_at_once:
            self.worker.put(partial(_set_up_thread, self._stream))  # the first job, so it runs before any work

    def put(self, work: Callable[[Transport], None]) -> Job:
        """Run ``work(transport)`` in its turn; return its job."""
        return self.worker.put(partial(work, self.transport))

    def close(self) -> None:
        """Close the transport and let the thread end; do not wait for that. A second call does nothing.

        Jobs that are still queued or in flight fail when they use the transport. The current stream waits for the
        pending work of the lane's stream, so the memory of gradients may be used again.
        """
        self.worker.close()
        self.transport.close()
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):  # the device has failed, which was reported before
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    with torch.no_grad(), torch.cuda.stream(stream):
        yield


def _set_up_thread(stream: torch.cuda.Stream | None) -> None:
    """Set gradient mode and stream of the calling thread; both hold for this thread alone, until it ends."""
    torch.set_grad_enabled(False)
    if stream is not None:
        torch.cuda.set_stream(stream)


class Lanes:
    """The lanes of an engine. They sum the buckets of a step, as soon as each and all before it in the order are full.

    The engine calls all methods but ``counts`` with its lock held, or when no hook can run.

    Args:
        transport: used by the lanes alone from now on, and closed with them.
        device: the device of all gradients.
        timeline: record of the buckets.
        clock: the clock of the gradients' device.
        lanes: how many there are, equally many on all ranks; over NCCL always one.
        name: the name of the threads.
        learns_order: time the buckets of some steps, for the order in which the next forward needs them.

    Attributes:
        all: the lanes; they take the buckets in turn.
        are_at_once: whether they only queue work on the device and never block.
        jobs: the jobs of the buckets that were launched in the present step, by number.
        order: the launch order of buckets.
        watch: gets the times of the buckets; None: they are not measured.
        steps: the steps that have ended.
        nbytes: the bytes of the gradients sent so far, uncompressed.
        cause: the first error of any bucket, or None.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        timeline: Timeline,
        clock: Clock,
        lanes: int,
        name: str,
        learns_order: bool,
    ) -> None:
        timeline.time_by(clock)
        if transport.only_queues(device):
            lanes = 1
        transport.agree("the number of lanes", lanes)
        transport.connect_device(device)  # here, and not within the first backward
        offset = measure_clock(transport, wanted=timeline.enabled)
        if offset is not None:
            timeline.note_clock(*offset, transport.size)
        self._size = transport.size
        self._clock = clock
        self._timeline = timeline
        self._learns_order = learns_order
        self.all = [Lane(transport, device, name)]
        self.all += [Lane(transport.shared_duplicate(), device, f"{name} {i}") for i in range(1, lanes)]
        self.are_at_once = self.all[0].is_at_once
        self.jobs: dict[int, Job] = {}
        self.watch: StepTimer | None = None
        self.steps = self.nbytes = 0
        self.cause: BaseException | None = None
        self._cause_lock = threading.Lock()  # guards ``cause``, which several lanes may set at once
        self.begin_anew(0)
        counts.register(self)

    def begin_anew(self, buckets: int) -> None:
        """Launch this many buckets a step from now on, in the order of their numbers at first."""
        self.order = SendOrder(buckets, len(self.all), self._clock)

    def launch(self, buffers: Sequence[Buffer], step: int, enclose: Callable[[], torch.Tensor] | None = None) -> None:
        """Launch every full bucket that is next in the order; the last one of the step encloses ``enclose()``."""
        # A full bucket waits for those before it: all ranks must send in the same order, in any order of arrival of
        # gradients. The lane follows from the position in the order, not from which lane is free: each lane has its own
        # transport, and all ranks must send a bucket on the same one.
        jobs, order = self.jobs, self.order.sequence
        while (place := len(jobs)) < len(order) and buffers[order[place]].full:
            index = order[place]
            buffer = buffers[index]
            lane = self.all[place % len(self.all)]
            seed = derive_seed(step, index) if buffer.seed is None else buffer.seed
            ready = self._timeline.now() if self._timeline.enabled else None
            done, buffer.done = buffer.done, None
            if enclose is not None and buffer.encloses and place + 1 == len(order):
                buffer.enclosed = enclose()
            self.nbytes += buffer.nbytes
            buffer.full = False
            jobs[index] = lane.worker.put(
                partial(self._run, index, buffer, step, seed, ready, done, lane.transport), done
            )

    def _run(
        self,
        index: int,
        buffer: Buffer,
        step: int,
        seed: int,
        ready: Stamp | None,
        done: Callable[[], None] | None,
        transport: Transport,
    ) -> None:
        """Sum a bucket; called on a lane."""
        try:
            if self.watch is not None or self._learns_order or self._timeline.enabled or getattr(*PROFILER_STATE):
                self._run_observed(index, buffer, step, seed, ready, transport)
            else:
                buffer.run(transport, seed)
        except BaseException:
            try:
                with located(step, index, buffer.bucket, transport):
                    raise
            except BaseException as error:
                with self._cause_lock:
                    self.cause = self.cause or error
                raise
        if done is not None:
            done()  # last: if anything before it fails, the worker calls it, as the job's ``abandoned``

    def _run_observed(
        self, index: int, buffer: Buffer, step: int, seed: int, ready: Stamp | None, transport: Transport
    ) -> None:
        timeline = self._timeline
        timed = self.watch is not None or self._learns_order and self.order.measures
        if timeline.enabled or timed:
            buffer.follow()  # on a device the bucket is in flight from here on, and not from the call
        if timeline.enabled and ready is not None:  # a timeline may begin in between
            timeline.record("QUEUE", ready, timeline.now(), row=f"bucket {index}", step=step, bucket=index)
        start = self._clock.stamp() if timed else None
        with timeline.bucket_span(transport, step=step, bucket=index):
            buffer.run(transport, seed)
        if timed:
            end = self._clock.stamp()
            self.order.note_sent(index, start, end)
            if self.watch is not None:
                self.watch.note_bucket(step, index, start, end)

    def queue(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the first lane; all ranks call it in the same place."""
        return self.all[0].put(work)

    def close(self) -> None:
        """Close the transports at once: operations in flight fail here and on the other ranks."""
        counts.retire(self)
        for lane in self.all:
            lane.close()

    def counts(self) -> Mapping[str, float]:
        """Return the steps that have ended, the bytes of their gradients, as a ring sends them and as sent."""
        return {
            "steps": self.steps,
            "bytes_raw": 2 * (self._size - 1) / self._size * self.nbytes,
            "bytes_sent": sum(lane.transport.bytes_sent for lane in self.all),
        }
