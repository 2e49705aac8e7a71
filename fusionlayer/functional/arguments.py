"""Arguments that all calls take: codec, operation and group, and the comparison of a call over ranks."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist

from .. import codecs, context
from ..base import config
from ..base.errors import ConfigError, PlanMismatch
from ..base.registry import nearest
from ..codecs import Codec
from ..native.wire import digest
from ..transport import Transport

Group = dist.ProcessGroup | Transport | None


class ReduceOp(Enum):
    """The operation of a reduction on the values of all ranks."""

    AVERAGE = "average"
    SUM = "sum"


AUTO = "auto"
"""A user's word instead of a codec: elements are sent uncompressed, or by ``zip`` if measured faster."""

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM


def make_codec(codec: str | Codec | None, options: Mapping[str, Any]) -> Codec:
    """Return the codec that a user's ``codec`` and options name; without a name, the configured one."""
    if isinstance(codec, Codec):
        if options:
            raise ConfigError(f"got the codec {codec} and the options {dict(options)}; give the codec's name with them")
        return codec
    if codec is None:
        settings = context.settings()
        with config.blame(settings, "codec", "codec_options"):
            return make_codec(settings.codec, {**settings.codec_options, **options})
    if codec == AUTO:
        raise ConfigError("codec 'auto' chooses for the gradients of a DistributedOptimizer; give a codec's name here")
    return codecs.get(codec, **options)


def refuse_unknown(
    front: Callable[..., Any], codec: str | Codec | None, options: Mapping[str, Any], more: Iterable[str] = ()
) -> None:
    """Refuse a misspelt argument, which a function with a codec's options as keywords would take for an option."""
    for option in options:
        if option in config.REMOVED:
            raise ConfigError(f"{front.__name__}({option}=...): it was removed: {config.REMOVED[option]}; leave it out")
    if not options or codec == AUTO or isinstance(codec, Codec):
        return
    name = context.settings().codec if codec is None else codec
    known = codecs.options(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        own = [p.name for p in inspect.signature(front).parameters.values() if p.kind is not p.VAR_KEYWORD]
        raise ConfigError(
            f"{front.__name__}() has no argument {unknown[0]!r}, and codec {name!r} no such option; "
            f"{nearest(unknown[0], [*own, *more, *known])}"
        )


def check_op(op: ReduceOp) -> ReduceOp:
    """Return ``op``, or raise ``ConfigError`` if it is not a ``ReduceOp``."""
    if not isinstance(op, ReduceOp):
        raise ConfigError(f"op={op!r}; expected fusionlayer.Average or fusionlayer.Sum")
    return op


def negotiate(transport: Transport, call: str, facts: Sequence[object], numbers: Sequence[int] = ()) -> list[list[int]]:
    """Return every rank's ``numbers``, after a check that all ranks make the same ``call`` with the same ``facts``.

    ``numbers`` holds at most as many numbers as there are ranks, and is padded to that length. Records then have one
    length in every call, so that ranks which make different calls can still exchange them and report the mismatch.
    """
    padded = [*numbers, *[0] * (transport.size - len(numbers))]
    record = digest(call, *facts)[:8] + struct.pack(f"<{len(padded)}q", *padded)
    records = transport.all_gather_bytes(record)
    differ = [rank for rank, record in enumerate(records) if record[:8] != records[0][:8]]
    if differ:
        shown = ", ".join(map(str, facts[:5])) + (", ..." if len(facts) > 5 else "")
        raise PlanMismatch(
            f"{call}({shown}) on rank {transport.rank}: ranks {differ} make another call than rank 0; give every rank "
            "the same shapes, types, codec and algorithm",
            ranks=differ,
        )
    return [list(struct.unpack_from(f"<{len(numbers)}q", record, 8)) for record in records]
