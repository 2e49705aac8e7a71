"""The groups of torch's own backends that a compressing group contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import PlanMismatch, TransportError
from ..native.wire import digest
from ..transport.links.base import LinkError
from ..transport.links.gloo_store import GlooStore
from ..transport.links.proof import prove
from .meeting import Meeting

# The longest policy, in bytes: more than any file with rules.
_MOST_FACTS = 1 << 24
_NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class Native:
    """gloo for CPU tensors, NCCL for CUDA tensors where it is there, as one process group of torch.

    Attributes:
        token: a text that no other group has, equal on all ranks.
        store: the store of this group, whose keys no other group has.
        group: the group that takes calls that pass.
        serves: the name of the backend for each type of device.
        only_gloo: whether that is gloo for all of them.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        ranks: Sequence[int],
        timeout: timedelta,
        facts: str,
        options: Any = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._make_nccl = partial(_nccl, rank=rank, size=size, ranks=ranks, timeout=timeout, options=options)
        self._meeting = Meeting(store, rank, ranks, timeout)
        try:
            self.token = self._meeting.begin()
            self.store = dist.PrefixStore(f"{self.token}/", store)
            self._addresses = GlooStore(self._meeting, size)  # kept, as gloo's reference keeps not all of it
            self._gloo: Any = _gloo(dist.PrefixStore("gloo/", self._addresses), rank, size, timeout, options)
            self._backends = self._make_all(timeout)
            self._prove()
            self.agree(facts)  # all ranks are connected then, so no rank needs the keys any more
        finally:
            self._meeting.forget()
        # Once a rank returns, no rank has left a key that the next group of the same name would read.
        self.group = self._make(self._backends)
        self.group.barrier().wait()
        self.serves = {device: kind.name.lower() for device, (kind, _) in self._backends.items()}
        self.only_gloo = {*self.serves.values()} == {"gloo"}
        self._downward: dist.ProcessGroup | None = None
        self._met: set[int] = set()

    def _make_all(self, timeout: timedelta) -> dict[str, tuple[Any, Any]]:
        """Return the kind and the backend for each type of device."""
        kinds = dist.ProcessGroup.BackendType
        backends: dict[str, tuple[Any, Any]] = {"cpu": (kinds.GLOO, self._gloo)}
        if torch.cuda.is_available():
            backends["cuda"] = (kinds.GLOO, self._gloo)
            if dist.is_nccl_available():
                backends["cuda"] = (kinds.NCCL, self._make_nccl(dist.PrefixStore("nccl/", self.store)))
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            # torch does this for its own groups only: ranks compare each call before they make it.
            for device, (kind, backend) in backends.items():
                wrapped = dist.distributed_c10d._create_process_group_wrapper(
                    backend, f"{device} checked", self._meeting, self._rank, self._size, timeout
                )
                backends[device] = (kind, wrapped)
        return backends

    @property
    def options(self) -> Any:
        """The options of NCCL, or of gloo where there is no NCCL."""
        return list(self._backends.values())[-1][1].options

    @property
    def timeout(self) -> timedelta:
        """The longest time that a call may wait. torch changes it in the backends (``dist.set_timeout``)."""
        timeout: timedelta = self._gloo.options._timeout
        return timeout

    def _make(self, backends: dict[str, tuple[Any, Any]]) -> dist.ProcessGroup:
        group = dist.ProcessGroup(self.store, self._rank, self._size)
        self._register(group, backends)
        return group

    @staticmethod
    def _register(group: dist.ProcessGroup, backends: dict[str, tuple[Any, Any]]) -> None:
        group._set_default_backend(list(backends.values())[-1][0])
        for device, (kind, backend) in backends.items():
            group._register_backend(torch.device(device), kind, backend)

    def register_with(self, group: dist.ProcessGroup) -> None:
        """Register these backends with ``group``: they take the calls that it does not override."""
        self._register(group, self._backends)

    def named(self, name: str) -> Callable[..., dist.Work]:
        """Return a method of the group; ``name`` is its name since torch 2.13, and older torch is looked up too."""
        method: Callable[..., dist.Work]
        method = getattr(self.group, name, None) or getattr(self.group, _NEW_NAMES.get(name, name))
        return method

    def carried_on(self, device: torch.device) -> torch.device:
        """Return where messages of tensors on ``device`` lie while they are sent: gloo sends from the host's memory."""
        return torch.device("cpu") if self.serves[device.type] == "gloo" else device

    def between(self, device: torch.device, source: int, to: int) -> dist.ProcessGroup:
        """Return the group that sends a message from one rank to another.

        NCCL runs the messages between two ranks in the order of each rank's calls. If both ranks send first, they wait
        for each other, unless torch informs NCCL that the calls are one batch; torch does so only for its own class.
        Therefore messages to lower ranks have communicators of their own.
        """
        if device.type != "cuda" or self.serves["cuda"] != "nccl" or source == to:
            return self.group
        if self._downward is None:
            down = self._make_nccl(dist.PrefixStore("nccl down/", self.store))
            self._downward = self._make({**self._backends, "cuda": (dist.ProcessGroup.BackendType.NCCL, down)})
        peer = to if source == self._rank else source
        if peer not in self._met:
            # The first message makes a communicator, and both ranks have to take part. Exchange one message on each of
            # the two communicators here, in the same order on both ranks.
            self._met.add(peer)
            for group, sender in ((self.group, min(source, to)), (self._downward, max(source, to))):
                note = torch.zeros(1, dtype=torch.uint8, device=device)
                if sender == self._rank:
                    group.send([note], peer, 0).wait()
                else:
                    group.recv([note], peer, 0).wait()
        return self.group if source < to else self._downward

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([every], [mine]).wait()
        return every

    def _prove(self) -> None:
        try:
            prove(self._gather, self._rank, self.token)
        except LinkError as error:
            raise TransportError(f"process group of {self._size} ranks: {error}", [error.peer]) from None

    def agree(self, facts: str) -> None:
        """Raise ``PlanMismatch`` on every rank if ``facts`` differ over ranks."""
        mine = torch.frombuffer(bytearray(digest(facts)), dtype=torch.uint8)
        every = self._gather(mine)
        differ = [rank for rank, theirs in enumerate(every) if not torch.equal(theirs, every[0])]
        if not differ:
            return
        text = torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], device="cpu")
        self._gloo.broadcast(length, 0).wait()
        if not 0 <= int(length) <= _MOST_FACTS:
            raise TransportError(f"rank 0 announces a policy of {int(length)} bytes, which makes no sense", [0])
        text = text if self._rank == 0 else text.new_empty(int(length))
        self._gloo.broadcast(text, 0).wait()
        raise PlanMismatch(
            f"the policy of a process group differs over ranks: {differ} differ from rank 0. Rank 0 has\n"
            f"{bytes(text.tolist()).decode(errors='replace')}\n"
            f"and this rank, {self._rank},\n{facts}\nGive all ranks the same rules and the same version of fusionlayer",
            ranks=differ,
        )

    def shut(self, *, abort: bool) -> None:
        """Close the connections, after the calls in flight or, with ``abort``, at once."""
        for group in filter(None, (self._downward, self.group)):
            if abort:
                group.abort()
            else:
                group.shutdown()


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, options: Any) -> dist.ProcessGroupGloo:
    kind: Any = dist.ProcessGroupGloo
    if isinstance(options, kind._Options):
        options._timeout = timeout
        options._devices = options._devices or [kind.create_default_device()]
        gloo = kind(store, rank, size, options)
    else:
        gloo = kind(store, rank, size, timeout)
    _begin_numbers(gloo)
    return gloo  # type: ignore[no-any-return]


def _nccl(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta, options: Any
) -> dist.ProcessGroupNCCL:
    if not isinstance(options, dist.ProcessGroupNCCL.Options):
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    _begin_numbers(nccl)
    return nccl


def _begin_numbers(backend: Any) -> None:
    """Number the calls of a backend alike on all ranks. Since torch 2.14 backends do so themselves, and warn."""
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
        backend._set_sequence_number_for_group()
