"""Operations on tensors by name, all in one module because Horovod's users import them from ``mpi_ops``.

Ranks may call them in different orders; they run in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError, FusionLayerError, UsageError, require, whole_numbers
from .basics import HorovodInternalError, session
from .compression import Compression, codec_of
from .process_sets import ProcessSet, global_process_set, number_of
from .requests import (
    ReduceOp,
    Reduction,
    all_of,
    allreduce_of,
    checked,
    choose_op,
    first_of,
    grouped_allreduce_of,
    grouped_reducescatter_of,
    reducescatter_of,
    several,
    submit,
    taking,
)

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


# ---- allreduce -------------------------------------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of ``tensor`` over ranks.

    Gradient: ``Sum`` and ``Average`` return the gradient of the sum over ranks of their losses. It is reduced with the
    same codec. ``Max``, ``Min``, ``Product`` and ``Adasum`` refuse to return one.

    Args:
        tensor: any shape, the same on all ranks; floats, integers (averages are truncated towards zero) or bool.
        average: deprecated; True is ``op=Average``, False ``op=Sum``.
        name: the name by which ranks match their calls. None: ranks match calls of this kind in their order.
        compression: ``none``, ``fp16``, ``bf16`` or a codec.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.
        process_set: ranks that take part.

    Raises:
        ConfigError: an argument has a value that cannot be used.
        HorovodInternalError: a peer failed, or ranks gave different arguments. Raised on every rank.
        UsageError: from ``backward``, if ``op`` has no gradient.
    """
    request = allreduce_of(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    codec = codec_of(compression)
    checked("allreduce", tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()) and compression is Compression.none:
        return synchronize(request.begin_allreduce(at_once=True))  # type: ignore[no-any-return]
    (out,) = _compressed(_Allreduce, replace(request, codec=codec), compression)
    return out


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors, sent together. Gradients and other arguments are ``allreduce``'s."""
    request = grouped_allreduce_of(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return _compressed(_Allreduce, replace(request, codec=codec_of(compression)), compression)


@taking(allreduce_of)
def allreduce_(request: Reduction) -> Tensor:
    """Replace ``tensor`` by its reduction over ranks and return it. Arguments are those of ``allreduce``.

    Gradient: none, as for all operations in place and all that return a handle. Autograd does not see them.
    """
    out: Tensor = synchronize(request.begin_allreduce(in_place=True))
    return out


@taking(allreduce_of)
def allreduce_async(request: Reduction) -> int:
    """Begin ``allreduce``; return its handle. Do not change ``tensor`` before ``synchronize`` has returned."""
    return request.begin_allreduce()


@taking(allreduce_of)
def allreduce_async_(request: Reduction) -> int:
    """Begin ``allreduce_``; return the handle for ``poll`` and ``synchronize``."""
    return request.begin_allreduce(in_place=True)


@taking(grouped_allreduce_of)
def grouped_allreduce_(request: Reduction) -> list[Tensor]:
    """Replace several tensors by their reductions and return them. Other arguments are those of ``allreduce``."""
    out: list[Tensor] = synchronize(request.begin_allreduce(in_place=True))
    return out


@taking(grouped_allreduce_of)
def grouped_allreduce_async(request: Reduction) -> int:
    """Begin ``grouped_allreduce``; return the handle of the whole group."""
    return request.begin_allreduce()


@taking(grouped_allreduce_of)
def grouped_allreduce_async_(request: Reduction) -> int:
    """Begin ``grouped_allreduce_``; return the handle of the whole group."""
    return request.begin_allreduce(in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp | int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the sum or average of a sparse tensor. Return a function that waits for it and returns it, sparse.

    Ranks may have different indices, and different numbers of them. Indices and values of all ranks are gathered.
    """
    chosen = choose_op(op)
    require(tensor, Tensor, "sparse_allreduce_async", "a sparse tensor")
    if chosen not in (Average, Sum) or not tensor.is_sparse:
        raise ConfigError(
            f"sparse_allreduce_async of a {tensor.layout} tensor with op={chosen.name}; expected a sparse tensor, and "
            "hvd.Average or hvd.Sum"
        )
    parts = [tensor._indices().t().contiguous(), tensor._values()]
    handle = grouped_allgather_async(parts, None if name is None else f"{name}.sparse", process_set)

    def wait() -> Tensor:
        indices, values = synchronize(handle)
        if chosen is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False, device=values.device)

    return wait


def _compressed(function: type[torch.autograd.Function], request: Reduction, compression: Any) -> list[Tensor]:
    """Compress the tensors of a request, reduce them by the differentiable ``function``, and decompress the results."""
    pairs = [compression.compress(tensor) for tensor in request.tensors]
    reduced = _apply(function, replace(request, tensors=()), *(small for small, _ in pairs))
    return [compression.decompress(x, ctx) for x, (_, ctx) in zip(reduced, pairs, strict=True)]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Reduction, *tensors: Tensor) -> Any:
        ctx.request = request
        return tuple(synchronize(replace(request, tensors=tensors, deliver=all_of).begin_allreduce(at_once=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _check_linear("allreduce", ctx.request.op)
        return None, *_apply(_Allreduce, replace(ctx.request, name=None), *gradients)


def _check_linear(kind: str, op: ReduceOp) -> None:
    """Raise ``UsageError`` unless the gradient of this reduction is a sum or average of gradients."""
    if op not in (Average, Sum):
        raise UsageError(
            f"{kind} with op={op.name} has no gradient; expected hvd.Sum or hvd.Average where backward runs through "
            "the result: give tensor.detach() if it is only reported, or gather the tensors with hvd.allgather and "
            "reduce them there"
        )


# ---- allgather -------------------------------------------------------------------------------------------------------


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return all ranks' tensors concatenated along the first dimension.

    Gradient: of the mean over ranks of their losses, as in Horovod. Multiply by the number of ranks for their sum.

    Args:
        tensor: (n, ...). n may differ between ranks and may be 0; the other dimensions are equal. A scalar counts as
            (1,).
        name: the name by which ranks match their calls.
        process_set: ranks that take part.

    Raises:
        HorovodInternalError: as ``allreduce``.
    """
    out: Tensor
    (out,) = _apply(_Allgather, name, process_set, tensor)
    return out


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin ``allgather``; return the handle for ``poll`` and ``synchronize``."""
    return _gather([tensor], name, process_set, deliver=first_of)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return what ``allgather`` returns for each of several tensors, sent together. Gradients are ``allgather``'s."""
    return list(_apply(_Allgather, name, process_set, *several("grouped_allgather", tensors)))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``grouped_allgather``; return the handle of the whole group."""
    return _gather(tensors, name, process_set)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.shapes = [checked("allgather", tensor).shape for tensor in tensors]
        return tuple(synchronize(_gather(tensors, name, process_set, at_once=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        here = ctx.process_set
        lengths = [torch.tensor([shape[0] if shape else 1], device="cpu") for shape in ctx.shapes]
        every = grouped_allgather(lengths, process_set=here)
        reduced = grouped_allreduce(gradients, op=Average, process_set=here)
        mine = [
            gradient[int(each[: here.rank()].sum()) :][: int(length)].view(shape)
            for gradient, each, length, shape in zip(reduced, every, lengths, ctx.shapes, strict=True)
        ]
        return None, None, *mine


def _gather(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    deliver: Callable[[Any], Any] | None = None,
    at_once: bool = False,
) -> int:
    rows = [tensor if checked("allgather", tensor).dim() else tensor.view(1) for tensor in tensors]
    return submit("allgather", rows, name=name, process_set=process_set, deliver=deliver, at_once=at_once)


# ---- broadcast -------------------------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor.

    Gradient: of the mean over ranks of their losses, as in Horovod; zeros on ranks other than the root.

    Args:
        tensor: the same shape and type on all ranks.
        root_rank: the root's rank in the job, even if a process set is given.
        name: the name by which ranks match their calls.
        process_set: ranks that take part.

    Raises:
        ConfigError: the root is not one of those ranks.
        HorovodInternalError: as ``allreduce``.
    """
    out: Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return out


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace ``tensor`` by the root's and return it. Arguments are those of ``broadcast``."""
    out: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return out


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast``; return the handle for ``poll`` and ``synchronize``."""
    return _broadcast(tensor, root_rank, name, process_set, deliver=first_of)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast_``; return the handle for ``poll`` and ``synchronize``."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True, deliver=lambda _: tensor)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        mine = session().rank == ctx.root_rank
        return reduced if mine else torch.zeros_like(reduced), None, None, None


def _broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    deliver: Callable[[Any], Any],
) -> int:
    members = session().process_sets.get(number_of(process_set))
    if members is not None and root_rank not in members.ranks:
        raise ConfigError(f"root_rank={root_rank!r}; expected a rank of the job that takes part: {list(members.ranks)}")
    return submit(
        "broadcast",
        [tensor],
        in_place=in_place,
        name=name,
        process_set=process_set,
        root=root_rank,
        deliver=deliver,
    )


# ---- alltoall --------------------------------------------------------------------------------------------------------


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the rows that all ranks have sent to this one, concatenated in rank order.

    Gradient: of the sum over ranks of their losses.

    Args:
        tensor: (n, ...). n may differ between ranks; the other dimensions are equal.
        splits: number of rows for each rank, n in all; None splits evenly.
        name: the name by which ranks match their calls.
        process_set: ranks that take part.

    Returns:
        The tensor and, if ``splits`` were given, how many rows came from each rank.

    Raises:
        ConfigError: the splits do not add up to n.
        HorovodInternalError: as ``allreduce``.
    """
    out, received = _apply(_Alltoall, tensor, splits, name, process_set)
    return out if splits is None else (out, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``alltoall``; ``synchronize`` returns the tensor and how many rows came from each rank."""
    checked("alltoall", tensor)
    number_of(process_set)
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.is_complex()):
        raise ConfigError(f"alltoall with splits of {splits.dtype}; expected whole numbers of rows")
    size = process_set.size() or 1
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is not None:
        require(splits, Iterable, "alltoall with splits", "a whole number of rows for each rank, such as [2, 1]")
    counts = [rows // size] * size if splits is None else whole_numbers(splits)
    if len(counts) != size or sum(counts) != rows or min(counts) < 0 or not tensor.dim():
        raise ConfigError(
            f"alltoall of shape {tuple(tensor.shape)} with splits {counts}; expected {size} numbers of at least 0 that "
            f"add up to {rows}"
        )
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

    def deliver(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        out, received = result
        return out, like.new_tensor(received)

    return submit("alltoall", [tensor], name=name, process_set=process_set, splits=counts, deliver=deliver)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> Any:
        out, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        back, _received = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        return back, None, None, None


# ---- reducescatter ---------------------------------------------------------------------------------------------------


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction over ranks.

    Gradient: for ``Sum`` and ``Average``, of the sum over ranks of their losses, times the number of ranks, as in
    Horovod. ``Max``, ``Min`` and ``Product`` refuse to return one.

    Args:
        tensor: (n, ...), the same shape on all ranks. Each rank gets n // size rows; the first n % size get one more.
        name: the name by which ranks match their calls.
        compression: ``none``, ``fp16`` or ``bf16``.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: ranks that take part.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.

    Raises:
        ConfigError, HorovodInternalError, UsageError: as ``allreduce``.
    """
    (out,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return out


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return what ``reducescatter`` returns for each of several tensors. Gradients are ``reducescatter``'s."""
    if codec_of(compression) is not None:
        raise ConfigError(f"reducescatter with {compression}; use hvd.Compression.none, .fp16 or .bf16")
    request = grouped_reducescatter_of(tensors, name, op, process_set, prescale_factor, postscale_factor)
    return _compressed(_Reducescatter, request, compression)


@taking(reducescatter_of)
def reducescatter_async(request: Reduction) -> int:
    """Begin ``reducescatter``; return the handle for ``poll`` and ``synchronize``."""
    return request.begin_reducescatter()


@taking(grouped_reducescatter_of)
def grouped_reducescatter_async(request: Reduction) -> int:
    """Begin ``grouped_reducescatter``; return the handle of the whole group."""
    return request.begin_reducescatter()


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Reduction, *tensors: Tensor) -> Any:
        summands = request.process_set.size() or 1 if request.op is Sum else 1
        ctx.op, ctx.factor = request.op, request.prescale * request.postscale * summands
        ctx.process_set = request.process_set
        return tuple(synchronize(replace(request, tensors=tensors).begin_reducescatter()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _check_linear("reducescatter", ctx.op)
        scaled = [gradient * ctx.factor for gradient in gradients]
        return None, *grouped_allgather(scaled, process_set=ctx.process_set)


# ---- all of them -----------------------------------------------------------------------------------------------------


def poll(handle: int) -> bool:
    """Return whether ``synchronize`` would return at once."""
    require(handle, int, "poll", "the handle that an asynchronous operation has returned")
    return session().poll(handle)


def synchronize(handle: int | Callable[[], Tensor]) -> Any:
    """Wait for an operation and return its result: a tensor, a list of tensors for a group, or the value that its call
    documents.

    Raises:
        HorovodInternalError: the operation has failed. Raised on every rank.
    """
    if callable(handle):
        return handle()
    require(handle, int, "synchronize", "the handle that an asynchronous operation has returned")
    try:
        return session().wait(handle)
    except (ConfigError, UsageError):
        raise
    except FusionLayerError as error:
        raise HorovodInternalError.of(error) from None


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    synchronize(submit("barrier", process_set=process_set, at_once=True))


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)
