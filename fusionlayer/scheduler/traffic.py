"""What an engine has under way: lanes, the buckets on them, results that nobody has taken, and the first failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from ..base.errors import again
from ..base.plan import FusionPlan
from ..observe import counts
from ..observe.timeline import Timeline
from ..process.clock import Clock
from ..transport import Transport
from ..transport._capture import refuse_capture
from ..transport._clocks import measure_clock
from .lane import Lane, put_first
from .results import Results
from .sending import Sender
from .worker import Job

__all__ = ["Traffic"]


class Traffic:
    """The lanes of an engine, the buckets on them, and their results; one failure ends all of it.

    Args:
        transport: used by the engine alone from now on, and closed with it.
        device: of all gradients.
        timeline: record of the threads' work.
        clock: times the steps.
        lanes: how many there are, equally many on all ranks; over NCCL one, whatever is asked for.
        name: of the threads.
        learns_order: time the buckets of some steps, for an order in which the next forward needs them.
        release: called when a failure has ended all; it lets go of the gradients.

    Attributes:
        rank, size: this rank, and the number of ranks.
        sender: sends buckets over the lanes.
        sends_at_once: whether lanes only queue work on the device: they wait for no other rank.
        steps: that have ended.
        results: of buckets that were sent, until they are taken.
        failure: the error that a step has failed with, or None. The lanes are then closed, and every call raises it.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        timeline: Timeline,
        clock: Clock,
        *,
        lanes: int,
        name: str,
        learns_order: bool,
        release: Callable[[], object],
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.failure: BaseException | None = None
        self._device = device
        self._timeline = timeline
        self._release = release
        timeline.time_by(clock)
        if transport.only_queues(device):
            lanes = 1
        transport.agree("the number of lanes", lanes)
        offset = measure_clock(transport, wanted=timeline.enabled)
        if offset is not None:
            timeline.note_clock(*offset, transport.size)
        self._lanes = [Lane(transport, device, name)]
        self._lanes += [Lane(transport.duplicate(), device, f"{name} {i}") for i in range(1, lanes)]
        self.sends_at_once = self._lanes[0].is_at_once
        self.sender = Sender(tuple(self._lanes), clock, timeline, learns_order)
        self.results = Results(clock, timeline)
        self.steps = 0
        counts.register(self)

    def queue(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the first lane; all ranks call it in the same place."""
        return self._lanes[0].put(work)

    def queue_first(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the first lane; no lane sends what is put later before it has ended well."""
        return put_first(self._lanes, work)

    def queue_next(self, work: Callable[[Transport], None]) -> Job:
        """Queue ``work`` on the lane that would take the next bucket: it waits for the last one least."""
        return self._lanes[len(self.sender.jobs) % len(self._lanes)].put(work)

    def put(self, work: Callable[[Transport], None]) -> Callable[[], None]:
        """Queue ``work`` on the first lane, and return a function that waits for its end and raises what it raised.

        All ranks call it in the same place: when a step's gradients are all submitted, or before the first step.
        """
        self.check()
        try:
            job = self._lanes[0].put(work)
        except BaseException as error:
            self.fail(error)

        def wait() -> None:
            try:
                job.wait()
            except BaseException as error:
                self.fail(error)

        return wait

    def awaits(self, name: str) -> bool:
        """Return whether a tensor's last result has not been taken yet."""
        return self.results.bucket_of.get(name) in self.results.untaken

    def take(self, index: int) -> dict[str, Tensor]:
        """Wait for a bucket of a step that has ended; return its results by name, each in its gradient's shape.

        The caller may use them until it submits the bucket's next gradient. Each bucket is taken once.

        Raises:
            TransportError: a peer was lost, stopped or too late; it names rank, bucket, tensors and sequence.
        """
        try:
            holder = self.results.wait_for(index)
        except BaseException as error:
            self.fail(error)
        del self.results.untaken[index]
        return holder.take()

    def take_all(self) -> None:
        """Wait for all results that nobody has taken, where they replace the gradients; raise as ``take`` does."""
        for index in sorted(self.results.untaken):
            self.take(index)

    def save(self) -> dict[str, Tensor]:
        """Wait for the results that nobody has taken, and return copies by name; they stay to be taken."""
        try:
            return self.results.save()
        except BaseException as error:
            self.fail(error)

    def load(self, saved: Mapping[str, Tensor], plan: FusionPlan | None, step: int) -> None:
        """Let ``saved`` results of ``step`` wait to be taken, as buckets of ``plan``, in place of those there are.

        Raises:
            ConfigError: they are not all results of whole buckets of the plan.
        """
        try:
            self.results.settle()
        except BaseException as error:
            self.fail(error)
        self.results.load(saved, plan, step, self._device)

    def drain(self) -> None:
        """Wait until the device has done all messages of the steps that have ended.

        Over NCCL, results are only queued when they are taken. Whoever saves them, or what they have changed, calls it
        before.

        Raises:
            FusionLayerError: a step has failed; what it was to change is worthless.
        """
        self.check("what steps have queued is waited for")
        try:
            for lane in self._lanes:
                lane.drain()
        except BaseException as error:
            self.fail(error)

    def close(self) -> None:
        """Let the buckets that were sent end, on the device too, then the threads, and close the transports.

        A second call does nothing.

        Raises:
            TransportError: over NCCL, a step whose results were taken could not end.
            UsageError: a CUDA graph is captured. The engine is closed in both cases.
        """
        # Other ranks wait for this rank's share of these buckets, so they travel even if nobody here takes them.
        for sent in self.results.untaken.values():
            with suppress(Exception):
                sent.job.wait()
        try:
            if self.failure is None:
                self.drain()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Close the transports at once: what is under way fails here and on the other ranks."""
        counts.retire(self)
        for lane in self._lanes:
            lane.close()
        self._timeline.close()

    def abandon(self) -> None:
        """Give up, and wait until no lane works any more: then nothing changes gradients, results or error feedback."""
        self.give_up()
        for lane in self._lanes:
            lane.join()

    def counts(self) -> Mapping[str, float]:
        """Return the steps that have ended, the bytes of their gradients, as a ring sends them and as sent."""
        return {
            "steps": self.steps,
            "bytes_raw": 2 * (self.size - 1) / self.size * self.sender.nbytes,
            "bytes_sent": sum(lane.transport.bytes_sent for lane in self._lanes),
        }

    def check(self, what: str | None = None) -> None:
        """Raise what a step has failed with, or that a CUDA graph is captured while ``what``, a clause, happens."""
        if self.failure is not None:
            raise again(self.failure)
        if what is not None and self._device.type == "cuda":
            refuse_capture(what)

    def fail(self, error: BaseException) -> NoReturn:
        """Release the gradients, close the transports and raise the first cause."""
        # Peers are out of step with this rank now, so nothing may be sent any more. Results are waited for in the order
        # of the plan, but lanes fail in any order: an early bucket may have failed because a later one did.
        first = self.sender.cause
        cause = error if first is None or not isinstance(error, Exception) else again(first)
        self.failure = again(cause).with_traceback(None)
        self.give_up()
        self._release()
        self.results.untaken.clear()
        if cause is error:
            raise error
        raise cause from cause.__cause__  # what was waited for has failed with it, and says nothing more
