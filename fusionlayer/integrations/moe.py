"""Mixtures of experts: tokens travel compressed to the ranks that have their experts, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import context
from ..codecs import Codec
from ..collectives.all_to_all import all_to_all
from ..collectives.switching import switcher_of
from ..errors import ConfigError, PlanMismatch
from ..seeds import derive_seed
from ..transport import Transport
from ..wire import DTYPE_CODES
from .codec_or_auto import CodecOrAuto
from .groups import resolve

__all__ = ["Dispatcher", "Experts", "Route"]

_Way = tuple[Sequence[int], int, CodecOrAuto]


@dataclass(frozen=True)
class Route:
    """How rows have travelled, which those that return go back by.

    Attributes:
        counts: (size, experts) int64 on the CPU, the rows that each rank has sent for each expert of this one.
        sent: rows that this rank has sent to each rank.
        received: rows that it has received from each rank.
        most: rows that a rank has sent to others at most, and received.
    """

    counts: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    most: tuple[int, int]


class Dispatcher:
    """Carries tokens to the ranks that have their experts, and what experts make of them back, compressed.

    Both are differentiable, and each is the transpose of the other: gradients of what was dispatched travel as
    ``combine`` does, and the other way round. How many tokens go where may differ over ranks and from call to call.

    Every rank makes the same calls in the same order, with no tokens if it has none. What stays on a rank is not
    encoded; in a group of one rank nothing is done. Under ``torch.compile`` the calls stay outside of graphs.

    Args:
        group: process group, one-dimensional ``DeviceMesh`` or transport; None means all ranks. All its ranks make the
            dispatcher together.
        codec: name or codec of what travels in the forward; None takes the configured one (``raw`` by default). "auto"
            changes no bit: tokens go as they are, or by ``zip`` where that was measured to take less time.
        gradient_codec: the same for the backward; None takes that of the forward.
        codec_options: options of a forward codec given by name.

    Raises:
        ConfigError: unknown names or options, or something that is no group.
        PlanMismatch: ranks disagree on codecs or options.
        TransportError: a peer was lost, stopped or late.
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
        **codec_options: Any,
    ) -> None:
        self._forward = CodecOrAuto.of(codec, codec_options)
        self._backward = self._forward if gradient_codec is None else CodecOrAuto.of(gradient_codec, {})
        self._transport = context.transport(resolve(group, "expert parallelism", "ep"))
        self.rank, self.size = self._transport.rank, self._transport.size
        self.bytes_sent = 0
        if self.size > 1:
            self._transport.agree("codecs of expert parallelism", self._forward, self._backward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, counts: Tensor | Sequence[int]) -> tuple[Tensor, Route]:
        """Send rows to the ranks that are to have them; return those that have come here.

        Args:
            rows: (n, ...), sorted by the rank that each goes to, and within that by its expert. All but n is the same
                on all ranks.
            counts: (size,) how many rows go to each rank, or (size, experts) to each expert of each rank; as many
                experts on all ranks.

        Returns:
            (m, ...) the rows for this rank, in the order of the ranks that have sent them, and the way back.

        Raises:
            ConfigError: ``counts`` is not for so many ranks or rows, or no codec of this dispatcher takes the type.
            PlanMismatch: ranks have rows of another shape or type.
            TransportError: a peer was lost, stopped or late.
        """
        counts = torch.as_tensor(counts).cpu().long()
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
        """Send rows back to where those came from in whose places they are; return what this rank's have become.

        Args:
            rows: (m, ...), in the order in which ``dispatch`` has returned m rows.
            route: that came with them.

        Returns:
            (n, ...) in the order in which n rows were dispatched.

        Raises:
            ConfigError: other than m rows, or no codec of this dispatcher takes the type.
            TransportError: a peer was lost, stopped or late.
        """
        if len(rows) != sum(route.received):
            raise ConfigError(f"combine got {len(rows)} rows; {sum(route.received)} were dispatched to this rank")
        return self._travel(rows, route.received, route.sent, route.most[::-1])

    def __deepcopy__(self, memo: object) -> Dispatcher:
        return self  # connections have no copies; models that are copied share them

    def __repr__(self) -> str:
        return f"Dispatcher({self._forward}, gradients {self._backward}, rank {self.rank} of {self.size})"

    def _travel(self, rows: Tensor, sends: Sequence[int], recvs: Sequence[int], most: tuple[int, ...]) -> Tensor:
        if self.size == 1:
            return rows
        for choice in (self._forward, self._backward):
            if rows.dtype not in DTYPE_CODES and (choice.codec.variable_size or not choice.codec.lossless):
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
        """Return (size, size, experts), how many rows each rank sends where, and see that rows are alike."""
        kind = derive_seed(*f"{tuple(rows.shape[1:])} {rows.dtype}".encode()) >> 1  # of 63 bits, for int64
        mine = torch.cat([counts.reshape(-1), torch.tensor([kind])])
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
    """Rows to other ranks, with gradients that come back.

    A way is the rows that this rank sends to each, the most that a rank sends to others, and what carries them.
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

    The router stays with the model, and the weights of a token on its rank: neither they nor their gradients travel, so
    compression adds nothing to the router's gradients but what it has changed of the experts' results.

    Experts of the whole layer are numbered by rank: with e of them on each rank those of rank r are r * e to
    (r + 1) * e - 1. An expert runs once in each forward on all rows that ranks have for it, (m, width), of which there
    may be none.

    Args:
        experts: those of this rank; as many on all ranks.
        dispatcher: over the ranks that share the layer.
        average: what is minimised is the mean of the ranks' losses, as it is with ``DistributedOptimizer`` and DDP, so
            the gradients of experts are divided by the number of ranks. False: the sum.

    Raises:
        ConfigError: no experts.
        PlanMismatch: ranks have other numbers of experts.
        TransportError: a peer was lost, stopped or late.
    """

    def __init__(self, experts: Iterable[nn.Module], dispatcher: Dispatcher, *, average: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.dispatcher = dispatcher
        self.average = average
        if not len(self.experts):
            raise ConfigError("Experts got no experts; give each rank as many, at least one")
        if dispatcher.size > 1:
            dispatcher._transport.agree("the number of experts on each rank", len(self.experts), average)

    def forward(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Return the weighted sum of what its experts make of each token.

        Args:
            tokens: (..., width), this rank's.
            weights: (..., k) of each token's experts.
            indices: (..., k) integers, numbers of experts of the whole layer.

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
        """Return what this rank's experts make of ``rows``, which came by source and within it by expert."""
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
    """Return the places of rows in the order of their experts; ``counts`` (size, experts) is how they came."""
    lengths = counts.reshape(-1)
    came = (lengths.cumsum(0) - lengths).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1)
    goes = lengths.cumsum(0) - lengths
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(came - goes, lengths)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _rearrange(rows: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return row ``order[i] // copies`` of ``rows`` in each place i."""
    moved: Tensor = _Rearrange.apply(rows, order, copies)  # type: ignore[no-untyped-call]
    return moved


class _Rearrange(torch.autograd.Function):
    """Each row ``copies`` times, in another order; in backward these are summed in one order, unlike by an index."""

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
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
