"""Results of buckets of ended steps, until they are taken; they can be saved and loaded meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..base.errors import ConfigError, UsageError
from ..base.plan import FusionPlan
from ..observe.timeline import Timeline
from ..process.clock import Clock
from .buffers import Buffer
from .lanes import Job, Worker
from .plan_controller import StepTimer


class Results:
    """The launched buckets of ended steps whose results have not been taken yet.

    Only the thread that ends steps changes them: ``Engine.end_step`` adds to ``untaken``, ``Engine.take`` removes.

    Attributes:
        untaken: by the buckets' numbers in the plan of their step: the job of each, the holder of its results after the
            job, and the step.
        plan: that plan; None before the first step ends.
        bucket_of: the number of a tensor's bucket in it, by name.
        watch: gets the times of waiting; None: they are not measured.
    """

    def __init__(self, clock: Clock, timeline: Timeline) -> None:
        self._clock = clock
        self._timeline = timeline
        self.untaken: dict[int, tuple[Job, Buffer | _Loaded, int]] = {}
        self.plan: FusionPlan | None = None
        self.bucket_of: Mapping[str, int] = {}
        self.watch: StepTimer | None = None

    def refuse_another(self, plan: FusionPlan | None) -> None:
        """Raise ``UsageError`` if the results that were not taken were sent under another plan than this one."""
        if self.plan != plan:
            raise UsageError(
                f"the plan has changed, but bucket {min(self.untaken)} of the one before has not been taken; take what "
                "is untaken, then end the step"
            )

    def wait_for(self, index: int) -> Buffer | _Loaded:
        """Return the holder of a bucket's results, when they are there; record how long that takes."""
        job, holder, step = self.untaken[index]
        start = None if self.watch is None else self._clock.stamp()
        with self._timeline.span("WAIT", step=step, bucket=index):
            job.wait()
            if self.watch is not None or self._timeline.enabled:
                holder.join()  # here already, so that what the device waits counts too
        if self.watch is not None:
            self.watch.note_waiting(start)
        return holder

    def settle(self) -> None:
        """Wait until all buckets are summed; on a device, let the current stream wait."""
        for job, holder, _ in self.untaken.values():
            job.wait()
            holder.join()

    def save(self) -> dict[str, Tensor]:
        """Return copies of all results that were not taken yet, by name; they stay to be taken."""
        results: dict[str, Tensor] = {}
        for index in sorted(self.untaken):
            results |= {name: result.clone() for name, result in self.wait_for(index).read().items()}
        return results

    def load(self, saved: Mapping[str, Tensor], plan: FusionPlan | None, step: int, device: torch.device) -> None:
        """Let ``saved`` results of ``step`` wait to be taken, as buckets of ``plan``, instead of the present ones."""
        untaken: dict[int, tuple[Job, Buffer | _Loaded, int]] = {}
        buckets = () if plan is None else plan.buckets
        for index, bucket in enumerate(buckets):
            sizes = {slot.name: slot.numel for slot in bucket.slots}
            found = {name: saved[name] for name in bucket.names if name in saved}
            odd = [name for name in sizes if name not in found or found[name].numel() != sizes[name]]
            if found and odd:
                raise ConfigError(
                    f"results were saved of a part of bucket {index}: {odd[0]!r} is missing or of another size; load "
                    "them with the plan under which they were saved"
                )
            if found:
                copies = {name: result.detach().to(device, copy=True) for name, result in found.items()}
                job = Job(_nothing, None)
                Worker("loaded results").run(job)
                untaken[index] = job, _Loaded(copies), step
        bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
        unknown = sorted(saved.keys() - bucket_of.keys())
        if unknown:
            raise ConfigError(
                f"results were saved of {unknown[0]!r}, which is not in the plan; load them with the plan under which "
                "they were saved"
            )
        self.untaken, self.plan, self.bucket_of = untaken, plan, bucket_of


class _Loaded:
    """Holds loaded results, as a ``Buffer`` holds those of its last ``run``."""

    def __init__(self, results: dict[str, Tensor]) -> None:
        self._results = results

    def join(self) -> None:
        """Do nothing: no other stream has work on them."""

    def read(self) -> Mapping[str, Tensor]:
        """Return the results by name; they stay."""
        return self._results

    def take(self) -> dict[str, Tensor]:
        """Return the results by name."""
        return self._results


def _nothing() -> None:
    """Stand for the sum of a bucket whose results have arrived already."""
