"""Reads which collectives this process has made: from torch's flight recorder, and from the transports' watches.

Torch records every call of gloo and of NCCL, also from C++ such as DDP's, so no function of torch is replaced and a
call costs nothing more. Its short form takes a tenth of a millisecond and has each group's position. The long one takes
some 20 ms for 2000 calls, so it is read rarely.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from . import stack
from .calls import Call
from .monitor import monitor
from .state import BLOCK, ChannelState

_Numbered = tuple[int, Call]

_TAIL = 32
# The types of torch whose names in C++ are others.
_TYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
}
_OURS = "fusionlayer/"
# Seconds between two looks for the name of a group that has none, at most.
_NAMES = 60.0


class Recorder:
    """Reads this rank's position in each process group and each transport. One thread uses it."""

    def __init__(self) -> None:
        found = (getattr(dist.distributed_c10d, name, None) or _of_torch(name) for name in _DUMPS)
        self._dumps: list[Callable[..., bytes]] = [dump for dump in found if dump is not None]
        self._names: dict[tuple[int, str], str] = {}
        self._next_names, self._patience = 0.0, 1.0
        self._kept: dict[str, tuple[_Numbered, ...]] = {}

    def progress(self, *, anew: bool = False) -> dict[str, ChannelState]:
        """Return the position of each channel, without its single calls.

        ``anew``: read the groups' names again, even if the last attempt found none.
        """
        if anew:
            self._next_names = 0.0
        world = dist.distributed_c10d._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)  # others make and destroy groups meanwhile
        groups = {str(name): tuple(sorted(ranks[group])) for group, name in names.items() if group in ranks}
        channels = {}
        for kind, dump in enumerate(self._dumps):
            for number, status in _load(dump(False, False, False)).get("pg_status", {}).items():
                name = self._names.get((kind, number), "")
                if name not in groups and time.monotonic() > self._next_names:
                    # Torch names a group after it was made, and groups of no name are not the program's.
                    self._next_names = time.monotonic() + self._patience
                    self._patience = min(2 * self._patience, _NAMES)
                    self._read(kind, dump, stacks=False)
                    name = self._names.get((kind, number), "")
                entered, done = status["last_enqueued_collective"], status["last_completed_collective"]
                if name in groups and (entered > 0 or done > 0):
                    channels[f"group {name}"] = ChannelState(groups[name], entered, done)
        # The calls of transports are compared by their heartbeats.
        return channels | {name: replace(channel, recent=()) for name, channel in monitor.channels().items()}

    def detailed(
        self, channels: Mapping[str, ChannelState], *, stacks: bool, asked: str = ""
    ) -> dict[str, ChannelState]:
        """Return the channels with their last calls.

        Args:
            channels: as ``progress`` has returned them.
            stacks: add the lines of the program that have made the calls.
            asked: a channel and two numbers of calls between which all are wanted, now and later.
        """
        calls: dict[str, list[_Numbered]] = {}
        for kind, dump in enumerate(self._dumps):
            calls |= self._read(kind, dump, stacks=stacks)
        found = dict(channels)
        for name, channel in channels.items():
            noted = calls.get(name.removeprefix("group "), [])
            if asked.startswith(f"{name} "):
                self._kept[name] = tuple(_between(noted, asked))
            if noted and not name.startswith(_OURS):
                found[name] = replace(
                    channel,
                    call=dict(noted).get(channel.entered) if channel.entered > channel.done else None,
                    recent=(*self._kept.get(name, ()), *noted[-_TAIL:]),
                    blocks=_blocks(noted),
                )
        return found

    def _read(self, kind: int, dump: Callable[..., bytes], *, stacks: bool) -> dict[str, list[_Numbered]]:
        calls: dict[str, list[_Numbered]] = defaultdict(list)
        for entry in _load(dump(True, stacks, False)).get("entries", []):
            name = entry["process_group"][0]
            self._names[kind, str(entry["pg_id"])] = name
            if not entry["is_p2p"]:
                calls[name].append((entry["collective_seq_id"], Call(_describe(entry), where=_line(entry))))
        return calls


_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def _of_torch(name: str) -> Callable[..., bytes] | None:
    """Return a function of torch's C++ part, None where this torch was built without it."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, name, None)


def _load(dumped: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = pickle.loads(dumped)  # of this process itself
    return loaded


def _between(noted: list[_Numbered], asked: str) -> list[_Numbered]:
    """Return the calls between two numbers, at most ``BLOCK``, at the end of a text that others have written."""
    ends = asked.split(" ")[-2:]
    if not all(end.isdecimal() and len(end) < 19 for end in ends):
        return []
    return [each for each in noted if int(ends[0]) <= each[0] <= int(ends[1])][:BLOCK]


def _describe(entry: Mapping[str, Any]) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    types = [_TYPES.get(name, name.lower()) for name in entry["input_dtypes"]]
    sizes = [f"({', '.join(map(str, size))})" for size in entry["input_sizes"]]
    tensors = ", ".join(f"{size} {kind}" for size, kind in zip(sizes, types, strict=False))
    return f"{operation} of {tensors}" if tensors else operation


def _line(entry: Mapping[str, Any]) -> str:
    return stack.of_frames((frame["filename"], frame["line"]) for frame in entry.get("frames", ()))


def _blocks(noted: list[_Numbered]) -> dict[str, int]:
    """Return a checksum, equal on all ranks of a right program, for each whole block of consecutive calls."""
    sums: dict[int, int] = {}
    counts: dict[int, int] = defaultdict(int)
    for number, call in noted:
        block = number // BLOCK
        sums[block] = zlib.crc32(call.common.encode(), sums.get(block, 0))
        counts[block] += 1
    return {str(block): each for block, each in sums.items() if counts[block] == BLOCK}
