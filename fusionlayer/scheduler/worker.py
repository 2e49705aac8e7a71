"""The communication thread: the only one that uses its transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..errors import FusionLayerError

__all__ = ["Job", "Worker"]


class Job:
    """One piece of work of a ``Worker``; ``wait`` returns when it is done."""

    def __init__(self, work: Callable[[], None], abandoned: Callable[[], None] | None) -> None:
        self._work: Callable[[], None] | None = work
        self._abandoned = abandoned
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self, failed: BaseException | None) -> None:
        """Do the work, or take over the failure of an earlier job."""
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
            self._work = self._abandoned = None  # what they hold may be large, and the thread keeps its last job

    def finish(self) -> None:
        """Let those go on who wait for the job."""
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._done.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the job is done, well or not, so many seconds from now at the latest."""
        return self._done.wait(seconds)

    def wait(self) -> None:
        """Return when the job is done; raise what it raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error


class Worker:
    """A daemon thread that runs jobs one after the other, in the order in which they were put.

    The first job that fails is the last one that runs: the peers of its transport are out of step from then on, so
    every later job fails with the same error.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], abandoned: Callable[[], None] | None = None) -> Job:
        """Queue ``work`` and return its job; ``abandoned`` is called if the work fails or never begins.

        Once a job has failed, this raises what it raised.
        """
        if self.error is not None:
            raise self.error
        if self._closed:
            raise FusionLayerError(f"{self._thread.name} is closed: nothing can be sent any more")
        job = Job(work, abandoned)
        self._queue.put(job)
        return job

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs on this thread."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Return when the thread has ended, which ``close`` asks it to."""
        self._thread.join()

    def close(self) -> None:
        """Let queued jobs end, then the thread. Twice is once."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run(self.error)
            self.error = self.error or job.error
            job.finish()
