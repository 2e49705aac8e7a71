"""The process group: torch's own inside, and the calls that rules name compressed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import config
from ..codecs import Codec
from ..errors import ConfigError
from ..seeds import derive_seed
from ..transport import Transport
from ..transport.c10d import C10dTransport
from ..wire import DTYPE_CODES
from . import calls, hints
from .lane import DecodedWork, JoinedWork, Lane
from .native import Native
from .policy import Policy, Rule

__all__ = ["NAME", "CompressingGroup", "Traffic", "nccl_options"]

NAME = "fusionlayer"

_MOST_SIZES = 4096

_made: weakref.WeakKeyDictionary[dist.Store, Counter[str]] = weakref.WeakKeyDictionary()
_made_lock = threading.Lock()


@dataclass
class Traffic:
    """What of a group's traffic on this rank has travelled compressed so far.

    Attributes:
        calls: how often each of ``OPS`` has, and "recv".
        bytes_sent: payload bytes that this rank has sent in them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0


@dataclass(frozen=True)
class _Choice:
    """What a rule makes of a call."""

    codec: Codec
    algorithm: str | None


class CompressingGroup(dist.ProcessGroup):
    """A process group that leaves calls to gloo and NCCL, and makes those compressed that its policy says.

    Compressed collectives run one after the other on a thread and connections of the group's own, in the order of the
    calls; what passes goes where it would without this class. Compressed sends and receives travel as messages of the
    native backend.

    Args:
        store: of this group alone.
        rank: this process in the group.
        ranks: of the default group, in the order of this group's.
        timeout: that a call may wait.
        policy: the same on all ranks.
        nccl_options: of NCCL; None: torch's.

    Raises:
        ConfigError: the settings cannot be used.
        PlanMismatch: ranks have other policies.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        policy: Policy,
        nccl_options: Any = None,
    ) -> None:
        size = len(ranks)
        super().__init__(rank, size)
        self.policy = policy
        self._rank, self._size = rank, size
        self._ranks = tuple(ranks)
        self._store = store
        self._timeout = timeout
        self._settings = config.load()
        self._native = Native(store, rank, size, ranks, timeout, nccl_options)
        self._native.register_with(self)
        self._native.agree(policy.facts)
        self._rules: list[tuple[Rule, _Choice | None]] | None = None
        self._known: dict[tuple[str, torch.dtype, str, int], _Choice | None] = {}
        self._devices: frozenset[str] | None = None
        self._calls: Counter[str] = Counter()
        self._seed = derive_seed(self._ranks[0])
        self._lane: Lane | None = None
        self._lane_lock = threading.Lock()
        self._messages = 0
        self._message_bytes = 0
        self._leaving: dict[int, Tensor] = {}
        self._coalesced: list[dist.Work | Callable[[], None]] | None = None

    # ---- what torch asks a group ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """Return the store of this group alone."""
        return self._store

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._rules = None

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._rules = None

    @property
    def traffic(self) -> Traffic:
        """What has travelled compressed so far."""
        sent = self._message_bytes + (0 if self._lane is None else self._lane.bytes_sent)
        return Traffic(Counter(self._calls), sent)

    def agree(self, policy: Policy) -> None:
        """Compare a policy over the ranks of the group; ``PlanMismatch`` if they have different ones."""
        self._native.agree(policy.facts)

    def take(self, policy: Policy) -> None:
        """Have calls from now on travel by a policy that the ranks have agreed on."""
        self.policy, self._rules = policy, None
        self._known.clear()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> CompressingGroup | None:
        """Return a group of some of this one's ranks, with its policy; None where this rank is none of them."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        part = CompressingGroup(
            dist.PrefixStore(f"{name}/", self._store),
            list(ranks).index(self._rank),
            [self._ranks[rank] for rank in ranks],
            timeout or self._timeout,
            self.policy,
            nccl_options(opts),
        )
        part._set_group_name(name)
        part._set_group_desc(group_desc or name)
        return part

    def shutdown(self) -> None:
        """End the group after the calls that were made."""
        if self._lane is not None:
            self._lane.close(wait=True)
        self._native.shut(abort=False)

    def abort(self) -> None:
        """End the group in the middle of what is under way."""
        if self._lane is not None:
            self._lane.close(wait=False)
        self._native.shut(abort=True)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Sum a tensor over ranks."""
        xs, op = _listed(tensors), _reduce_op(args, kwargs)
        choice = self._choose("all_reduce", xs) if len(xs) == 1 and calls.is_sum(op) else None
        if choice is None:
            return self._native.group.allreduce(tensors, *args, **kwargs)
        residual = hints.residual_of(xs[0])
        call = calls.all_reduce(xs, op, choice.codec, choice.algorithm, self._seed, residual)
        return self._make("all_reduce", call, xs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Sum several tensors over ranks; compressed they travel as one."""
        xs, op = _listed(tensors), _reduce_op(args, kwargs)
        choice = self._choose("all_reduce", xs) if calls.is_sum(op) else None
        if choice is None:
            return self._native.group.allreduce_coalesced(tensors, *args, **kwargs)
        return self._make("all_reduce", calls.all_reduce(xs, op, choice.codec, choice.algorithm, self._seed), xs)

    def reduce_scatter(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give this rank the sum over ranks of their tensors for it."""
        outs, ins = _listed(output), _listed(inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs)
        even = len(outs) == 1 and all(x.numel() == outs[0].numel() for x in ins) and len(ins) == self._size
        work = self._scatter(outs[0], ins, _reduce_op(args, kwargs)) if even else None
        return work or self._native.group.reduce_scatter(output, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Give this rank the sum over ranks of their pieces for it."""
        even = input.numel() == output.numel() * self._size
        work = self._scatter(output, [input], _reduce_op(args, kwargs)) if even else None
        return work or self._native.named("reduce_scatter_single")(output, input, *args, **kwargs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Do ``reduce_scatter_single`` several times; what is not compressed is one call of the native backend."""
        op = _reduce_op(args, kwargs)

        def one(out: Tensor, x: Tensor) -> dist.Work | None:
            return self._scatter(out, [x], op) if x.numel() == out.numel() * self._size else None

        return self._several("reduce_scatter_single_coalesced", one, outputs, inputs, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give every rank all ranks' tensors."""
        outs, ins = _listed(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs), _listed(inputs)
        even = len(ins) == 1 and len(outs) == self._size and all(x.numel() == ins[0].numel() for x in outs)
        work = self._gather(outs, ins[0]) if even else None
        return work or self._native.group.allgather(outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """Give every rank all ranks' tensors in one."""
        even = output.numel() == input.numel() * self._size
        work = self._gather([output], input) if even else None
        return work or self._native.named("all_gather_single")(output, input, *args, **kwargs)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Do ``all_gather_single`` several times; what is not compressed is one call of the native backend."""

        def one(out: Tensor, x: Tensor) -> dist.Work | None:
            return self._gather([out], x) if out.numel() == x.numel() * self._size else None

        return self._several("all_gather_single_coalesced", one, outputs, inputs, *args, **kwargs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Give each rank this one's tensor for it."""
        work = self._exchange(outputs, inputs) if len(outputs) == len(inputs) == self._size else None
        return work or self._native.group.alltoall(outputs, inputs, *args, **kwargs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        """Give each rank this one's rows for it."""
        outs, ins = _rows(output, output_split_sizes, self._size), _rows(input, input_split_sizes, self._size)
        work = self._exchange(outs, ins) if outs is not None and ins is not None else None
        return work or self._native.named("all_to_all_single")(
            output, input, output_split_sizes, input_split_sizes, *args, **kwargs
        )

    def broadcast(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> dist.Work:
        """Give all ranks the root's tensor.

        It always passes. But where a Python class has no method of that name torch holds the GIL while it queues the
        call, and a thread of gloo's that drops the last reference to a tensor wants it with the queue locked.
        """
        return self._native.group.broadcast(tensors, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all ranks, and for the calls that were made before."""
        if self._lane is not None:
            self._lane.drain()
        return self._native.group.barrier(*args, **kwargs)

    # The names before torch 2.13, in which version callers in C++ look for the new names first.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- from rank to rank ------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send a tensor to a rank of the group."""
        choice = self._choose("send", tensors) if len(tensors) == 1 else None
        native = self._native.between(tensors[0].device, self._rank, dstRank)
        if choice is None:
            return native.send(tensors, dstRank, tag)
        x = tensors[0].detach().contiguous().view(-1)
        message = _room(choice.codec, x)
        self._messages += 1
        number = self._messages
        choice.codec.encode(x, message, seed=derive_seed(self._seed, self._rank, number))
        self._calls["send"] += 1
        self._message_bytes += message.numel()
        self._leaving[number] = message  # native backends rely on the caller to keep what leaves
        return self._finally(native.send([message], dstRank, tag), partial(self._leaving.pop, number, None), tensors)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive a tensor from a rank of the group."""
        native = self._native.between(tensors[0].device, srcRank, self._rank)
        return self._receive(tensors, lambda xs: native.recv(xs, srcRank, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor from whoever sends one."""
        return self._receive(tensors, lambda xs: self._native.group.recv_anysource(xs, tag))

    def _receive(self, tensors: Sequence[Tensor], receive: Callable[[Sequence[Tensor]], dist.Work]) -> dist.Work:
        choice = self._choose("send", tensors) if len(tensors) == 1 else None
        if choice is None:
            return receive(tensors)
        out, message = tensors[0].detach(), _room(choice.codec, tensors[0])
        self._calls["recv"] += 1
        return self._finally(receive([message]), partial(_decode, choice.codec, message, out), tensors)

    def _finally(self, work: dist.Work, then: Callable[[], Any], tensors: Sequence[Tensor]) -> dist.Work:
        """Return a work that also does ``then``; among calls that are coalesced it is done after the last."""
        if self._coalesced is not None:
            self._coalesced.append(then)
            return work
        return DecodedWork(work, then, tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []
        self._native.group._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        work = self._native.group._end_coalescing(device)
        coalesced, self._coalesced = self._coalesced or [], None
        works = [each for each in coalesced if isinstance(each, dist.Work)]
        rest = [each for each in coalesced if not isinstance(each, dist.Work)]
        if rest:
            work = DecodedWork(work, lambda: [each() for each in rest] and None, [])
        return JoinedWork([work, *works], []) if works else work

    # ---- by policy --------------------------------------------------------------------------------------------------

    def _scatter(self, out: Tensor, ins: Sequence[Tensor], op: dist.ReduceOp) -> dist.Work | None:
        """Return a compressed reduce-scatter, None if it passes."""
        choice = self._choose("reduce_scatter", [*ins]) if calls.is_sum(op) and out.dtype == ins[0].dtype else None
        if choice is None:
            return None
        hints.clear_padding(ins)
        call = calls.reduce_scatter(out, ins, op, choice.codec, choice.algorithm, self._seed)
        return self._make("reduce_scatter", call, [out])

    def _gather(self, outs: Sequence[Tensor], x: Tensor) -> dist.Work | None:
        """Return a compressed all-gather, None if it passes."""
        choice = self._choose("all_gather", outs) if outs[0].dtype == x.dtype else None
        if choice is None:
            return None
        return self._make("all_gather", calls.all_gather(outs, x, choice.codec, self._seed), outs)

    def _exchange(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> dist.Work | None:
        """Return an all-to-all of which parts are compressed, None if all of it passes.

        That cannot depend on sizes, which differ over ranks.
        """
        x = ins[0]
        if not self._can(ins) or outs[0].dtype != x.dtype:
            return None
        chosen = [choice for rule, choice in self._own_rules() if rule.concerns("all_to_all", x.dtype)]
        codecs = [choice.codec for choice in chosen if choice is not None]
        if not codecs or x.device.type not in self._compressing():
            return None
        zips = list(dict.fromkeys(codec for codec in codecs if codec.zips))

        def codec_for(nbytes: int) -> Codec | None:
            choice = self._look_up("all_to_all", x.dtype, x.device.type, nbytes)
            return None if choice is None else choice.codec

        by_size = {
            nbytes: codec_for(nbytes) for nbytes in {y.numel() * y.element_size() * self._size for y in [*ins, *outs]}
        }
        return self._make("all_to_all", calls.all_to_all(outs, ins, by_size.__getitem__, zips, self._seed), outs)

    def _several(
        self,
        name: str,
        one: Callable[[Tensor, Tensor], dist.Work | None],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        works = [one(out, x) for out, x in zip(outputs, inputs, strict=True)]
        passing = [pair for pair, work in zip(zip(outputs, inputs, strict=True), works, strict=True) if work is None]
        made = [work for work in works if work is not None]
        if passing or not made:
            outs, ins = [out for out, _ in passing], [x for _, x in passing]
            rest = self._native.named(name)(outs, ins, *args, **kwargs)
            return JoinedWork([rest, *made], outputs) if made else rest
        return JoinedWork(made, outputs)

    def _make(self, op: str, call: calls.Call, results: Sequence[Tensor]) -> dist.Work:
        """Have a compressed call made."""
        self._calls[op] += 1
        numel = sum(x.numel() for x in results)
        what = f"{op} into {numel} x {str(results[0].dtype).removeprefix('torch.')}"
        work = self._open_lane().submit(what, call, results)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _open_lane(self) -> Lane:
        with self._lane_lock:
            if self._lane is None:
                name, nccl = self.group_name, self._native.serves.get("cuda") == "nccl"
                connect = partial(_connect, self._ranks, name, self._timeout, self._settings, nccl)
                self._lane = Lane(self.group_desc or name, connect)
                weakref.finalize(self, self._lane.close, wait=False).atexit = False
            return self._lane

    def _choose(self, op: str, tensors: Sequence[Tensor]) -> _Choice | None:
        """Return how a call of which ``tensors`` are the whole travels, None if it passes."""
        if not self._can(tensors):
            return None
        x = tensors[0]
        nbytes = sum(y.numel() for y in tensors) * x.element_size()
        key = op, x.dtype, x.device.type, nbytes
        if key not in self._known:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[key] = self._look_up(*key)
        return self._known[key]

    def _can(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether rules may be about such tensors at all."""
        if self._size == 1 or not self.policy.rules or not tensors or hints.current().plain:
            return False
        x = tensors[0]
        return x.dtype in DTYPE_CODES and all(
            y.dtype == x.dtype and y.device == x.device and y.layout is torch.strided for y in tensors
        )

    def _look_up(self, op: str, dtype: torch.dtype, device: str, nbytes: int) -> _Choice | None:
        if not nbytes or device not in self._compressing():
            return None
        for rule, choice in self._own_rules():
            if rule.concerns(op, dtype) and rule.spans(nbytes, self.policy.min_bytes):
                return choice
        return None

    def _own_rules(self) -> list[tuple[Rule, _Choice | None]]:
        """Return the rules that are for this group, which gets its name after it is made."""
        if self._rules is None:
            self._known.clear()
            own = (rule for rule in self.policy.rules if rule.is_for(self.group_desc, self.group_name))
            self._rules = [(rule, self._choice(rule)) for rule in own]
        return self._rules

    def _choice(self, rule: Rule) -> _Choice | None:
        if rule.passes:
            return None
        codec = rule.make_codec()
        return _Choice(codec.checked if self._settings.checksum else codec.bare, rule.algorithm)

    def _compressing(self) -> frozenset[str]:
        """Return the types of devices for which the program has named this backend."""
        if self._devices is None:
            try:
                given = dist.get_backend_config(self)
            except ValueError:  # a part of another group, which nobody has named a backend for
                return frozenset(self._native.serves)
            named = dict(entry.split(":") for entry in given.split(","))
            for device, backend in named.items():
                if device in self._native.serves and backend not in (NAME, self._native.serves[device]):
                    raise ConfigError(
                        f"the process group was made with backend {given!r}; beside {NAME}, {device} tensors can only "
                        f"travel by {self._native.serves[device]}: name {self._native.serves[device]!r} or {NAME!r}"
                    )
            self._devices = frozenset(device for device, backend in named.items() if backend == NAME)
        return self._devices


def _connect(ranks: Sequence[int], name: str, timeout: timedelta, settings: config.Config, nccl: bool) -> Transport:
    """Return the transport of a group's compressed calls."""
    store = dist.distributed_c10d._get_default_store()
    with _made_lock:
        made = _made.setdefault(store, Counter())
        made[name] += 1
        number = made[name]
    each = settings.ranks_per_node
    return C10dTransport.among(
        ranks,
        f"group/{name}/{number}",
        timeout.total_seconds(),
        stall_warning=settings.stall_warning,
        node=None if each is None else f"node {dist.get_rank() // each}",
        nccl=nccl,
    )


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduce_op(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the reduction that a caller asks for, in options or as such."""
    asked = args[0] if args else kwargs.get("opts", kwargs.get("op"))
    return dist.ReduceOp.SUM if asked is None else getattr(asked, "reduceOp", asked)


def _rows(x: Tensor, splits: Sequence[int], size: int) -> list[Tensor] | None:
    """Return each rank's rows of ``x``; None if the splits do not fit, which the native backend has an error for."""
    count = x.shape[0] if x.dim() else 0
    if not x.dim() or (not splits and count % size):
        return None
    splits = list(splits) or [count // size] * size
    if len(splits) != size or sum(splits) != count or min(splits) < 0:
        return None
    return list(x.split(splits))


def _room(codec: Codec, x: Tensor) -> Tensor:
    return torch.empty(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8, device=x.device)


def _decode(codec: Codec, message: Tensor, out: Tensor) -> None:
    flat = out.view(-1) if out.is_contiguous() else torch.empty_like(out).view(-1)
    codec.decode(message, flat)
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def nccl_options(options: Any) -> Any:
    """Return options that are of NCCL, else None."""
    return options if dist.is_nccl_available() and isinstance(options, dist.ProcessGroupNCCL.Options) else None
