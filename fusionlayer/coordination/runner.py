"""Runs the messages that the coordinator has decided on. The communication thread uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import ConfigError
from ..observe.timeline import Timeline
from ..transport import Transport
from ..transport.base import URGENT
from .execution import OperationPart, execute
from .operation import Operation
from .requests import ALL_RANKS


@dataclass(frozen=True)
class ProcessSetMembers:
    """A process set, as this rank sees it.

    Attributes:
        ranks: its ranks in the job, ascending.
        transport: a transport over them; None if this rank is not in the set.
    """

    ranks: tuple[int, ...]
    transport: Transport | None


class Runner:
    """Moves tensors over the transports of the process sets. No other code uses these transports.

    Only the communication thread calls ``run``, in the same order on all ranks, so there is no lock. Other threads read
    ``process_sets``. Each change adds or removes one entry, which is atomic.

    Attributes:
        joined_on: the GPU on which this rank takes part after ``join``, if it has sent no tensor of a GPU before.
            Written before the join is announced, and read after it was answered.
    """

    def __init__(self, transport: Transport, timeline: Timeline) -> None:
        self.process_sets = {ALL_RANKS: ProcessSetMembers(tuple(range(transport.size)), transport)}
        self._transport = transport
        self.timeline = timeline
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.joined_on: torch.device | None = None

    def run(self, parts: Sequence[OperationPart]) -> None:
        """Run operations of one kind as one message, and store the results in them."""
        signature = parts[0].signature
        kind = signature.kind
        now = time.perf_counter_ns()
        operations = [part.operation for part in parts if part.operation is not None]
        if self.timeline.enabled:
            for operation in operations:
                self.timeline.record(f"NEGOTIATE_{kind.upper()}", operation.submitted, now, row=operation.label)
        if kind == "add_process_set":
            self._add_process_set(parts[0])
        elif kind == "remove_process_set":
            self._remove_process_set(signature.root or ALL_RANKS)
        elif kind == "join":
            operations[0].result = parts[0].numbers[0]
        elif kind != "barrier":
            members = self.process_sets[signature.process_set]
            assert members.transport is not None
            with torch.no_grad(), self._on_stream(operations, signature.device):
                execute(parts, members.transport, members.ranks, self._spans(operations))
        if self.timeline.enabled:
            end = time.perf_counter_ns()
            for operation in operations:
                self.timeline.record(kind.upper(), now, end, row=operation.label)

    def check_member(self, process_set: int) -> None:
        """Raise ``ConfigError`` unless this rank is in the process set. Any thread may call it."""
        members = self.process_sets.get(process_set)
        if members is None:
            raise ConfigError(f"there is no process set {process_set} (any more); known: {sorted(self.process_sets)}")
        if members.transport is None:
            raise ConfigError(
                f"rank {self._transport.rank} is not in process set {process_set}, which has the ranks "
                f"{list(members.ranks)}; call operations of a set on its ranks only"
            )

    def close(self) -> None:
        """Close the transports of all process sets."""
        for members in self.process_sets.values():
            if members.transport is not None:
                members.transport.finish()

    def _add_process_set(self, part: OperationPart) -> None:
        (number,), ranks = part.numbers, part.signature.ranks
        assert ranks is not None
        transport = self._transport.subset(ranks) if self._transport.rank in ranks else None
        self.process_sets[number] = ProcessSetMembers(ranks, transport)
        if part.operation is not None:
            part.operation.result = number

    def _remove_process_set(self, number: int) -> None:
        members = self.process_sets.pop(number)
        if members.transport is not None:
            members.transport.finish()

    def _spans(self, operations: Sequence[Operation]) -> Any:
        if not self.timeline.enabled:
            return lambda name: nullcontext()

        @contextmanager
        def span(name: str) -> Iterator[None]:
            start = time.perf_counter_ns()
            yield
            for operation in operations:
                self.timeline.record(name, start, time.perf_counter_ns(), row=operation.label)

        return span

    @contextmanager
    def _on_stream(self, operations: Sequence[Operation], device: str) -> Iterator[None]:
        """Run the body on the runner's own CUDA stream, after the work that produces the tensors. No effect on CPU."""
        if device != "cuda":
            yield
            return
        if not operations:  # this rank has joined, and its current device belongs to the thread that called join
            with torch.cuda.device(next(iter(self._streams), self.joined_on)):
                yield
            return
        where = operations[0].tensors[0].device
        if where not in self._streams:
            self._streams[where] = torch.cuda.Stream(where, priority=URGENT)
        stream = self._streams[where]
        with torch.cuda.stream(stream):
            for operation in operations:
                if operation.ready is not None:
                    stream.wait_event(operation.ready)
                for x in operation.tensors:
                    x.record_stream(stream)
            yield
            finished = stream.record_event()
            for operation in operations:
                operation.finished = finished
