"""Compressed collectives on single tensors, which a program calls directly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import codecs, collectives, context
from ..base.errors import ConfigError, require, whole_numbers
from ..base.seeds import derive_seed
from ..codecs import Codec, CodecOptions, Part, PartsCodec
from ..collectives import Scaling, halves, reduce_flat, reduce_scatter_flat, zipped
from ..collectives.switching import Switcher, switcher_of
from ..native.wire import DTYPE_CODES
from ..transport import Transport
from ..transport.composed import by_rank
from .arguments import AUTO, Average, Group, ReduceOp, Sum, check_op, make_codec, negotiate, refuse_unknown
from .operators import operator

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


def _size(group: Group) -> int:
    if group is None:
        return context.size()
    return group.size if isinstance(group, Transport) else group.size()


def _rows_of_all(grad: Tensor, rows: Sequence[int], group: Group) -> list[list[int]]:
    """Return what each rank gives as ``rows``; in a compiled program all give the same."""
    if torch.compiler.is_compiling():
        return [[*rows]]
    return negotiate(context.transport(group), "gradient", [tuple(grad.shape[1:]), grad.dtype], rows)


def switcher(group: Group = None) -> Switcher:
    """Return the object that decides for ``codec="auto"`` on a group.

    Its ``str`` shows its choices, the measured times and the share of bytes that ``zip`` leaves.

    Args:
        group: process group or transport; None means all ranks.
    """
    return switcher_of(context.transport(group))


@operator(shape=None)
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
    negotiate(transport, "all_reduce", [tuple(tensor.shape), tensor.dtype, chosen, name, op])
    with torch.no_grad():
        flat = tensor.detach().contiguous().view(-1)
        if isinstance(chosen, PartsCodec):
            chosen = chosen.for_parts([Part("", tuple(tensor.shape))])
        scaling = Scaling.of(tensor.dtype, transport.size, average=average)
        reduce_flat(flat, chosen, transport, scaling, algorithm=name, seed=_seed(transport))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def _gathered(tensor: Tensor, codec: Any = None, group: Group = None, **options: Any) -> list[int]:
    rows, *rest = tensor.shape or (1,)
    return [_size(group) * rows, *rest]


def _gather_gradient(
    grad: Tensor, shape: Sequence[int], codec: Any = None, group: Group = None, **options: Any
) -> Tensor:
    rows = shape[0] if len(shape) else 1
    lengths = _rows_of_all(grad, [rows], group)
    if not grad.numel():  # on all ranks
        return grad.new_zeros(shape)
    if any(length != [rows] for length in lengths):
        splits = [length for (length,) in lengths]
        return all_to_all(grad, splits, codec, group, **options).view(len(lengths), rows, *grad.shape[1:]).sum(0)
    return reduce_scatter(grad, codec, Sum, group, **options)


@operator(_gathered, _gather_gradient)
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
    lengths = [n for (n,) in negotiate(transport, "all_gather", facts, [len(part)])]
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


def _scattered(
    tensor: Tensor, codec: Any = None, op: Any = Average, group: Group = None, algorithm: Any = None, **options: Any
) -> list[int]:
    return [tensor.shape[0] // _size(group), *tensor.shape[1:]]


def _scatter_gradient(
    grad: Tensor,
    shape: Sequence[int],
    codec: Any = None,
    op: ReduceOp = Average,
    group: Group = None,
    algorithm: Any = None,
    **options: Any,
) -> Tensor:
    whole = all_gather(grad, codec, group, **options)
    return whole / max(1, shape[0] // max(1, grad.shape[0])) if op is Average else whole


@operator(_scattered, _scatter_gradient)
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
    negotiate(transport, "reduce_scatter", facts)
    out = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    with torch.no_grad():
        rows = tensor.detach().contiguous().view(size, tensor.numel() // size)
        scaling = Scaling.of(tensor.dtype, size, average=average)
        if chooser is not None:
            chooser.reduce_scatter(scaling.scaled(rows).view(-1), out.view(-1))
        else:
            seed = _seed(transport)
            reduce_scatter_flat(rows, out.view(-1), chosen, transport, scaling, algorithm=algorithm, seed=seed)
    return out


def _exchanged(tensor: Tensor, splits: Any = None, *args: Any, **keywords: Any) -> Sequence[int]:
    if splits is not None:
        raise ConfigError("all_to_all with splits in a compiled program, whose shapes must be known; call it outside")
    return tensor.shape


def _exchange_gradient(
    grad: Tensor,
    shape: Sequence[int],
    splits: Sequence[int] | None = None,
    codec: Any = None,
    group: Group = None,
    **options: Any,
) -> Tensor:
    if not torch.compiler.is_compiling():  # there all ranks have as many rows
        transport = context.transport(group)
        given = [shape[0] // transport.size] * transport.size if splits is None else splits
        splits = [theirs[transport.rank] for theirs in _rows_of_all(grad, given, group)]
    return all_to_all(grad, splits, codec, group, **options)


@operator(_exchanged, _exchange_gradient)
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
    every = negotiate(transport, "all_to_all", facts, splits)
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
