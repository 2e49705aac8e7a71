"""Jobs in a row: on a communication thread, or on the threads that put them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet

from ..base.errors import FusionLayerError, again, forget
from ..process import forks
from ..process.bounded import settle

__all__ = ["Job", "Jobs", "Worker"]


class Job:
    """One piece of work of ``Jobs``; any thread may ``wait`` for its end."""

    def __init__(self, work: Callable[[], None], abandoned: Callable[[], None] | None) -> None:
        self._work: Callable[[], None] | None = work
        self._abandoned = abandoned
        self._done = threading.Event()
        self._generation = forks.generation
        self.error: BaseException | None = None

    @classmethod
    def ended(cls) -> Job:
        """Return a job that has ended, for results that were there before."""
        job = cls(lambda: None, None)
        job.run(None)
        job.finish()
        return job

    def run(self, failed: BaseException | None) -> None:
        """Do the work, or fail as an earlier job has ``failed``. Called before ``finish``, on the same thread."""
        try:
            if failed is not None:
                raise failed
            assert self._work is not None
            self._work()
        except BaseException as error:
            self.error = error
            if self._abandoned is not None:
                self._abandoned()
        finally:
            # The worker's thread keeps its last job until the next one comes: do not keep its tensors alive so long.
            self._work = self._abandoned = None

    def finish(self) -> None:
        """Wake the threads that wait for the job."""
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether the job has ended, by success or failure."""
        return self._done.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the job has ended, by success or failure."""
        return self._done.wait(seconds)

    def wait(self) -> None:
        """Wait until the job has ended; raise what it raised."""
        if self._generation != forks.generation:
            raise forks.refuse("this work is done by a thread of its parent")
        self._done.wait()
        if self.error is not None:
            raise again(self.error)


class Jobs:
    """Runs each job within ``put``, on the thread of the caller; callers put one job at a time.

    It is for work that waits for nobody. After a job has failed, no other job runs: the peers of the transport are out
    of step by then. Every later job fails with the same error.

    Args:
        name: for messages.

    Attributes:
        error: of the first job that has failed; None: none has.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._generation = forks.generation
        self.error: BaseException | None = None
        # An attribute and not a method: a queue's own ``put`` can take its place, without a call in between.
        self._accept: Callable[[Job], object] = self.run

    def put(self, work: Callable[[], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Run ``work`` in its turn and return its job; ``abandoned`` is called if the work fails or never begins.

        If an earlier job has failed, this raises the same error. ``put`` and ``close`` must not run at the same time.
        """
        if self.error is not None:
            raise again(self.error)
        if self._generation != forks.generation:
            raise forks.refuse(f"{self._name} runs in its parent")
        if self._closed:
            raise FusionLayerError(f"{self._name} is closed: nothing can be sent any more")
        job = Job(work, abandoned)
        self._accept(job)
        return job

    def close(self) -> None:
        """Take no more jobs. A second call does nothing."""
        self._closed = True

    def join(self) -> None:
        """Wait until no job runs any more, and let go of what a failed one has held; call ``close`` before."""
        forget(self.error)

    def run(self, job: Job) -> None:
        """Run a job on the calling thread, out of turn; it fails if an earlier job has failed. No other job may run."""
        job.run(self.error)
        self.error = self.error or job.error
        # After the error is kept: a thread that has waited for this job must not be able to put another one.
        job.finish()


class Worker(Jobs):
    """Jobs on a daemon thread, which runs them in the order in which they were put, by any thread.

    The first job starts the thread. Nobody else puts a job meanwhile. The exit of the process waits 2 s for the jobs
    that were put before.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # The only state that callers and the thread both change: it needs no lock of ours. None ends the thread.
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._accept = self._begin

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs on this thread."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait until the thread has ended, if it ever began; then as ``Jobs.join``."""
        if self._thread.ident is not None:
            self._thread.join()
        super().join()

    def close(self) -> None:
        """Let queued jobs end, then the thread; do not wait for that. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)

    def _begin(self, job: Job) -> None:
        self._accept = self._queue.put
        with _lock:
            _begun.add(self)
        self._thread.start()
        self._queue.put(job)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            self.run(job)


_begun: WeakSet[Worker] = WeakSet()
_lock = threading.Lock()  # guards _begun: any thread puts a worker's first job


def _end_all() -> None:
    # A job's end wakes the program, which may exit while the job's thread is still in torch. This comes last at exit:
    # a job that waits for other ranks fails when its transport ends, and those ranks learn of the exit without delay.
    with _lock:
        workers = list(_begun)
    for worker in workers:
        worker.close()
    settle(worker._thread for worker in workers)


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()
    _begun.clear()


forks.at_exit(_end_all, last=True)
os.register_at_fork(after_in_child=_begin_child)
