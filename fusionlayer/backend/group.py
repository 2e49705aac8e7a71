"""The process group, one class of over fifty short methods, because torch calls each of them on one object.

It compresses the calls that its policy names, and leaves all others to torch's own backends.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import config
from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..health import Watcher
from ..observe import counts
from . import arguments, calls, hints, profiling
from .call_queue import CallQueue
from .choices import CallChoices
from .connections import connect
from .meeting import part
from .messages import PointToPoint
from .native import Native
from .passing import PassedWork, explained
from .policy import CallPolicy
from .regular import Copies, eager, in_place, into
from .work import JoinedWork

NAME = "fusionlayer"

# torch's stubs give some methods narrower types than torch calls them with.
_ProcessGroup: Any = dist.ProcessGroup


@dataclass
class CallCounts:
    """Counts of a group's compressed calls on this rank so far.

    Attributes:
        calls: number of compressed calls for each of ``OPS``, and for "recv".
        bytes_sent: payload bytes that this rank has sent in them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0


class CompressingGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that compresses the calls that its policy names, and leaves other calls to gloo and NCCL.

    Every operation has a method here, even if no rule applies to it. Without one, torch holds the GIL while it queues
    the call. A gloo thread that drops the last reference to a tensor waits for the GIL with the queue's lock held,
    which would deadlock.

    Compressed collectives run one after the other, in the order of the calls, on a thread and connections of the
    group's own. Calls that pass go to the native backend directly. Compressed sends and receives become messages of
    the native backend.

    Args:
        store: the store of this group alone.
        rank: this process in the group.
        ranks: the members' ranks in the default group, in the order of this group.
        timeout: the longest time that a call may wait, unless the settings' ``timeout`` is shorter.
        policy: the same on all ranks.
        options: options of gloo or NCCL; None: torch's own.
        devices: types of devices that the program has named with this backend; None: asks torch at the first call.
        alone: whether torch does not know of the group. It is so if there is no default group. Then its members meet in
            its own store, and it compresses tensors of all devices.

    Raises:
        ConfigError: the settings cannot be used.
        TransportError: not all ranks came in time.
        PlanMismatch: ranks have other policies.

    Attributes:
        watcher: the watcher of the job, where this is the default group; it ends with the group.
        is_default: whether it is the default group.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        policy: CallPolicy,
        options: Any = None,
        devices: frozenset[str] | None = None,
        alone: bool = False,
    ) -> None:
        size = len(ranks)
        super().__init__(rank, size)
        self.policy = policy
        self.watcher: Watcher | None = None
        self.is_default = False
        self._rank, self._size = rank, size
        self._ranks = tuple(ranks)
        self._store = store
        self._settings = config.load()
        self._timeout = min(timeout, timedelta(seconds=self._settings.timeout))
        self._devices = devices
        self._was_made_alone = alone
        self._native = Native(store, rank, size, ranks, self._timeout, policy.facts, options)
        self._native.register_with(self)
        self._chosen: CallChoices | None = None
        self._calls: Counter[str] = Counter()
        self._seed = derive_seed(self._ranks[0])
        self._messages = PointToPoint(derive_seed(self._seed, rank))
        self._queue: CallQueue | None = None
        # Guards _queue: the first compressed collective makes it, and any thread may make that call.
        self._queue_lock = threading.Lock()
        counts.register(self)

    # ---- methods that torch calls ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """Return the store of this group alone."""
        return self._store

    @property
    def token(self) -> str:
        """A text that no other group has, equal on all ranks of this one."""
        return self._native.token

    @property
    def options(self) -> Any:
        """The options of NCCL, or of gloo where there is no NCCL."""
        return self._native.options

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._chosen = None

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._chosen = None

    @property
    def traffic(self) -> CallCounts:
        """Counts of compressed calls so far."""
        queue = self._queue
        return CallCounts(Counter(self._calls), self._messages.bytes_sent + (0 if queue is None else queue.bytes_sent))

    def counts(self) -> dict[str, float]:
        """Return the number of compressed calls, and the bytes that this rank has sent in them."""
        seen = self.traffic
        return {"backend_calls": float(seen.calls.total()), "backend_bytes_sent": float(seen.bytes_sent)}

    def agree(self, policy: CallPolicy) -> None:
        """Compare a policy over the ranks of the group; raise ``PlanMismatch`` if theirs differ."""
        self._native.agree(policy.facts)

    def take(self, policy: CallPolicy) -> None:
        """Use a policy from the next call on; all ranks have agreed on it before."""
        self.policy, self._chosen = policy, None

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> CompressingGroup | None:
        """Return a group of some of this group's ranks, with its policy; None if this rank is not one of them."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        part = CompressingGroup(
            dist.PrefixStore(f"{name}/", self._store),
            list(ranks).index(self._rank),
            [self._ranks[rank] for rank in ranks],
            timeout or self._timeout,
            self.policy,
            arguments.native_options(opts),
            self._compressing(),
            self._is_alone,
        )
        part._set_group_name(name)
        part._set_group_desc(group_desc or name)
        return part

    def shutdown(self) -> None:
        """End the group after the calls that were made."""
        counts.retire(self)
        if self.watcher is not None:
            self.watcher.close()
        if self._queue is not None:
            self._queue.close(wait=True)
        self._native.shut(abort=False)
        if self.is_default:
            part(self._native.store, self._rank, self._size)

    def abort(self) -> None:
        """End the group at once; calls in flight fail."""
        if self.watcher is not None:
            self.watcher.close()
        if self._queue is not None:
            self._queue.close(wait=False)
        self._native.shut(abort=True)

    # ---- collectives ------------------------------------------------------------------------------------------------

    @in_place
    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Sum a tensor over ranks."""
        xs = arguments.tensors(tensors)
        work = self._sum(xs, arguments.reduction(args, kwargs)) if len(xs) == 1 else None
        return work or self._native.group.allreduce(tensors, *args, **kwargs)

    @in_place
    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Sum several tensors over ranks; if they are compressed, they are sent as one."""
        work = self._sum(arguments.tensors(tensors), arguments.reduction(args, kwargs))
        return work or self._native.group.allreduce_coalesced(tensors, *args, **kwargs)

    @into
    def reduce_scatter(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give this rank the sum of all ranks' tensors for it."""
        outs, ins = arguments.tensors(output), arguments.tensors(inputs)
        even = len(outs) == 1 and len(ins) == self._size and all(x.numel() == outs[0].numel() for x in ins)
        work = self._scatter(outs[0], ins, arguments.reduction(args, kwargs)) if even else None
        return work or self._native.group.reduce_scatter(output, inputs, *args, **kwargs)

    @into
    def reduce_scatter_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Give this rank the sum of all ranks' pieces for it."""
        even = input.numel() == output.numel() * self._size
        work = self._scatter(output, [input], arguments.reduction(args, kwargs)) if even else None
        return work or self._native.named("reduce_scatter_single")(output, input, *args, **kwargs)

    @into
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Do ``reduce_scatter_single`` several times; passing calls are one call of the native backend."""
        op = arguments.reduction(args, kwargs)

        def one(out: Tensor, x: Tensor) -> dist.Work | None:
            return self._scatter(out, [x], op) if x.numel() == out.numel() * self._size else None

        return self._several("reduce_scatter_single_coalesced", one, outputs, inputs, *args, **kwargs)

    @into
    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give every rank all ranks' tensors."""
        outs, ins = arguments.tensors(outputs), arguments.tensors(inputs)
        even = len(ins) == 1 and len(outs) == self._size and all(x.numel() == ins[0].numel() for x in outs)
        work = self._gather(outs, ins[0]) if even else None
        return work or self._native.group.allgather(outputs, inputs, *args, **kwargs)

    @into
    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Give every rank all ranks' tensors in one."""
        even = output.numel() == input.numel() * self._size
        work = self._gather([output], input) if even else None
        return work or self._native.named("all_gather_single")(output, input, *args, **kwargs)

    @into
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Do ``all_gather_single`` several times; passing calls are one call of the native backend."""

        def one(out: Tensor, x: Tensor) -> dist.Work | None:
            return self._gather([out], x) if out.numel() == x.numel() * self._size else None

        return self._several("all_gather_single_coalesced", one, outputs, inputs, *args, **kwargs)

    @into
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Send each rank its tensor."""
        even = len(outputs) == len(inputs) == self._size
        work = self._exchange(outputs, inputs, inputs) if even else None
        return work or self._native.group.alltoall(outputs, inputs, *args, **kwargs)

    @into
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        """Send each rank its rows."""
        outs = arguments.rows(output, output_split_sizes, self._size)
        ins = arguments.rows(input, input_split_sizes, self._size)
        work = self._exchange(outs, ins, [input]) if outs is not None and ins is not None else None
        return work or self._native.named("all_to_all_single")(
            output, input, output_split_sizes, input_split_sizes, *args, **kwargs
        )

    @eager
    @in_place
    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give all ranks the root's tensor."""
        return self._native.group.broadcast(tensors, *args, **kwargs)

    @in_place
    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give the root the sum of all ranks' tensors."""
        return self._native.group.reduce(tensors, *args, **kwargs)

    @into
    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give the root all ranks' tensors."""
        return self._native.group.gather(outputs, inputs, *args, **kwargs)

    @into
    def gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Give the root all ranks' tensors in one; since torch 2.14."""
        return self._native.named("gather_single")(output, input, *args, **kwargs)

    @into
    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give each rank the root's tensor for it."""
        return self._native.group.scatter(outputs, inputs, *args, **kwargs)

    @into
    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Do ``allgather`` several times, as one call."""
        return self._native.group.allgather_coalesced(outputs, inputs, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all ranks, and for the calls that were made before."""
        if self._queue is not None:
            self._queue.drain()
        return self._pass("barrier", [], lambda: self._native.group.barrier(*args, **kwargs))

    # The names before torch 2.13. From that version on, C++ callers look for the new names first.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single

    # ---- from rank to rank ------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send a tensor to a rank of the group."""
        native = self._between(tensors[0].device, self._rank, dstRank)
        copies = Copies("send")
        xs = copies.read(tensors)
        choice = self._choices.of("send", xs) if len(xs) == 1 else None

        def send(ys: list[Tensor]) -> dist.Work:
            return self._pass("send", ys, lambda: native.send(ys, dstRank, tag))

        if choice is not None:
            self._calls["send"] += 1
            return self._messages.send(xs[0], choice.codec, send, self._native.carried_on(xs[0].device))
        return self._messages.send_copy(xs[0], send, tensors) if copies else send(tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive a tensor from a rank of the group."""
        native = self._between(tensors[0].device, srcRank, self._rank)
        return self._receive(tensors, lambda xs: native.recv(xs, srcRank, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank."""
        return self._receive(tensors, lambda xs: self._native.group.recv_anysource(xs, tag))

    def _between(self, device: torch.device, source: int, to: int) -> dist.ProcessGroup:
        """Return the native group for a message; all messages of a batch use one group, so that NCCL batches them."""
        return self._native.group if self._messages.is_batch else self._native.between(device, source, to)

    def _receive(self, tensors: list[Tensor], begin: Callable[[list[Tensor]], dist.Work]) -> dist.Work:
        copies = Copies("recv")
        xs = copies.write(tensors)

        def receive(ys: list[Tensor]) -> dist.Work:
            return self._pass("recv", ys, lambda: begin(ys))

        choice = self._choices.of("send", xs) if len(xs) == 1 else None
        if choice is None:
            work = receive(xs)
        else:
            self._calls["recv"] += 1
            work = self._messages.receive(xs[0], choice.codec, receive, self._native.carried_on(xs[0].device))
        return self.after(work, copies, tensors) if copies else work

    def _start_coalescing(self, device: torch.device) -> None:
        self._native.group._start_coalescing(device)
        self._messages.begin_batch()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._messages.end_batch(self._native.group._end_coalescing(device))

    def passed(self, work: dist.Work, call: str, given: Any) -> dist.Work:
        """Return ``work``, and if it is gloo's, one whose errors are in words of the caller."""
        is_gloo = type(work) is dist.Work and self._native.only_gloo and not self._messages.is_batch
        return PassedWork(work, call, given) if is_gloo else work

    def _pass(self, call: str, given: list[Tensor], make: Callable[[], dist.Work]) -> dist.Work:
        try:
            return self.passed(make(), call, given)
        except RuntimeError as error:
            raise explained(call, error, given) from None

    def after(self, work: dist.Work, copies: Copies, results: Any) -> dist.Work:
        """Return ``work`` with a last step: it copies from ``copies`` to ``results``, the caller's tensors."""
        return self._messages.after(work, copies.restore, arguments.tensors(results))

    # The names that C++ callers look for, where they differ.
    recvAnysource, splitGroup = recv_anysource, split_group  # noqa: N815
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # ---- the compressed calls ---------------------------------------------------------------------------------------

    def _sum(self, xs: list[Tensor], op: Any) -> dist.Work | None:
        """Return a compressed all-reduce of several tensors as one, None if it passes."""
        calls.refuse_average("all_reduce", xs, op)
        choice = self._choices.of("all_reduce", xs) if calls.is_sum(op) else None
        if choice is None:
            return None
        residual = hints.residual_of(xs)
        call = calls.all_reduce(xs, op, choice.codec, choice.algorithm, self._draw(), residual)
        return self._make("all_reduce", call, xs, xs, calls.describe("all_reduce", xs[0].dtype, xs, op))

    def _scatter(self, out: Tensor, ins: list[Tensor], op: Any) -> dist.Work | None:
        """Return a compressed reduce-scatter, None if it passes."""
        calls.refuse_average("reduce_scatter", ins, op)
        choice = self._choices.of("reduce_scatter", ins) if calls.is_sum(op) and out.dtype == ins[0].dtype else None
        if choice is None:
            return None
        hints.clear_padding(ins)
        call = calls.reduce_scatter(out, ins, op, choice.codec, choice.algorithm, self._draw())
        return self._make("reduce_scatter", call, ins, [out], calls.describe("reduce_scatter", out.dtype, [out], op))

    def _gather(self, outs: list[Tensor], x: Tensor) -> dist.Work | None:
        """Return a compressed all-gather, None if it passes."""
        differences = hints.differences_of(outs)
        if differences is not None and x.device.type in self._compressing():
            call = calls.gather_differences(outs[0].view(-1), differences, self._draw())
            return self._make("all_gather", call, [x], outs, calls.describe("all_gather of differences", x.dtype, [x]))
        choice = self._choices.of("all_gather", outs) if outs[0].dtype == x.dtype else None
        if choice is None:
            return None
        call = calls.all_gather(outs, x, choice.codec, self._draw())
        return self._make("all_gather", call, [x], outs, calls.describe("all_gather", x.dtype, [x]))

    def _exchange(self, outs: list[Tensor], ins: list[Tensor], given: list[Tensor]) -> dist.Work | None:
        """Return an all-to-all with compressed parts, None if no part is compressed; ``given`` are its arguments."""
        chosen = self._choices.of_pairs(ins, outs)
        if chosen is None:
            return None
        call = calls.all_to_all(outs, ins, *chosen, self._draw())
        return self._make("all_to_all", call, given, outs, calls.describe("all_to_all", outs[0].dtype))

    def _several(
        self,
        name: str,
        one: Callable[[Tensor, Tensor], dist.Work | None],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        """Do ``one`` with each pair; passing pairs are one call of the native method ``name``."""
        pairs = list(zip(outputs, inputs, strict=True))
        works = [one(*pair) for pair in pairs]
        made = [work for work in works if work is not None]
        passing = [pair for pair, work in zip(pairs, works, strict=True) if work is None]
        if passing or not made:
            rest = self._native.named(name)([out for out, _ in passing], [x for _, x in passing], *args, **kwargs)
            return JoinedWork([rest, *made], outputs) if made else rest
        return JoinedWork(made, outputs)

    def _draw(self) -> calls.Seed:
        """Return the seed of the next call: by the number that the caller has given, or else by the count of calls."""
        seeds = hints.current().seeds
        number = None if seeds is None else next(seeds)
        return lambda transport: derive_seed(self._seed, transport.sequence if number is None else number)

    def _make(
        self, op: str, call: calls.Call, inputs: Sequence[Tensor], results: Sequence[Tensor], what: str
    ) -> dist.Work:
        """Queue a compressed call and return its work; ``what`` describes it, equally on all ranks."""
        self._calls[op] += 1
        work = self._open_queue().submit(what, profiling.shown(op, inputs, call), results)
        self._messages.join_batch(work)
        return work

    def _open_queue(self) -> CallQueue:
        with self._queue_lock:
            if self._queue is None:
                name, native = self.group_name, self._native
                nccl = native.serves.get("cuda") == "nccl"
                alone = (self._store, self._rank) if self._is_alone else None
                unique = f"group/{name}/{self.token}"
                opens = partial(connect, self._ranks, unique, native.timeout, self._settings, nccl, alone)
                described = self.group_desc not in ("", "undefined")  # the latter is torch's word for none
                compare = nccl and dist.get_debug_level() == dist.DebugLevel.DETAIL
                at_once = nccl and not self._settings.checksum  # with checksums CUDA tensors are sent by gloo
                name = self.group_desc if described else name
                self._queue = CallQueue(
                    name,
                    opens,
                    compare=compare,
                    timeout=lambda: native.timeout.total_seconds(),  # not of self: the queue must not keep the group
                    at_once=at_once,
                )
                # A program may drop a group without shutdown: its thread and connections must end all the same.
                weakref.finalize(self, self._queue.close, wait=False).atexit = False
            return self._queue

    @property
    def _choices(self) -> CallChoices:
        """The choices for this group, made at the first call: torch names the group only after it is made."""
        if self._chosen is None:
            names = (self.group_desc, self.group_name)
            self._chosen = CallChoices(self.policy, names, self._size, devices=self._compressing())
        return self._chosen

    @property
    def _is_alone(self) -> bool:
        """Whether torch does not know of the group. The default group is made before there is a default group."""
        return self._was_made_alone or not dist.is_initialized()

    def _compressing(self) -> frozenset[str]:
        """Return the types of devices that the program has named with this backend; torch knows them once it has made
        the group."""
        if self._devices is None and self._is_alone:
            self._devices = frozenset(self._native.serves)
        if self._devices is None:
            serves, given = self._native.serves, dist.get_backend_config(self)
            named = dict(entry.split(":") for entry in given.split(","))
            for device, backend in named.items():
                if device in serves and backend not in (NAME, serves[device]):
                    raise ConfigError(
                        f"the process group was made with backend {given!r}; next to {NAME}, {device} tensors can only "
                        f"be sent by {serves[device]}: name {serves[device]!r} or {NAME!r}"
                    )
            self._devices = frozenset(device for device, backend in named.items() if backend == NAME)
        return self._devices
