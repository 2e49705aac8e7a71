"""The present step of an engine: due and arrived gradients, and the tensors that some rank has used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ConfigError, UsageError
from ..base.plan import FusionPlan, TensorInfo
from ..native.wire import aligned
from ..transport import Transport
from .lanes import Job
from .plan_controller import PlanController


class Step:
    """The number of the present step, the tensors that are due in it, and the gradients that have arrived.

    A plan may send a bucket once in several steps. The due buckets follow from the plan and the number of the step
    alone. The engine's lock guards all of it while hooks may run.

    Args:
        holds: results wait to be taken, any number of steps.
        overlaps: results are held for the next forward.

    Attributes:
        holds: as given.
        number: the number of the step.
        arrived: its gradients so far, by name; always the same object.
        due: the tensors that are sent in it, by name.
        skips: whether there are buckets that are not sent in each step.
        buckets: numbers of the buckets that are sent in it, in their order; only if ``skips``.
    """

    def __init__(self, holds: bool, overlaps: bool) -> None:
        self.holds = holds
        self._overlaps = overlaps
        self.number = 0
        self.arrived: dict[str, Tensor] = {}
        self.due: Mapping[str, TensorInfo] = {}
        self.skips = False
        self.buckets: Sequence[int] = ()

    def settle(self, plan: FusionPlan | None, tensors: Mapping[str, TensorInfo]) -> None:
        """Determine the due buckets of the step, before its first gradient."""
        self.due = tensors
        self.skips = plan is not None and plan.skips
        if plan is not None and self.skips:
            self.buckets = plan.due(self.number)
            self.due = {name: tensors[name] for index in self.buckets for name in plan.buckets[index].names}

    def check(self, plan: FusionPlan, plan_controller: PlanController | None) -> None:
        """Raise ``ConfigError`` if the plan has buckets that skip steps, and the engine needs each in each step."""
        if not plan.skips:
            return
        why = ""
        if plan_controller is not None:
            why = "planners that need costs expect each bucket in each step; leave them out"
        elif self._overlaps:
            why = "overlap_forward expects each bucket in each step; leave it out"
        elif not self.holds:
            why = "this trainer sends each bucket in each step; expected a plan without 'every'"
        if why:
            raise ConfigError(f"plan: it has buckets that leave once in several steps, but {why}")

    def refuse_begun(self, what: str) -> None:
        """Raise ``UsageError`` if the step has begun while ``what``, a clause, happens."""
        if self.arrived:
            raise UsageError(f"{what} after the first gradient of step {self.number}; do it between two steps")

    def refuse_missing(self) -> NoReturn:
        """Raise ``UsageError`` that names the gradients that are missing at the end of the step."""
        missing = [name for name in self.due if name not in self.arrived]
        raise UsageError(
            f"{len(missing)} of {len(self.due)} gradients have not come in step {self.number}, the first is that of "
            f"{missing[0]!r}: backward ended without it; use the parameter in each forward, or freeze it"
        )

    def refuse(self, name: str, numel: int, tensors: Mapping[str, TensorInfo]) -> NoReturn:
        """Raise ``UsageError`` for a gradient of ``numel`` elements that the engine cannot take now.

        It is not one of the engine's ``tensors``, is not due, has another size, has been submitted before, or its last
        result has not been taken.
        """
        if name not in tensors:
            raise UsageError(f"gradient {name!r} is not one of this engine's {len(tensors)} tensors")
        tensor = self.due.get(name)
        if tensor is None:
            raise UsageError(
                f"gradient {name!r} was submitted in step {self.number}, in which it does not leave; submit those in "
                "due"
            )
        if tensor.numel != numel:
            raise UsageError(f"gradient {name!r} has {numel} elements, expected {tensor.numel}")
        if name in self.arrived:
            raise UsageError(f"gradient {name!r} was submitted twice in step {self.number}; synchronize() in between")
        raise UsageError(f"gradient {name!r} was submitted before its result of the last step was taken")


class Usage:
    """Which tensors of a step each rank has used: one bit for each, which ranks exchange at its end.

    Args:
        names: the names of all tensors of the step, in the same order on all ranks.
        unused: tensors that this rank has not used.
        size: number of ranks.
        device: the device of ``exchange``: that of the gradients if the transport only queues work there, else the CPU.

    Attributes:
        every: (size, n) uint8: one row of bits for each rank; ``job`` fills the rows of the others.
        job: the exchange. It has to be awaited even if this rank has used all tensors, because other ranks need its
            message.
        uses_all: whether this rank has used all tensors; then no tensor is unused.
    """

    job: Job

    def __init__(self, names: Collection[str], unused: Collection[str], size: int, device: torch.device) -> None:
        self._names = names
        self.uses_all = not unused
        mine = _padded([name not in unused for name in names]) if unused else all_used(len(names))
        self.every = mine.repeat(size, 1)
        self._device = device
        self._found: frozenset[str] | None = None
        self._done: torch.cuda.Event | None = None

    def unused(self) -> frozenset[str]:
        """Return the tensors that no rank has used, when ``job`` has ended."""
        if self._found is None:
            if self._done is not None:
                self._done.synchronize()
            used = np.unpackbits(np.bitwise_or.reduce(self.every.cpu().numpy(), axis=0), count=len(self._names))
            self._found = frozenset(compress(self._names, used == 0))
        return self._found

    def exchange(self, transport: Transport) -> None:
        """Exchange the bits by a message of their own; on a device all of this is queued on the lane's stream."""
        self.every = every = self.every.to(self._device)
        with transport.doing("which tensors ranks have used"):
            transport.spread(every[transport.rank], torch.bitwise_or)
        if every.is_cuda:
            self._done = torch.cuda.current_stream(self._device).record_event()


@lru_cache(8)
def all_used(tensors: int) -> Tensor:
    """Return the bits of a rank that has used all its tensors, which callers must not change."""
    return _padded([True] * tensors)


def _padded(used: Sequence[bool]) -> Tensor:
    """Return a bit for each tensor, (n,) uint8, of a length that messages of gradients can carry."""
    packed = np.packbits(np.array(used, np.bool_))
    return torch.from_numpy(np.pad(packed, (0, aligned(packed.size) - packed.size)))
