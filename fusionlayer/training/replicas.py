"""Replicas: every rank's copy of the parameters. They are made equal at first, and compared while training runs."""

from __future__ import annotations

import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import context
from ..base.config import Config
from ..base.errors import ConfigError, PlanMismatch, ReplicaMismatch
from ..coordination.matching import differing
from ..native.wire import digest
from ..transport import Transport
from ..transport.composed import by_rank
from .digests import Digest, await_gpus, cut, digest_of, flat
from .parameters import is_distributed, local_part

_FUSED_BYTES = 1 << 25
"""Bytes that a broadcast copies into one message: what it needs next to the parameters."""

_DESCRIPTION_BYTES = 1 << 26
"""A longer description of a rank's parameters is not asked for: its size has come from another rank."""

_RECORD = "<?7xQ16s"
"""The record that ranks compare: whether the rank takes part in the step, and digests of parameters and options."""

Put = Callable[[Callable[[Transport], None]], Callable[[], None]]
"""Begins an exchange in the same place on all ranks, and returns a function that waits for its end."""


def check_interval(asked: bool | int | None) -> int:
    """Return within how many steps replicas are compared, 0 for never; None and True take the configured number."""
    if asked is not None and (not isinstance(asked, int) or asked < 0):
        raise ConfigError(f"check_replicas={asked!r}; expected a number of steps, False for never, or None")
    configured = context.settings().check_replicas
    if asked is True:
        return configured or Config.check_replicas
    return configured if asked is None else int(asked)


@dataclass
class Replicas:
    """The tensors that all ranks hold alike, and what is done to keep them so.

    Tensors without plain memory, such as sparse or quantised ones and those on the meta device, are left out.

    Attributes:
        named: parameters by name, in the same order on all ranks.
        broadcast: rank 0's values replace those of other ranks at first. Differences that are found later are errors.
            False: replicas are the user's, and a difference is a warning.
        every: a difference is found within this many steps; 0: never.
        buffers: broadcast too, but not compared later: ranks may change them.
        facts: lines about further options, which have to be the same on all ranks.
    """

    named: dict[str, Tensor]
    broadcast: bool
    every: int
    buffers: dict[str, Tensor] = field(default_factory=dict)
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.named = {name: x for name, x in self.named.items() if _has_memory(x)}
        self.buffers = {name: x for name, x in self.buffers.items() if _has_memory(x)}

    @property
    def lines(self) -> list[str]:
        """A description of everything that must be equal on all ranks: options, names, shapes and types."""
        lines = [f"broadcast={self.broadcast}", f"check_replicas={self.every}", *self.facts]
        return lines + [_describe(name, x) for name, x in {**self.named, **self.buffers}.items()]

    def unite(self, transport: Transport, *, rejoining: bool = False) -> None:
        """Compare names, shapes and options with the other ranks, then give all of them rank 0's values.

        Only what differs is sent. They are not, if ``rejoining`` is set on any rank.
        """
        tensors, lines = {**self.named, **self.buffers}, self.lines
        value = digest_of(tensors.values()) if self.broadcast and not rejoining else 0
        mine = struct.pack("<16s?7xQ", digest(*lines)[:16], rejoining, value)
        if transport.all_equal(mine):
            return
        records = [struct.unpack("<16s?7xQ", record) for record in transport.all_gather_bytes(mine)]
        if any(facts != records[0][0] for facts, _, _ in records):
            raise _mismatch(lines, [facts != records[0][0] for facts, _, _ in records], transport)
        if not self.broadcast or any(rejoins for _, rejoins, _ in records):
            return
        if any(theirs != records[0][2] for _, _, theirs in records):
            every = _gathered_digests(tensors, transport)
            broadcast_from_0([x for x, row in zip(tensors.values(), every, strict=True) if len({*row}) > 1], transport)

    def add(self, named: Mapping[str, Tensor]) -> None:
        """Compare these parameters too, from the next round on. All ranks add the same ones in the same step."""
        self.named.update({name: x for name, x in named.items() if _has_memory(x)})

    def check(
        self, put: Put, named: Mapping[str, Tensor] | None = None, optimizer: Optimizer | None = None
    ) -> ReplicaCheck | None:
        """Return the comparer of the parameters, or of ``named``, during training; None if it is switched off.

        Options of the ``optimizer``, such as learning rates, are compared too.
        """
        named = self.named if named is None else named
        options = _nothing if optimizer is None else partial(_options, weakref.ref(optimizer))
        return ReplicaCheck(named, self.every, put, strict=self.broadcast, options=options) if self.every else None


class ReplicaCheck:
    """Compares parameters over ranks, at no noticeable cost: a part of them in each step, by a digest of 8 bytes.

    The first step compares everything. After it each step digests a share, and the digests of all shares are compared
    once in ``every`` / 2 steps: so a difference is found within ``every`` steps. A digest shows any single bit.

    The thread that trains calls ``begin`` at the end of each step of the engine, before the update, and ``settle``
    later, if it can wait. All ranks do so in the same steps.

    Args:
        named: parameters by name, the same on all ranks; looked at again when a round of comparing begins.
        every: a difference is found within this many steps.
        put: begins an exchange.
        strict: a difference raises ``ReplicaMismatch``. False: it warns once, and nothing is compared any more.
        options: returns lines that have to be the same on all ranks whenever parameters are compared.

    Attributes:
        waiting: waits for the comparison that ``begin`` has begun; None: there is none.
    """

    def __init__(
        self, named: Mapping[str, Tensor], every: int, put: Put, *, strict: bool, options: Callable[[], list[str]]
    ) -> None:
        self._named = named
        self._steps = max(1, (every - 1) // 2)
        self._put = put
        self._strict = strict
        self._shares: Iterator[list[tuple[Tensor, slice]]] | None = iter([cut(named.values(), 1)[0]])
        self._left = 1
        self._digest = Digest()
        self._present = True
        self._on_gpu = any(x.is_cuda for x in named.values())
        self.waiting: Callable[[], None] | None = None
        # The last comparison: this rank's record, whether all ranks' records are equal, and if not, all records.
        self._record, self._are_equal = b"", True
        self._records: list[tuple[bool, int, bytes]] = []
        self._read_options = options
        self._options: list[str] = []

    def begin(self, *, present: bool = True) -> None:
        """Digest this step's share of the parameters; in the last step of a round begin to compare.

        Args:
            present: False: this rank has no part in the step, so that its parameters may differ (``hvd.join``).

        Raises:
            ReplicaMismatch: as ``settle``, of an earlier comparison.
        """
        if self.waiting is not None:
            self._judge(self.waiting)
        if self._shares is None:
            return
        self._present = self._present and present
        share = next(self._shares)
        if share:
            self._digest.add(flat(x)[part] for x, part in share)
        self._left -= 1
        if self._left == 0:
            self._digest.seal()
            self._options = self._read_options()
            self.waiting = self._put(partial(self._compare, self._digest, self._present))
            self._digest, self._present, self._left = Digest(), True, self._steps
            self._shares = iter(cut(self._named.values(), self._steps))

    def settle(self) -> None:
        """Wait for a comparison that ``begin`` has begun, if there is one; raise ``ReplicaMismatch`` on all ranks.

        For parameters on a GPU the next ``begin`` does so: the GPU has not come so far yet, and waiting would delay the
        step.
        """
        if self.waiting is not None and not self._on_gpu:
            self._judge(self.waiting)

    def _judge(self, wait: Callable[[], None]) -> None:
        self.waiting = None
        wait()
        if self._are_equal:
            return
        self._put(self._gather)()
        present = [rank for rank, (there, _, _) in enumerate(self._records) if there]
        if len({options for there, _, options in self._records if there}) > 1:
            self._report_options(present)
        elif len({value for there, value, _ in self._records if there}) > 1:
            self._report(present)

    def finish(self) -> None:
        """Wait for the comparison of ``begin``, whatever its result, so that nothing is in flight."""
        if self.waiting is not None:
            with suppress(Exception):
                self.waiting()

    def _compare(self, mine: Digest, present: bool, transport: Transport) -> None:
        self._record = struct.pack(_RECORD, present, mine.read(), digest(*self._options)[:16])
        self._are_equal = transport.all_equal(self._record, present)

    def _gather(self, transport: Transport) -> None:
        self._records = [struct.unpack(_RECORD, record) for record in transport.all_gather_bytes(self._record)]

    def _report_options(self, present: Sequence[int]) -> None:
        """Find out which option of the optimizer differs on which of the ranks that are ``present``; raise or warn."""
        texts: list[str] = []
        self._put(lambda transport: texts.extend(_gathered_texts("\n".join(self._options), transport)))()
        rows = [row for row in zip_longest(*(texts[rank].splitlines() for rank in present)) if len({*row}) > 1]
        found = differing(dict(zip(present, texts, strict=True)))
        shown = ", ".join(f"{line} on rank {rank}" for rank, line in [*zip(present, rows[0], strict=True)][:8])
        text = (
            f"options of the optimizer differ over ranks: {shown}; ranks update their replicas differently: give all "
            "ranks the same options and schedules, and schedulers that read a loss, such as ReduceLROnPlateau, the "
            "average over ranks; or give check_replicas=False if differences are meant"
        )
        if self._strict:
            raise ReplicaMismatch(text, ranks=found)
        self._shares = None
        warnings.warn(text, stacklevel=2)

    def _report(self, present: Sequence[int]) -> None:
        """Find out which tensors differ on which of the ranks that are ``present``, and raise or warn."""
        rows: list[list[int]] = []
        self._put(lambda transport: rows.extend(_gathered_digests(self._named, transport)))()
        found = {
            name: differing({rank: row[rank] for rank in present}) for name, row in zip(self._named, rows, strict=True)
        }
        found = {name: ranks for name, ranks in found.items() if ranks}
        if not found:
            return  # what differed is equal again
        shown = ", ".join(f"{name!r} on {_ranks(ranks)}" for name, ranks in list(found.items())[:3])
        text = f"{len(found)} of {len(self._named)} parameters differ over ranks: {shown}"
        if len(found) > 3:
            text += ", ..."
        if self._strict:
            raise ReplicaMismatch(
                f"{text}; weights were loaded or changed on some ranks only, a rank has another learning rate, skipped "
                "a step or clipped its own gradients before they were averaged, gradients are averaged twice, a method "
                "of two passes such as SAM moved weights by a rank's own gradients, processors or numbers of threads "
                "are not the same, or memory or a message is damaged: mend that and go on from a checkpoint, call "
                "broadcast_parameters(model.state_dict()), or give check_replicas=False if differences are meant",
                ranks=sorted({rank for ranks in found.values() for rank in ranks}),
                tensors=found,
            )
        self._shares = None
        warnings.warn(
            f"{text}; each rank trains another model: call broadcast_parameters(model.state_dict(), root_rank=0) "
            "before the first step, or give check_replicas=False if that is meant",
            stacklevel=2,
        )


def broadcast_from_0(tensors: Iterable[Tensor], transport: Transport) -> None:
    """Give every rank rank 0's values of ``tensors``, in place; small ones are sent together.

    All ranks call it together, with tensors of the same shapes and types, of any devices. For a DTensor this rank's
    part counts.
    """
    parts = [local_part(x.detach()) for x in tensors]
    fused: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    await_gpus(parts)
    with torch.no_grad():
        for x in parts:
            waiting = fused.setdefault((x.dtype, x.device), [])
            waiting.append(x)
            if sum(each.nbytes for each in waiting) >= _FUSED_BYTES:
                _broadcast(waiting, transport)
                waiting.clear()
        for waiting in fused.values():
            if waiting:
                _broadcast(waiting, transport)
    await_gpus(parts)


def _broadcast(tensors: Sequence[Tensor], transport: Transport) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        transport.broadcast(tensors[0], 0)
        return
    fused = torch.cat([x.reshape(-1) for x in tensors])
    transport.broadcast(fused, 0)
    if transport.rank != 0:
        for x, values in zip(tensors, fused.split([x.numel() for x in tensors]), strict=True):
            x.copy_(values.view(x.shape))


def _has_memory(x: Tensor) -> bool:
    # A class with operations of its own may keep its values in several tensors.
    plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ or is_distributed(x)
    return plain and x.layout is torch.strided and not x.is_quantized and not x.is_meta


def _gathered_digests(named: Mapping[str, Tensor], transport: Transport) -> list[list[int]]:
    """Return the digests of each tensor, those of all ranks; ranks have equally many tensors."""
    mine = struct.pack(f"<{len(named)}Q", *(digest_of([x]) for x in named.values()))
    every = [struct.unpack(f"<{len(named)}Q", record) for record in transport.all_gather_bytes(mine)]
    return [list(row) for row in zip(*every, strict=True)]


def _gathered_texts(text: str, transport: Transport) -> list[str]:
    """Return the texts of all ranks; none if one is longer than a description is."""
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = [struct.unpack("<q", size)[0] for size in transport.all_gather_bytes(struct.pack("<q", len(mine)))]
    if not all(0 <= size <= _DESCRIPTION_BYTES for size in sizes):
        return []
    texts = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    transport.exchange(by_rank([mine] * transport.size, texts))
    return [each.numpy().tobytes().decode(errors="replace") for each in texts]


def _nothing() -> list[str]:
    """Return no options: there is no optimizer whose options are compared."""
    return []


def _options(optimizer: weakref.ref[Optimizer]) -> list[str]:
    """Return a line for each number that the optimizer's class has as an option, of each parameter group."""
    found = optimizer()
    groups = [] if found is None else vars(found).get("param_groups", [])
    return [
        f"{key} of group {i} is {value}"
        for i, group in enumerate(groups)
        for key in sorted(getattr(found, "defaults", group))  # a user's own may have none
        if (value := _number(group.get(key))) is not None
    ]


def _number(value: object) -> object:
    if isinstance(value, Tensor):  # one on a GPU is left out, as reading it waits for the device
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    numbers = value if isinstance(value, tuple) else (value,)
    return value if all(isinstance(each, (int, float)) for each in numbers) else None


def _describe(name: str, x: Tensor) -> str:
    part = local_part(x.detach())
    return f"{name!r} {tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"


def _mismatch(lines: Sequence[str], differs: Sequence[bool], transport: Transport) -> PlanMismatch:
    """Return the error for ranks whose descriptions differ from rank 0's; it shows the first line that does."""
    ranks = [rank for rank, differ in enumerate(differs) if differ]
    shown = ""
    texts = _gathered_texts("\n".join(lines), transport)
    if texts:
        pairs = zip_longest(texts[0].splitlines(), texts[ranks[0]].splitlines(), fillvalue="no more")
        ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("?", "?"))
        shown = f": rank 0 has {ours}, rank {ranks[0]} has {theirs}"
    return PlanMismatch(
        f"names, shapes or types of parameters differ over ranks (this is rank {transport.rank}): {ranks} differ from "
        f"rank 0{shown}; give every rank the same model, options and version of fusionlayer",
        ranks=ranks,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
