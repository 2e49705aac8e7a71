"""This process's part in an elastic job: the members, their step, and the state for joining processes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from ..base import files
from ..base.config import Config
from ..base.errors import ConfigError, PlanMismatch, TransportError, kind_of
from ..launch import RankInfo
from ..launch.stores import SealedStore
from ..process import outages
from ..process.bounded import bounded
from ..process.interfaces import is_loopback, with_port
from ..process.processes import Identity, node_name
from ..transport import Transport, local
from ..transport.c10d import C10dTransport
from .forming import NEWEST, PATIENCE, Final, Former, ask_to_join, publish
from .generation import Generation, Member, MemberAddress, MemberReport, decode_member, encode_member
from .member_store import DistantStore, open_store, reach, sealed

_MOST_BYTES = 1 << 24
"""Bytes of a file that names the members."""


class Members:
    """The members of an elastic job, as this process knows them; ``fusionlayer.membership()`` returns it.

    The thread that trains uses it, except for ``agree``.

    Args:
        settings: the settings of the job.
        loopback: all members are on this host, and no other may reach them.
        written: file for the addresses of the members; None: none is written.

    Attributes:
        generation: number of changes of membership so far, failed ones included.
        rank, size: of this member; before a process has joined, those of the prospective member.
        step: number of steps of the job whose results count: the same on all members between two steps.
        has_joined: whether this process takes part; a newcomer does from its first ``step`` on.
        change_due: whether the members have agreed to change after the present step, because others wait to join.
        transport: over all members.
    """

    def __init__(self, settings: Config, loopback: bool, written: str | None) -> None:
        self._settings = settings
        self._loopback = loopback
        self._written = written
        kept, where = open_store(loopback, PATIENCE)
        self._own_store = sealed(kept)
        self._me = Member(secrets.token_hex(8), where, Identity.own().encode())
        self._former = Former(self._me, self._own_store, settings.timeout, self._open_next)
        self._next: TCPStore | None = None
        self._store: Store | None = None
        self._shared: dict[str, Any] = {}
        self._seen = 0
        self._call: list[Callable[[], object]] = []
        self._addresses: Callable[[], Sequence[MemberAddress]] = tuple
        self.step = 0
        self.has_joined = False
        self.change_due = False
        self._awaited = False
        self.transport: Transport = local.alone()
        self._now = Generation(0, (self._me,), (), 0, where)

    # ---- the beginning ----------------------------------------------------------------------------------------------

    @classmethod
    def begin(
        cls, place: RankInfo, store: Store | None, settings: Config, loopback: bool, written: str | None
    ) -> Members:
        """Return the members that a launcher has started together, which have met in ``store``; None: one alone.

        Raises:
            TransportError: one was lost meanwhile.
        """
        made = cls(settings, loopback, written)
        if store is None:
            first = Generation(0, (made._me,), (), 0, made._open_next())
        else:
            end = time.monotonic() + settings.timeout + PATIENCE
            try:
                first = bounded(partial(made._meet, place, store), end, name="meeting of members")
            except RuntimeError as error:
                raise TransportError(f"rank {place.rank}: a member was lost while they met: {error}") from error
        made._install(first)
        made.has_joined = True
        return made

    def _meet(self, place: RankInfo, store: Store) -> Generation:
        """Return the first generation, which rank 0 writes down in ``store``."""
        store = SealedStore(store, "members")
        store.set(f"member/{place.rank}", encode_member(self._me))
        if place.rank == 0:
            members = tuple(decode_member(store.get(f"member/{rank}")) for rank in range(place.size))
            store.set("generation", Generation(0, members, (), 0, self._open_next()).encode())
        return Generation.decode(store.get("generation"))

    @classmethod
    def newcomer(cls, address: str, settings: Config, written: str | None) -> Members:
        """Return the part of a process that joins later, at its first step.

        Args:
            address: the address of any member, as host:port, several of them with commas between, or a file with the
                member list.

        Raises:
            ConfigError: ``address`` is none of these.
            TransportError: no member answers.
        """
        now, at = _newest(address, settings.timeout)
        made = cls(settings, is_loopback(at.names[0]), written)
        made._addresses = lambda: _named_by(address)
        made._now = now
        return made

    # ---- what users call --------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of changes of membership so far."""
        return self._now.number

    @property
    def rank(self) -> int:
        """The place of this process among the members."""
        rank = self._now.rank_of(self._me.id)
        return len(self._now.members) if rank is None else rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self._now.members) + (self._now.rank_of(self._me.id) is None)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of the members, in the order of ranks."""
        return tuple(member.process.pid for member in self._now.members)

    @property
    def address(self) -> str:
        """Where newcomers find this member: host:port, for FUSIONLAYER_JOIN."""
        return with_port(self._me.address.names[0], self._me.address.port)

    def changed(self) -> bool:
        """Return whether the members have changed since the last call, or since this process began."""
        seen, self._seen = self._seen, self._now.number
        return self._now.number != seen

    def share(self, **objects: Any) -> None:
        """Give newcomers the state of these objects, and samplers the ranks that there are after each change.

        All members share objects of the same names, before their first step.

        Args:
            objects: with ``state_dict`` and ``load_state_dict``, such as schedulers and ``ElasticSampler``, or a
                ``DistributedSampler``.

        Raises:
            ConfigError: an object has neither.
        """
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")) and not _is_dealing(each):
                raise ConfigError(
                    f"share({name}=...): got {kind_of(each)}; expected an object with state_dict() and "
                    "load_state_dict(), or a DistributedSampler"
                )
        self._shared.update(objects)
        self._deal()

    # ---- what optimizers call ---------------------------------------------------------------------------------------

    @property
    def place(self) -> RankInfo:
        """This process's place, for scripts that ask for ranks and devices."""
        here = [rank for rank, each in enumerate(self._now.members) if each.address.node == node_name()]
        if self.rank not in here:
            here.append(self.rank)
        return RankInfo(self.rank, self.size, here.index(self.rank), len(here), "members")

    @property
    def store(self) -> Store | None:
        """The store in which the present members have met; None for a member that is alone or has yet to join."""
        return self._store

    @property
    def fresh(self) -> tuple[int, ...]:
        """Ranks of the members that need the job's state."""
        return tuple(rank for each in self._now.fresh if (rank := self._now.rank_of(each)) is not None)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks of the members that lack the results of the last step that counts."""
        return tuple(rank for each in self._now.behind if (rank := self._now.rank_of(each)) is not None)

    def when_changed(self, call: Callable[[], object]) -> None:
        """Have ``call`` run after each change, when ranks and ``transport`` are the new ones."""
        self._call.append(call)

    def agree(self, step: int, transport: Transport) -> None:
        """Return when all members have the results of this many steps; ask if others wait to join. Runs on a lane.

        Raises:
            PlanMismatch: members have made other numbers of steps.
            TransportError: a member was lost.
        """
        wants = transport.rank == 0 and self._former.has_visitors()
        mine = torch.tensor([step, wants], dtype=torch.int64, device="cpu")
        every = torch.empty(transport.size, 2, dtype=torch.int64, device="cpu")
        with transport.doing("the end of a step"):
            transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
        steps = every[:, 0].tolist()
        if len({*steps}) > 1:
            raise PlanMismatch(f"members have made different numbers of steps, in the order of ranks: {steps}")
        self._awaited = bool(every[:, 1].any())

    def settle(self) -> None:
        """Note what members have agreed on in ``agree``, which has ended: whether to change after the present step."""
        self.change_due = self._awaited

    def agree_alone(self) -> None:
        """Do the work of ``agree`` for a member that is the only one."""
        self.change_due = self._former.has_visitors()

    def change(self, done: int, *, between: bool, error: TransportError | None = None) -> None:
        """Form the next generation with the others, and connect to them.

        Args:
            done: number of steps whose results this member has, all of them; -1: it has no state yet.
            between: whether it is between two steps.
            error: the cause of the change; None: others wait to join.

        Raises:
            TransportError: a member was lost meanwhile; ``can_go_on`` says whether to call it again.
        """
        ranks = () if error is None else error.ranks
        blamed = [self._now.members[rank].id for rank in ranks if rank < len(self._now.members)]
        old = self.transport
        if self.has_joined:
            formed = self._former.form(MemberReport(self._now, done, between), blamed)
        else:
            formed = ask_to_join(self._me, self._addresses, self._settings.timeout)
        old.close()
        self.has_joined = True
        self.change_due = False
        self._install(formed)

    def can_go_on(self, error: TransportError) -> bool:
        """Return whether ``change`` may be called again after this error: it is not for good."""
        return not isinstance(error, Final)

    def all_have_state(self) -> None:
        """Note that newcomers have got the state, and all members the results of the last step."""
        self._now = replace(self._now, fresh=(), behind=())
        publish(self._own_store, self._now)

    def leave(self) -> None:
        """Leave the job for good."""
        self.transport.finish()
        self._store = self._next = None
        # The port closes, by which others see that this process is no member any more.
        del self._own_store, self._former

    def states(self) -> dict[str, Any]:
        """Return the states of shared objects, for newcomers."""
        return {name: each.state_dict() for name, each in self._shared.items() if hasattr(each, "state_dict")}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Take the states of shared objects over from a member.

        Raises:
            ConfigError: this process does not share the same ones.
        """
        mine = {name for name, each in self._shared.items() if hasattr(each, "state_dict")}
        if mine != states.keys():
            raise ConfigError(
                f"this process shares {sorted(mine)}, the members share {sorted(states)}; call share() with the same "
                "names on all of them, before the first step"
            )
        for name, state in states.items():
            self._shared[name].load_state_dict(state)
        self._deal()

    # ---- a new generation -------------------------------------------------------------------------------------------

    def _open_next(self) -> MemberAddress:
        """Open the store of a generation that this member leads."""
        self._next, address = open_store(self._loopback, self._settings.timeout)
        return address

    def _install(self, formed: Generation) -> None:
        """Make ``formed`` the present generation, and connect to its members."""
        self._now = formed
        publish(self._own_store, formed)
        rank, size = self.rank, self.size
        if rank == 0 and self._written is not None:
            with files.whole(self._written) as file:  # no reader sees half of it
                file.write(formed.encode().encode())
        if size > 1:
            settings = self._settings
            self._store = self._next if rank == 0 else reach(formed.store, settings.timeout)
            assert self._store is not None
            each = settings.ranks_per_node
            self.transport = C10dTransport.among(
                range(size),
                f"generation/{formed.number}",
                settings.timeout,
                stall_warning=settings.stall_warning,
                node=None if each is None else f"node {rank // each}",
                checksum=settings.checksum,
                nccl=torch.cuda.is_available() and torch.distributed.is_nccl_available(),
                place=(self._store, rank),
                known={other: member.process for other, member in enumerate(formed.members) if other != rank},
            )
        else:
            self._store, self.transport = None, local.alone()
        for call in self._call:
            call()
        self._deal()

    def _deal(self) -> None:
        """Give samplers the present ranks."""
        for each in self._shared.values():
            if _is_dealing(each):
                each.num_replicas, each.rank = self.size, self.rank
                count = len(each.dataset)
                kept = each.drop_last and count % self.size
                each.num_samples = count // self.size if kept else -(-count // self.size)
                each.total_size = each.num_samples * self.size
            elif isinstance(each, torch.utils.data.Sampler) and hasattr(each, "reset"):
                each.reset()


def _is_dealing(sampler: object) -> bool:
    return isinstance(sampler, torch.utils.data.DistributedSampler)


def _newest(address: str, timeout: float) -> tuple[Generation, MemberAddress]:
    """Return the generation that a member knows, for what a newcomer's rank would be, and where its store is."""
    end = time.monotonic() + timeout
    why = "there is no such file"
    while True:
        for known in _named_by(address):
            try:
                return Generation.decode(DistantStore(known, PATIENCE).get(NEWEST)), known
            except (TransportError, RuntimeError) as error:
                why = outages.first_line(error)
        if time.monotonic() > end:
            raise TransportError(f"FUSIONLAYER_JOIN={address}: no member was found within {timeout:g} s, as {why}")
        time.sleep(0.1)


def _named_by(address: str) -> list[MemberAddress]:
    """Return the stores that a text names: host:port with commas between, or a file of members, if it is there."""
    found = []
    try:
        if os.path.sep in address:
            text = files.read(address, _MOST_BYTES, follow=True)
            return [member.address for member in Generation.decode(text).members]
        for part in address.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError("no host:port")
            found.append(MemberAddress("", (host.removeprefix("[").removesuffix("]"),), int(port), ""))
    except FileNotFoundError:
        return []  # the members have not begun yet
    except (OSError, ValueError, TransportError) as error:
        raise ConfigError(
            f"FUSIONLAYER_JOIN={address}: {error}; expected host:port of a member, or the file that "
            "FUSIONLAYER_MEMBERS names for the members"
        ) from None
    return found
