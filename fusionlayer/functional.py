"""Compressed collectives on single tensors, which a program calls directly."""

from __future__ import annotations

import inspect
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import codecs, collectives, context
from .base import config
from .base.errors import ConfigError, PlanMismatch, kind_of, require, whole_numbers
from .base.registry import nearest
from .base.seeds import derive_seed
from .codecs import Codec, CodecOptions, Part, PartsCodec
from .collectives import Scaling, halves, reduce_flat, reduce_scatter_flat, zipped
from .collectives.switching import Switcher, switcher_of
from .native.wire import DTYPE_CODES, digest
from .transport import Transport
from .transport._announced import pass_on, take_in
from .transport.composed import by_rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Average",
    "ReduceOp",
    "Sum",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "reduce_scatter",
    "switcher",
]

Group = dist.ProcessGroup | Transport | None
T = TypeVar("T")


class ReduceOp(Enum):
    """The operation of a reduction on the values of all ranks."""

    AVERAGE = "average"
    SUM = "sum"


AUTO = "auto"
"""A user's word instead of a codec: elements are sent uncompressed, or by ``zip`` if measured faster."""

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM


def make_codec(codec: str | Codec | None, options: Mapping[str, Any]) -> Codec:
    """Return the codec that a user's ``codec`` and options name; without a name, the configured one.

    Raises:
        ConfigError: the name or an option is unknown, or ``codec`` is a ``Codec`` and options are given with it.
    """
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
    """Refuse a misspelt argument, which a function that takes a codec's options as keywords would take for an option.

    Args:
        front: the function or class that a user has called.
        codec: the codec that the user gave; None is the configured one.
        options: the keywords that are no arguments of ``front``.
        more: keywords that ``front`` understands without naming them.

    Raises:
        ConfigError: the codec has no such option. It names the nearest argument or option.
    """
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


def _negotiate(
    transport: Transport, call: str, facts: Sequence[object], numbers: Sequence[int] = ()
) -> list[list[int]]:
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


def _seed(transport: Transport) -> int:
    return derive_seed(transport.sequence)


def _require_dense(call: str, tensor: object) -> None:
    require(tensor, Tensor, call, "a tensor")
    if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
        raise ConfigError(f"{call} got a {tensor.layout} tensor; expected a dense one, such as its to_dense()")


def _travelling(
    call: str, tensor: Tensor, codec: str | Codec | None, options: Mapping[str, Any], transport: Transport
) -> tuple[Codec, Switcher | None]:
    """Return the codec for a call, without header; with "auto", also the switcher that decides on its use."""
    if tensor.dtype not in DTYPE_CODES:
        raise ConfigError(
            f"{call} got a {tensor.dtype} tensor; expected float32, bfloat16 or float16: convert it, or call "
            "torch.distributed for other types"
        )
    if codec == AUTO:
        chosen = codecs.get("zip", **options).bare
        return chosen, switcher_of(transport, chosen)
    return _configured(codec, options).bare, None


def _configured(codec: str | Codec | None, options: Mapping[str, Any]) -> Codec:
    """Return the codec of a single tensor. The configured codec "auto" is for an optimizer's gradients, not for it."""
    return make_codec("raw" if codec is None and context.settings().codec == AUTO else codec, options)


def switcher(group: Group = None) -> Switcher:
    """Return the object that decides for ``codec="auto"`` on a group.

    Its ``str`` shows its choices, the measured times and the share of bytes that ``zip`` leaves.

    Args:
        group: process group or transport; None means all ranks.
    """
    return switcher_of(context.transport(group))


def all_reduce(
    tensor: Tensor,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    op: ReduceOp = Average,
    group: Group = None,
    **codec_options: Unpack[CodecOptions],
) -> Tensor:
    """Replace ``tensor`` by its average or sum over ranks. Every rank gets the same bits; messages are compressed.

    Args:
        tensor: any shape. f32, bf16 and f16 are compressed; other types (f64, integers) are summed uncompressed.
        codec: name or codec; None takes the configured one (``raw`` by default). "auto" changes no value: the tensor is
            sent uncompressed, or by ``zip`` if measured faster; see ``switcher``.
        algorithm: name of a collective; None chooses by codec and nodes.
        op: ``Average`` (integers cannot be averaged) or ``Sum``.
        group: process group or transport; None means all ranks.
        codec_options: options of a codec given by name.

    Returns:
        ``tensor``.

    Raises:
        ConfigError: a name or an option is unknown.
        PlanMismatch: ranks disagree on shape, type, codec or algorithm.
        TransportError: a peer failed, stopped or timed out.
    """
    _require_dense("all_reduce", tensor)
    average = check_op(op) is Average
    refuse_unknown(all_reduce, codec, codec_options)
    transport = context.transport(group)
    if average and not tensor.dtype.is_floating_point:
        raise ConfigError(f"op=Average of a {tensor.dtype} tensor; expected floating point, or op=Sum")
    if tensor.dtype in DTYPE_CODES:
        chosen, chooser = _travelling("all_reduce", tensor, codec, codec_options, transport)
    else:
        if codec != AUTO:
            _configured(codec, codec_options)  # a wrong name is an error, though this type is sent as it is
        chosen, chooser = codecs.get("raw"), None
    if chooser is not None:
        if algorithm not in (None, "switched"):
            raise ConfigError(f"codec 'auto' with algorithm={algorithm!r}; leave the algorithm out, or name a codec")
        algorithm = "switched"
    name = collectives.choose(chosen, transport.node_sizes, algorithm)
    _negotiate(transport, "all_reduce", [tuple(tensor.shape), tensor.dtype, chosen, name, op])
    with torch.no_grad():
        flat = tensor.detach().contiguous().view(-1)
        if isinstance(chosen, PartsCodec):
            chosen = chosen.for_parts([Part("", tuple(tensor.shape))])
        scaling = Scaling.of(tensor.dtype, transport.size, average=average)
        reduce_flat(flat, chosen, transport, scaling, algorithm=name, seed=_seed(transport))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def all_gather(
    tensor: Tensor, codec: str | Codec | None = None, group: Group = None, **codec_options: Unpack[CodecOptions]
) -> Tensor:
    """Return all ranks' tensors, concatenated along the first dimension. Every rank gets the same bits.

    Args:
        tensor: (n, ...) f32, bf16 or f16. n may differ over ranks and may be 0; the other dimensions and the type are
            equal on all ranks. A scalar counts as (1,).
        codec: see ``all_reduce``; this rank's own part passes through it too.
        group: process group or transport; None means all ranks.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError, PlanMismatch, TransportError: as ``all_reduce``.
    """
    _require_dense("all_gather", tensor)
    refuse_unknown(all_gather, codec, codec_options)
    transport = context.transport(group)
    chosen, chooser = _travelling("all_gather", tensor, codec, codec_options, transport)
    part = tensor.detach().contiguous() if tensor.dim() else tensor.detach().view(1)
    rest = part.shape[1:]
    facts = [tuple(rest), tensor.dtype, chosen, chooser is None]
    lengths = [n for (n,) in _negotiate(transport, "all_gather", facts, [len(part)])]
    out = part.new_empty(sum(lengths), *rest)
    with torch.no_grad():
        if chosen.zips:
            row = rest.numel()
            counts = [n * row for n in lengths]
            flat, into = part.view(-1), out.view(-1)
            if chooser is not None:
                chooser.all_gather(flat, into, lengths=counts)
            else:
                zipped.all_gather(flat, into, chosen, transport, lengths=counts)
            return out
        if len(set(lengths)) == 1:  # messages are equally long, so they may pass through a rank of their node
            halves.all_gather(
                part.view(-1), out.view(transport.size, part.numel()), chosen, transport, seed=_seed(transport)
            )
            return out
        mine = _message(part, chosen, _seed(transport) ^ transport.rank)
        pieces = out.split(lengths)
        every = [_blank(piece, chosen) for piece in pieces]
        transport.exchange(by_rank([mine] * transport.size, every))
        for message, piece in zip(every, pieces, strict=True):
            chosen.decode(message, piece.view(-1))
    return out


def reduce_scatter(
    tensor: Tensor,
    codec: str | Codec | None = None,
    op: ReduceOp = Average,
    group: Group = None,
    algorithm: str | None = None,
    **codec_options: Unpack[CodecOptions],
) -> Tensor:
    """Return this rank's piece of the average or sum over ranks.

    Args:
        tensor: (size * n, ...) f32, bf16 or f16, the same shape on all ranks; rank r gets rows r * n to (r + 1) * n.
        codec: see ``all_reduce``.
        op: ``Average`` or ``Sum``.
        group: process group or transport; None means all ranks.
        algorithm: None sends each piece straight to its rank, quantised once. On several nodes of several ranks, each
            node's sum is sent instead, quantised again. "ring" passes partial sums from rank to rank, and each rank
            encodes them again.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError: the algorithm is unknown, or the number of ranks does not divide the first dimension; otherwise as
            ``all_reduce``.
        PlanMismatch, TransportError: as ``all_reduce``.
    """
    _require_dense("reduce_scatter", tensor)
    average = check_op(op) is Average
    refuse_unknown(reduce_scatter, codec, codec_options)
    transport = context.transport(group)
    chosen, chooser = _travelling("reduce_scatter", tensor, codec, codec_options, transport)
    size = transport.size
    if algorithm not in (None, "ring"):
        raise ConfigError(f"reduce_scatter: algorithm={algorithm!r}; expected None or 'ring'")
    if algorithm == "ring":
        collectives.check_pair("ring", chosen, size)
    if not tensor.dim() or tensor.shape[0] % size:
        raise ConfigError(
            f"reduce_scatter of shape {tuple(tensor.shape)} over {size} ranks; pad dimension 0 to a multiple"
        )
    facts = [tuple(tensor.shape), tensor.dtype, chosen, chooser is None, op, algorithm]
    _negotiate(transport, "reduce_scatter", facts)
    out = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    with torch.no_grad():
        rows = tensor.detach().contiguous().view(size, -1)
        scaling = Scaling.of(tensor.dtype, size, average=average)
        if chooser is not None:
            chooser.reduce_scatter(scaling.scaled(rows).view(-1), out.view(-1))
        else:
            seed = _seed(transport)
            reduce_scatter_flat(rows, out.view(-1), chosen, transport, scaling, algorithm=algorithm, seed=seed)
    return out


def all_to_all(
    tensor: Tensor,
    splits: Sequence[int] | None = None,
    codec: str | Codec | None = None,
    group: Group = None,
    **codec_options: Unpack[CodecOptions],
) -> Tensor:
    """Return the rows that all ranks have sent to this one, in rank order along the first dimension.

    Args:
        tensor: (n, ...) f32, bf16 or f16; all but n is equal on all ranks.
        splits: number of rows for each rank, n in total, zeros allowed; None splits evenly.
        codec: see ``all_reduce``; the part that stays on this rank passes through it too.
        group: process group or transport; None means all ranks.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError: the splits do not add up to n; otherwise as ``all_reduce``.
        PlanMismatch, TransportError: as ``all_reduce``.
    """
    _require_dense("all_to_all", tensor)
    refuse_unknown(all_to_all, codec, codec_options)
    transport = context.transport(group)
    chosen, chooser = _travelling("all_to_all", tensor, codec, codec_options, transport)
    rank, size = transport.rank, transport.size
    if not tensor.dim():
        raise ConfigError("all_to_all of a scalar; give a tensor with a first dimension to be cut")
    rows = tensor.shape[0]
    if splits is None:
        splits = [rows // size] * size
    require(splits, Iterable, "all_to_all with splits", "a whole number of rows for each rank, such as [2, 1]")
    splits = whole_numbers(splits)
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ConfigError(
            f"all_to_all of shape {tuple(tensor.shape)} with splits {list(splits)}; expected {size} numbers that add "
            f"up to {rows}"
        )
    facts = [tuple(tensor.shape[1:]), tensor.dtype, chosen, chooser is None]
    every = _negotiate(transport, "all_to_all", facts, splits)
    received = [theirs[rank] for theirs in every]
    out = tensor.new_empty(sum(received), *tensor.shape[1:])
    with torch.no_grad():
        if chosen.zips:
            row = tensor.shape[1:].numel()
            given, expected = ([n * row for n in counts] for counts in (splits, received))
            flat, into = tensor.detach().contiguous().view(-1), out.view(-1)
            if chooser is not None:
                largest = max(sum(theirs) - theirs[peer] for peer, theirs in enumerate(every)) * row
                chooser.all_to_all(flat, into, given, expected, largest=largest)
            else:
                zipped.all_to_all(flat, into, given, expected, chosen, transport)
            return out
        seed = _seed(transport)
        sends = [
            _message(part, chosen, derive_seed(seed, rank, peer))
            for peer, part in enumerate(tensor.detach().contiguous().split(list(splits)))
        ]
        pieces = out.split(received)
        recvs = [_blank(piece, chosen) for piece in pieces]
        transport.exchange(by_rank(sends, recvs))
        for message, piece in zip(recvs, pieces, strict=True):
            chosen.decode(message, piece.view(-1))
    return out


def _blank(piece: Tensor, codec: Codec) -> Tensor:
    capacity = codec.wire(piece.numel(), piece.dtype).capacity
    return torch.empty(capacity, dtype=torch.uint8, device=piece.device)


def _message(piece: Tensor, codec: Codec, seed: int) -> Tensor:
    message = _blank(piece, codec)
    codec.encode(piece.reshape(-1), message, seed=seed)
    return message


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0, group: Group = None
) -> None:
    """Give every rank the root's values, in place.

    ``params`` is ``model.state_dict()`` or ``model.named_parameters()``. Entries that are not tensors stay unchanged.

    Raises:
        ConfigError: ``params`` is neither a mapping nor (name, tensor) pairs.
        PlanMismatch: ranks have other names, shapes or types than the root.
        TransportError: a peer failed, stopped or timed out.
    """
    require(params, Iterable, "broadcast_parameters", "model.state_dict() or model.named_parameters()")
    items = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in items):
        raise ConfigError(
            "broadcast_parameters got no (name, tensor) pairs; give model.state_dict() or named_parameters()"
        )
    transport = context.transport(group)
    _check_root(root_rank, transport)
    tensors = {name: value.detach() for name, value in items if isinstance(value, Tensor)}
    facts: list[object] = [root_rank]
    facts += [(name, tuple(value.shape), str(value.dtype)) for name, value in sorted(tensors.items())]
    _negotiate(transport, "broadcast_parameters", facts)
    with torch.no_grad():
        for _, value in sorted(tensors.items()):
            dense = value.contiguous()
            transport.broadcast(dense, root_rank)
            if dense.data_ptr() != value.data_ptr():
                value.copy_(dense)


def _check_root(root_rank: int, transport: Transport) -> None:
    if not isinstance(root_rank, Integral) or not 0 <= root_rank < transport.size:
        raise ConfigError(f"root_rank={root_rank}; expected a rank of the group, 0 to {transport.size - 1}")


def broadcast_bytes(data: bytes, root_rank: int = 0, group: Group = None) -> bytes:
    """Return the root's ``data`` on every rank; the ``data`` of other ranks is ignored."""
    transport = context.transport(group)
    _check_root(root_rank, transport)
    sizes = _negotiate(transport, "broadcast of bytes", [root_rank], [len(data)])

    def move(piece: Tensor) -> None:
        transport.broadcast(piece, root_rank)

    if transport.rank == root_rank:
        pass_on(data, move)
        return bytes(data)
    return bytes(take_in(sizes[root_rank][0], move))


def pickled(call: str, obj: object, dumps: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Return ``obj`` as bytes; raise ``ConfigError``, which names the call, if it cannot be sent."""
    try:
        return dumps(obj)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"{call} got {kind_of(obj)} that pickle refuses: {error}; give plain data") from None


def broadcast_object(obj: T, root_rank: int = 0, group: Group = None) -> T:
    """Return the root's ``obj`` on every rank. It is sent pickled, so use it only among ranks that trust each other."""
    mine = pickled("broadcast_object", obj) if context.transport(group).rank == root_rank else b""
    result: T = pickle.loads(broadcast_bytes(mine, root_rank, group))
    return result


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, group: Group = None) -> None:
    """Give every rank's optimizer the root's state: options of the parameter groups, momenta, step counts.

    A ``DistributedOptimizer`` also takes over the root's step, because seeds and schedules of codecs depend on it. Its
    residuals stay unchanged, because they belong to each rank. Call this function before the first step, or after the
    root has loaded a checkpoint.

    Raises:
        PlanMismatch, TransportError: as ``broadcast_parameters``.
    """
    require(optimizer, torch.optim.Optimizer, "broadcast_optimizer_state", "an optimizer of torch")
    buffer = io.BytesIO()
    if context.transport(group).rank == root_rank:
        state = optimizer.state_dict()
        if "fusionlayer" in state:
            own = {key: value for key, value in state["fusionlayer"].items() if key in ("step", "local")}
            if "local" in own:
                own["local"] = {k: v for k, v in own["local"].items() if k not in ("parameters", "buffers")}
            state["fusionlayer"] = own
        torch.save(state, buffer)
    data = broadcast_bytes(buffer.getvalue(), root_rank, group)
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state)
