"""The part that all transports between processes share, whichever library moves the bytes."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from ..base.errors import TransportError, UsageError, again
from ..health.calls import Call
from ..health.heartbeat import Heartbeat
from ..health.inquiry import Position
from ..health.monitor import monitor
from ..health.state import Finding
from ..observe.timeline import here
from ..process.outages import first_line
from ._capture import refuse_capture
from ._staging import bring, bring_back, space
from .base import Transport
from .links.base import DamagedMessage, DeviceError, Link, LinkError, LinkMessage, RowLink, peers

_logger = logging.getLogger("fusionlayer")

_IS_CUDA, _DTYPE, _SEND, _RECV = attrgetter("is_cuda"), attrgetter("dtype"), itemgetter(0), itemgetter(1)
_BYTES = {torch.uint8}
# Most plans of exchanges that are kept: enough for all buckets of a model, and few if sizes differ in each step.
_MOST_PLANS = 1024

P = ParamSpec("P")


class LinkedTransport(Transport):
    """One process's end of a group of processes, over its own links.

    One thread at a time makes calls (see ``Transport``). The monitor's thread closes the links of the ``Heartbeat``
    when a call can no longer succeed, which makes the call in flight fail. ``ConnectedTransport`` makes the links.
    """

    def _begin(self, rank: int, size: int, timeout: float) -> None:
        """Begin without links; with one rank that is all."""
        self.rank, self.size, self.timeout = rank, size, timeout
        self._failure: TransportError | UsageError | None = None
        self._is_closed = self._queues = False
        # Whether links for CUDA tensors are still to be made, by the first call with one that all ranks make together.
        self._awaits_device = False
        self._exchanges: dict[tuple[tuple[int, ...], tuple[int, ...], str], _ExchangePlan] = {}
        self._links: dict[str, Link] = {}
        self._watch: Heartbeat | None = None

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        if self._awaits_device and x.is_cuda:
            self.connect_device(x.device)
        link = self._links.get(x.device.type)
        if not isinstance(link, RowLink) or out.shape != (self.size, x.numel()) or not _are_rows(x, out):
            return self.exchange(dict(enumerate(zip(repeat(x), out.unbind(0)))))  # noqa: B905 - no end of x
        self._run(Call.rows(self.size, x.numel(), self.purpose), self._move_rows, link.all_gather, x, out)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        if self._awaits_device and x.is_cuda:
            self.connect_device(x.device)
        link = self._links.get(x.device.type)
        if not isinstance(link, RowLink) or x.size(0) != self.size or x.shape != out.shape or not _are_rows(x, out):
            return self.exchange(dict(enumerate(zip(x.unbind(0), out.unbind(0), strict=True))))
        self._run(Call.rows(self.size, x.size(1), self.purpose), self._move_rows, link.all_to_all, x, out)

    def exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        tensors = list(chain.from_iterable(messages.values()))
        if self._awaits_device and (device := next((x.device for x in tensors if x.is_cuda), None)):
            self.connect_device(device)
        sizes = tuple(messages), tuple(map(Tensor.numel, tensors)), self.purpose
        plan = self._exchanges.get(sizes)
        if plan is None or not set(map(_DTYPE, tensors)) <= _BYTES or not all(map(Tensor.is_contiguous, tensors)):
            plan = self._plan_exchange(messages)
            self._exchanges[sizes] = plan
        self._run(plan.call, self._exchange, plan, messages, tensors)

    def _plan_exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> _ExchangePlan:
        """Return the plan of ``exchange(messages)``, whose arguments it checks; exchanges of equal sizes share it."""
        call = Call.exchange(self.rank, self.size, messages, self.purpose)
        nbytes = sum(call.sends) - call.sends[self.rank]
        if len(self._exchanges) >= _MOST_PLANS:
            self._exchanges.clear()
        return _ExchangePlan(call, *peers(self.rank, call.sends, call.recvs), nbytes)

    def _exchange(
        self, key: int, plan: _ExchangePlan, messages: Mapping[int, tuple[Tensor, Tensor]], tensors: Sequence[Tensor]
    ) -> None:
        own = messages.get(self.rank)
        if own is not None and own[1].data_ptr() != own[0].data_ptr():
            own[1].copy_(own[0])
        if self.size == 1:
            return
        on_cuda = set(map(_IS_CUDA, tensors))
        on_gpu = next(filter(_IS_CUDA, tensors), None)
        link = self._links["cpu"] if on_gpu is None else self._link_for(on_gpu)
        is_near = on_cuda == {link.device.type == "cuda"}
        near = list(map(_SEND, map(messages.__getitem__, plan.to)))
        wanted = list(map(_RECV, map(messages.__getitem__, plan.source)))
        targets = wanted
        if not is_near:
            near, targets = bring(near, link.device), space(wanted, link.device)
        keys = repeat(key)
        link.exchange(list(map(LinkMessage, plan.to, near, keys)), list(map(LinkMessage, plan.source, targets, keys)))
        if not is_near:
            bring_back(targets, wanted)
        self.bytes_sent += plan.nbytes

    def _move_rows(self, key: int, move: Callable[[Tensor, Tensor], None], x: Tensor, out: Tensor) -> None:
        move(x, out)
        self.bytes_sent += (self.size - 1) * (out.numel() // self.size)

    def all_reduce(self, x: Tensor) -> None:
        if self._awaits_device and x.is_cuda:
            self.connect_device(x.device)
        self._run(Call.all_reduce(x, self.purpose), self._sum, x)

    def _sum(self, key: int, x: Tensor) -> None:
        if self.size == 1:
            return
        link = self._link_for(x)
        (near,) = bring([x], link.device)
        link.all_reduce(near.view(-1), key)
        bring_back([near], [x])
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size

    def broadcast(self, x: Tensor, root: int) -> None:
        if self._awaits_device and x.is_cuda:
            self.connect_device(x.device)
        self._run(Call.broadcast(x, root, self.size, self.purpose), self._copy_from, x, root)

    def _copy_from(self, key: int, x: Tensor, root: int) -> None:
        if self.size == 1:
            return
        link = self._link_for(x)
        (near,) = bring([x], link.device)
        link.broadcast(near.view(-1).view(torch.uint8), root, key)
        bring_back([near], [x])
        self.bytes_sent += (self.size - 1) * x.nbytes * (self.rank == root)

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        self._run(Call.send(x, self.rank, to, tag, self.size), self._send, x, to)

    def _send(self, key: int, x: Tensor, to: int) -> None:
        link = self._link_for(x)
        (near,) = bring([x.view(-1).view(torch.uint8)], link.device)
        link.exchange([LinkMessage(to, near, key)] if near.numel() else [], [])
        self.bytes_sent += x.nbytes

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        self._run(Call.recv(x, self.rank, source, tag, self.size), self._receive, x, source)

    def _receive(self, key: int, x: Tensor, source: int) -> None:
        link = self._link_for(x)
        flat = x.view(-1).view(torch.uint8)
        (near,) = space([flat], link.device)
        link.exchange([], [LinkMessage(source, near, key)] if near.numel() else [])
        bring_back([near], [flat])

    def can_launch(self, device: torch.device) -> bool:
        if self._awaits_device and device.type == "cuda":
            self.connect_device(device)
        link = self._links.get(device.type)
        return link is not None and link.can_launch

    def launch(self, what: str, device: torch.device, kernel: Callable[[Tensor], None]) -> None:
        self._run(Call(what, purpose=self.purpose), self._launch, self._links[device.type], kernel)

    def _launch(self, key: int, link: Link, kernel: Callable[[Tensor], None]) -> None:
        with link.launching() as stop:
            kernel(stop)

    def _run(self, call: Call, work: Callable[Concatenate[int, P], None], *given: P.args, **named: P.kwargs) -> None:
        """Make ``call``: ``work`` with the key of its messages. The watch sees it; an error closes the transport.

        Every message passes here, so it notifies the watch by an assignment and not by calls.
        """
        if self._failure is not None:
            self._check_open()
        if self._queues:
            refuse_capture(f"rank {self.rank}: {call.what} is called")
        counted = call.partner is None
        self.sequence += counted
        if counted and self.why:
            call = replace(call, why=self.why)
        # 32 bits that identify the call. Only collectives are numbered: two ranks count their own ones alike.
        key = zlib.crc32(f"{self.sequence if counted else 0} {call.what} {call.purpose}".encode())
        watch = self._watch
        recent: tuple[tuple[int, Call], ...] = ()
        if watch is not None:
            recent = watch.position.recent
            if counted:
                recent = (*recent[-1:], (self.sequence, call))
            position = Position(self.sequence, call, time.monotonic(), recent)
            with monitor.lock:
                watch.position = position
        try:
            with here.doing("fusionlayer: wire"):
                work(key, *given, **named)
        except BaseException as error:
            if watch is not None:
                self._fail_call(call, error)
            raise
        if watch is not None:
            position = Position(self.sequence, None, 0.0, recent)
            with monitor.lock:
                watch.position = position

    def set_timeout(self, seconds: float) -> None:
        super().set_timeout(seconds)
        for link in self._links.values():
            link.set_timeout(seconds)

    def only_queues(self, device: torch.device) -> bool:
        if device.type == "cuda" and (self.size == 1 or self._awaits_device):
            return True
        link = self._links.get(device.type)
        return link is not None and link.only_queues

    def drain(self) -> None:
        if self._is_closed:
            return
        self._check_open()
        if self._watch is None or not self._queues:
            return
        self._watch.enter_again()
        try:
            for link in self._links.values():
                link.drain()
        except LinkError as error:
            self._check_open()
            raise self._fail(error, "the work that it has queued on the device") from error
        self._watch.leave()

    def finish(self) -> None:
        if self._failure is None:
            try:
                self.drain()
            except TransportError as error:
                _logger.warning(
                    "the last calls have not ended on the device, so what they receive is worthless: %s", error
                )
        self.close()
        if self._watch is not None and self._is_closed:
            self._watch.await_left()

    def close(self) -> None:
        if self._failure is None:
            self._is_closed = True
            self._shut(TransportError(f"rank {self.rank}: this transport is closed; make a new one"), None)

    def cause(self) -> TransportError | None:
        finding = self._watch and self._watch.because()
        return TransportError(finding.text, finding.ranks) if finding else None

    def stages(self, device: torch.device) -> bool:
        return device.type == "cuda" and "cuda" not in self._links and not self._awaits_device

    def _link_for(self, x: Tensor) -> Link:
        """Return the link for ``x``, which may be on another device."""
        if not x.is_cuda or "cuda" not in self._links:
            return self._links["cpu"]
        link = self._links["cuda"]
        if x.device != link.device:
            raise UsageError(
                f"rank {self.rank}: got a tensor on {x.device}, and this rank's connections are those of {link.device}"
                f"; one process, one GPU: call torch.cuda.set_device({link.device.index}) and put the model there"
            )
        return link

    def _fail_call(self, call: Call, error: BaseException) -> None:
        """Close the transport after an error in a call."""
        if isinstance(error, LinkError):
            # If close() ended the call, that is the reason, and there is no cause to look for.
            self._check_open()
            raise self._fail(error, call.what) from None  # the message has the link's own text
        # Nobody knows how much of this call the peers have received, so there can be no next call.
        text = f"rank {self.rank} raised {type(error).__name__}: {error}"
        finding = Finding("failed", (self.rank,), text)
        try:
            # The peers must be able to read it before this rank leaves, for example after a second Ctrl-C.
            if self._watch is not None:
                self._watch.diagnose(finding, known=finding)
        finally:
            self._shut(TransportError(text, [self.rank], sequence=self.sequence), finding)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def _fail(self, error: LinkError, what: str) -> TransportError:
        """Close the transport after a failure of its link, find the cause, and return the error that names it."""
        assert self._watch is not None
        lost = f"the connection to rank {error.peer} was lost, though its process is alive"
        if error.peer == self.rank:
            lost = "the connections of this rank were lost"
        lost = f"{lost}: {first_line(error)}"
        known = None
        if isinstance(error, (DamagedMessage, DeviceError)):
            known = Finding("failed", tuple(error.ranks), str(error))
        finding = self._watch.diagnose(Finding("disconnected", (error.peer,), lost), known)
        self._check_open()  # it was closed meanwhile, and no process wants to know the cause
        if not finding.ranks:
            finding = replace(finding, ranks=(error.peer,))
        failure = TransportError(
            f"rank {self.rank}: collective {self.sequence} ({what}): {finding.text}",
            finding.ranks,
            sequence=self.sequence,
        )
        self._shut(failure, finding)
        return failure

    def _shut(self, failure: TransportError, finding: Finding | None) -> None:
        """Make every later call raise ``failure``, and report the finding to the other ranks; None: this rank closed
        it."""
        self._failure = again(failure)  # not what is raised here: its traceback holds this transport
        close_all(self._links, has_failed=finding is not None)
        if self._watch is not None:
            self._watch.end(finding)


class _ExchangePlan(NamedTuple):
    """The plan that all exchanges of equal sizes share.

    Attributes:
        call: the call, for comparing it with those of other ranks.
        to: the ranks to which this rank sends.
        source: the ranks from which it receives.
        nbytes: bytes that it sends to other ranks.
    """

    call: Call
    to: tuple[int, ...]
    source: tuple[int, ...]
    nbytes: int


def _are_rows(x: Tensor, out: Tensor) -> bool:
    """Return whether a link can move all rows of these tensors by one call: contiguous uint8 on one device."""
    alike = all(each.dtype is torch.uint8 and each.is_contiguous() for each in (x, out))
    return alike and x.numel() > 0 and x.device == out.device


def close_all(links: Mapping[str, Link], *, has_failed: bool = False) -> None:
    """Close links, or abort them where this rank ``has_failed``."""
    for link in [*links.values()]:  # the monitor's thread closes them while a call may add the one of a device
        if has_failed:
            link.abort()
        else:
            link.close()
