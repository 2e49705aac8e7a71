"""Mixtures of experts: tokens are sent compressed to the ranks that hold their experts, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import context
from ..base.errors import ConfigError, PlanMismatch
from ..base.seeds import derive_seed
from ..codecs import Codec, CodecOptions
from ..collectives.all_to_all import all_to_all
from ..collectives.switching import switcher_of
from ..functional import refuse_unknown
from ..native.wire import DTYPE_CODES
from ..training.codec_or_auto import CodecOrAuto
from ..transport import Transport
from .groups import resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Dispatcher", "Experts", "Route"]

_Way = tuple[Sequence[int], int, CodecOrAuto]


@dataclass(frozen=True)
class Route:
    """How many rows ``dispatch`` has sent where; ``combine`` needs it to send them back.

    Attributes:
        counts: (size, experts) int64 on the CPU, the rows that each rank has sent for each expert of this rank.
        sent: rows that this rank has sent to each rank.
        received: rows that this rank has received from each rank.
        most: the largest number of rows that any rank has sent to others, and that any has received.
    """

    counts: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    most: tuple[int, int]


class Dispatcher:
    """Carries tokens to the ranks that hold their experts, and the experts' results back, compressed.

    ``dispatch`` and ``combine`` are differentiable, and transposes of each other: gradients of dispatched rows are sent
    as in ``combine``, and those of combined rows as in ``dispatch``. The number of tokens for each rank may differ over
    ranks and calls.

    Every rank makes the same calls in the same order, with zero rows if it has no tokens. Rows that stay on a rank are
    not encoded. In a group of one rank, rows are returned unchanged. Under ``torch.compile`` the calls stay outside of
    graphs.

    Args:
        group: process group, one-dimensional ``DeviceMesh`` or transport; None means all ranks. All its ranks make the
            dispatcher together.
        codec: name or codec of the forward; None takes the configured one (``raw`` by default). "auto" changes no bit:
            tokens are sent uncompressed, or by ``zip`` if measured faster.
        gradient_codec: name or codec of the backward; None takes the codec of the forward.
        codec_options: options of a forward codec given by name.

    Raises:
        ConfigError: unknown names or options, or ``group`` is not a group.
        PlanMismatch: ranks disagree on codecs or options.
        TransportError: a peer failed, stopped or timed out.
        UsageError: this process is not in the group.

    Attributes:
        rank: this process in the group.
        size: number of ranks of the group.
        bytes_sent: payload bytes that this rank has sent so far, in forward and backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
        codec: str | Codec | None = None,
        *,
        gradient_codec: str | Codec | None = None,
        **codec_options: Unpack[CodecOptions],
    ) -> None:
        refuse_unknown(Dispatcher, codec, codec_options)
        self._forward = CodecOrAuto.of(codec, codec_options)
        self._backward = self._forward if gradient_codec is None else CodecOrAuto.of(gradient_codec, {})
        context.refuse_elastic(
            "expert parallelism", "without a rank its experts are missing; use DistributedOptimizer alone"
        )
        self._transport = context.transport(resolve(group, "expert parallelism", "ep"))
        self.rank, self.size = self._transport.rank, self._transport.size
        self.bytes_sent = 0
        if self.size > 1:
            self._transport.agree("codecs of expert parallelism", self._forward, self._backward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, counts: Tensor | Sequence[int]) -> tuple[Tensor, Route]:
        """Send rows to the ranks that hold their experts; return the rows that have arrived here.

        Args:
            rows: (n, ...), sorted by destination rank, and within a rank by expert. All but n is the same on all ranks.
            counts: (size,) number of rows for each rank, or (size, experts) for each expert of each rank. All ranks
                have the same number of experts.

        Returns: (m, ...) the rows for this rank, in the order of the sending ranks, and the route for ``combine``.

        Raises:
            ConfigError: ``counts`` does not fit the ranks or rows, or the codecs do not take the type of ``rows``.
            PlanMismatch: ranks have rows of another shape or type.
            TransportError: a peer failed, stopped or timed out.
        """
        counts = torch.as_tensor(counts, device="cpu").long()
        counts = counts.view(-1, 1) if counts.dim() == 1 else counts
        self._check(rows, counts)
        every = self._gather_counts(counts, rows)
        between = every.sum(2)
        away = between - between.diagonal().diag()
        route = Route(
            every[:, self.rank].contiguous(),
            tuple(between[self.rank].tolist()),
            tuple(between[:, self.rank].tolist()),
            (int(away.sum(1).max()), int(away.sum(0).max())),
        )
        return self._travel(rows, route.sent, route.received, route.most), route

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Send each result back to the rank of its token; return the results for this rank's tokens.

        Args:
            rows: (m, ...) results, in the order of the m rows of ``dispatch``.
            route: the route that ``dispatch`` returned with them.

        Returns: (n, ...) in the order of the n dispatched rows.

        Raises:
            ConfigError: the number of rows is not m, or the codecs do not take the type of ``rows``.
            TransportError: a peer failed, stopped or timed out.
        """
        if len(rows) != sum(route.received):
            raise ConfigError(f"combine got {len(rows)} rows; {sum(route.received)} were dispatched to this rank")
        return self._travel(rows, route.received, route.sent, route.most[::-1])

    def __deepcopy__(self, memo: object) -> Dispatcher:
        return self  # connections cannot be copied, so copies of a model share them

    def __repr__(self) -> str:
        return f"Dispatcher({self._forward}, gradients {self._backward}, rank {self.rank} of {self.size})"

    def _travel(self, rows: Tensor, sends: Sequence[int], recvs: Sequence[int], most: tuple[int, ...]) -> Tensor:
        if self.size == 1:
            return rows
        for choice in (self._forward, self._backward):
            if rows.dtype not in DTYPE_CODES and (choice.codec.zips or not choice.codec.lossless):
                raise ConfigError(
                    f"expert parallelism with {choice} got {rows.dtype} rows; expected float32, bfloat16 or float16: "
                    "cast them, or use codec='raw'"
                )
        ways = (sends, most[0], self._forward), (recvs, most[1], self._backward)
        arrived: Tensor = _Travel.apply(rows, *ways, self)  # type: ignore[no-untyped-call]
        return arrived

    def _move(self, rows: Tensor, sends: Sequence[int], recvs: Sequence[int], most: int, choice: CodecOrAuto) -> Tensor:
        out = rows.new_empty(sum(recvs), *rows.shape[1:])
        width = math.prod(rows.shape[1:])
        counts = [width * n for n in sends], [width * n for n in recvs]
        flat, into = rows.contiguous().view(-1), out.view(-1)
        transport, before = self._transport, self._transport.bytes_sent
        if choice.auto:
            switcher_of(transport, choice.codec).all_to_all(flat, into, *counts, largest=width * most)
        else:
            all_to_all(flat, into, *counts, choice.codec, transport, seed=derive_seed(transport.sequence))
        self.bytes_sent += transport.bytes_sent - before
        return out

    def _check(self, rows: Tensor, counts: Tensor) -> None:
        n = rows.shape[0] if rows.dim() else 0
        if counts.dim() != 2 or len(counts) != self.size or counts.sum() != n or (counts < 0).any():
            raise ConfigError(
                f"dispatch of shape {tuple(rows.shape)} over {self.size} ranks got counts {counts.tolist()}; expected "
                f"({self.size},) or ({self.size}, experts) numbers from 0 on that add up to {n}"
            )

    def _gather_counts(self, counts: Tensor, rows: Tensor) -> Tensor:
        """Return (size, size, experts), how many rows each rank sends where; check that all ranks' rows are alike."""
        kind = derive_seed(*f"{tuple(rows.shape[1:])} {rows.dtype}".encode()) >> 1  # of 63 bits, for int64
        mine = torch.cat([counts.reshape(-1), torch.tensor([kind], device="cpu")])
        every = mine.new_empty(self.size, len(mine))
        self._transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
        differ = [rank for rank in range(self.size) if every[rank, -1] != every[0, -1]]
        if differ:
            raise PlanMismatch(
                f"dispatch of {rows.dtype} rows of shape {tuple(rows.shape[1:])} on rank {self.rank}: rows of ranks "
                f"{differ} have another shape or type than those of rank 0; make them alike",
                ranks=differ,
            )
        return every[:, :-1].view(self.size, *counts.shape)


class _Travel(torch.autograd.Function):
    """Sends rows to other ranks in forward, and their gradients back in backward.

    A ``_Way`` holds this rank's rows for each rank, the largest number of rows that any rank sends, and the codec.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way, back: _Way, dispatcher: Dispatcher) -> Tensor:
        ctx.way, ctx.back, ctx.dispatcher = way, back, dispatcher
        sends, most, choice = way
        return dispatcher._move(rows, sends, back[0], most, choice)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        returned: Tensor = _Travel.apply(grad, ctx.back, ctx.way, ctx.dispatcher)  # type: ignore[no-untyped-call]
        return returned, None, None, None


class Experts(nn.Module):
    """A layer of experts that ranks share: each token goes to its experts, and their weighted sum comes back.

    The router stays in the model, and the weights of a token stay on its rank. Neither these weights nor their
    gradients are sent. So compression affects the router's gradients only through the changed results of experts.

    Experts of the whole layer are numbered by rank: with e of them on each rank, rank r holds numbers r * e to
    (r + 1) * e - 1. In each forward, an expert runs once on the rows of all ranks for it, (m, width); m may be 0.

    Args:
        experts: this rank's experts; all ranks have the same number.
        dispatcher: connects the ranks that share the layer.
        average: minimise the mean of the ranks' losses, as ``DistributedOptimizer`` and DDP do: gradients of experts
            are divided by the number of ranks. False minimises the sum.

    Raises:
        ConfigError: no experts.
        PlanMismatch: ranks have different numbers of experts.
        TransportError: a peer failed, stopped or timed out.
    """

    def __init__(self, experts: Iterable[nn.Module], dispatcher: Dispatcher, *, average: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.dispatcher = dispatcher
        self.average = average
        if not len(self.experts):
            raise ConfigError("Experts got no experts; give every rank the same number of them, at least one")
        if dispatcher.size > 1:
            dispatcher._transport.agree("the number of experts on each rank", len(self.experts), average)

    def forward(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Return, for each token, the weighted sum of its experts' results.

        Args:
            tokens: (..., width), this rank's.
            weights: (..., k), the weights of each token's experts.
            indices: (..., k) integers, the numbers of each token's experts in the whole layer.

        Returns:
            (..., width of the experts' results), of the type of ``tokens``.

        Raises:
            ConfigError: shapes do not fit, or there is no such expert.
            PlanMismatch, TransportError: as ``Dispatcher.dispatch``.
        """
        chosen = self._check(tokens, weights, indices)
        copies = indices.shape[-1]
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=self.dispatcher.size * len(self.experts))
        rows = _rearrange(tokens.reshape(-1, tokens.shape[-1]), order, copies)
        arrived, route = self.dispatcher.dispatch(rows, counts.view(self.dispatcher.size, -1))
        results = self.dispatcher.combine(self._run(arrived, route.counts), route)
        each = _rearrange(results, _inverse(order)).unflatten(0, (-1, copies))
        total = (each * weights.reshape(-1, copies, 1)).sum(1)
        mixed: Tensor = total.to(tokens.dtype).view(*tokens.shape[:-1], total.shape[-1])
        return mixed

    def _check(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Return the experts of all tokens, flat."""
        if indices.shape != weights.shape or not indices.dim() or indices.shape[:-1] != tokens.shape[:-1]:
            raise ConfigError(
                f"experts got tokens of shape {tuple(tokens.shape)} with weights {tuple(weights.shape)} and indices "
                f"{tuple(indices.shape)}; expected (..., width), (..., k) and (..., k)"
            )
        chosen = indices.reshape(-1)
        if chosen.numel():
            low, high = (int(number) for number in chosen.aminmax())
            last = self.dispatcher.size * len(self.experts) - 1
            if low < 0 or high > last:
                raise ConfigError(f"experts got indices from {low} to {high}; expected 0 to {last}")
        return chosen

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's experts; ``rows`` are ordered by source rank, then by expert."""
        size = self.dispatcher.size if self.average else 1
        if size > 1:
            rows = _ScaleGradient.apply(rows, size)  # type: ignore[no-untyped-call]
        order = _by_expert(counts).to(rows.device)
        parts = _rearrange(rows, order).split(counts.sum(0).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        results = _rearrange(results, _inverse(order))
        if size > 1:
            results = _ScaleGradient.apply(results, 1 / size)  # type: ignore[no-untyped-call]
        return results


def _by_expert(counts: Tensor) -> Tensor:
    """Return the indices that sort arrived rows by expert; ``counts`` is (size, experts), rows by source and expert."""
    lengths = counts.reshape(-1)
    came = (lengths.cumsum(0) - lengths).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1)
    goes = lengths.cumsum(0) - lengths
    return torch.arange(int(counts.sum()), device="cpu") + torch.repeat_interleave(came - goes, lengths)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _rearrange(rows: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return a tensor whose row i is row ``order[i] // copies`` of ``rows``."""
    moved: Tensor = _Rearrange.apply(rows, order, copies)  # type: ignore[no-untyped-call]
    return moved


class _Rearrange(torch.autograd.Function):
    """Repeats each row ``copies`` times and reorders the result.

    Backward sums the copies in a fixed order. The backward of indexing would not.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        grad = grad.index_select(0, _inverse(order))
        return grad.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else grad, None, None


class _ScaleGradient(torch.autograd.Function):
    """Returns its input; backward multiplies the gradient by ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
