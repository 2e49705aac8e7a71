"""Sends full buckets over the lanes, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..base.seeds import derive_seed
from ..observe.timeline import Timeline
from ..process.clock import Clock, Stamp
from ..transport import Transport
from .buffers import Buffer
from .failure import located
from .lane import Lane
from .order import SendOrder
from .plan_controller import StepTimer
from .worker import Job

__all__ = ["Sender"]


class Sender:
    """Queues the buckets of a step for lanes, as soon as each and all before it are full.

    It has no lock: the engine calls it with its own lock held, or when no hook can run.

    Args:
        lanes: take the buckets in turn.
        clock: of the gradients' device.
        timeline: record of the buckets' way.
        learns_order: time the buckets of some steps, for an order in which the next forward needs them.

    Attributes:
        jobs: of the buckets that were sent in the present step, by number.
        order: in which buckets leave.
        watch: gets the times of the buckets; None: nobody does.
        nbytes: of the gradients sent so far, uncompressed.
        cause: the first error of any bucket, or None; written by the lanes.
    """

    def __init__(self, lanes: Sequence[Lane], clock: Clock, timeline: Timeline, learns_order: bool) -> None:
        self._lanes = lanes
        self._clock = clock
        self._timeline = timeline
        self._learns_order = learns_order
        self.jobs: dict[int, Job] = {}
        self.watch: StepTimer | None = None
        self.cause: BaseException | None = None
        self.nbytes = 0
        self.begin_anew(0)

    def begin_anew(self, buckets: int) -> None:
        """Send so many buckets a step from now on, in the order of their numbers at first."""
        self.order = SendOrder(buckets, len(self._lanes), self._clock)

    def launch(self, buffers: Sequence[Buffer], step: int) -> None:
        """Send every full bucket that is next in the order."""
        # A full bucket waits for those before it: all ranks must send in the same order, whatever order their
        # gradients arrive in.
        order = self.order.sequence
        while len(self.jobs) < len(order) and buffers[order[len(self.jobs)]].full:
            index = order[len(self.jobs)]
            self.send(index, buffers[index], step, derive_seed(step, index))

    def send(self, index: int, buffer: Buffer, step: int, seed: int, done: Callable[[], None] | None = None) -> None:
        """Send a full bucket; ``done`` is called on its lane when the result is in place, or there will be none."""
        # The bucket's place in the order picks the lane, not which lane is free: each lane has its own transport, and
        # all ranks must send a bucket on the same one.
        lane = self._lanes[len(self.jobs) % len(self._lanes)]
        ready = self._timeline.now() if self._timeline.enabled else None
        work = partial(self._run, index, buffer, step, seed, ready, done)
        self.nbytes += buffer.nbytes
        buffer.full = False
        self.jobs[index] = lane.put(work, abandoned=done)

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
        timeline = self._timeline
        timed = self.watch is not None or self._learns_order and self.order.measures
        if timeline.enabled or timed:
            buffer.follow()  # on a device the bucket is under way from here on, and not from the call
        if timeline.enabled and ready is not None:  # a timeline may begin in between
            timeline.record("QUEUE", ready, timeline.now(), row=f"bucket {index}", step=step, bucket=index)
        start = self._clock.stamp() if timed else None
        try:
            with timeline.bucket_span(transport, step=step, bucket=index):
                buffer.run(transport, seed)
        except BaseException:
            try:
                with located(step, index, buffer.bucket, transport):
                    raise
            except BaseException as told:
                self.cause = self.cause or told
                raise
        if timed:
            end = self._clock.stamp()
            self.order.note_sent(index, start, end)
            if self.watch is not None:
                self.watch.note_bucket(step, index, start, end)
        if done is not None:
            done()  # last: if anything before it fails, the lane calls it, as the job's ``abandoned``
