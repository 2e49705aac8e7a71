"""``Channel``: the differentiable collectives of a tensor-parallel layer, over one group and with one codec.

Each collective is an operator of torch, so that ``torch.compile`` does not look inside it. An operator gets the
channel's name, because graphs can hold strings. Equal channels of several layers have one name, so one compiled graph
serves them all.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ... import collectives, context
from ...base.errors import ConfigError, UsageError
from ...base.seeds import derive_seed
from ...codecs import Codec, CodecOptions
from ...collectives.halves import all_gather, reduce_scatter
from ...collectives.one_shot import one_shot
from ...collectives.two_level import two_level
from ...collectives.two_shot import two_shot
from ...collectives.zipped import zipped
from ...functional import make_codec, refuse_unknown
from ...native.wire import DTYPE_CODES
from ...transport import Transport
from ..groups import resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Bytes of a tensor that are sent at a time. TACO found 64 MB best on fast links of GPUs (Fig. 10).
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}

# Collectives that process a tensor piece by piece and do not overwrite it.
_IN_PIECES = {"one_shot": one_shot, "two_shot": two_shot, "two_level": two_level, "zipped": zipped}

_channels: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Transport, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


class Channel:
    """Moves the activations of tensor-parallel layers between the ranks that share them, compressed.

    The operations are those of Megatron-LM, each the transpose of another (Shoeybi et al., 2019; Korthikanti et
    al., 2022). Before a layer whose weight is cut by columns, call ``copy``, or with sequence parallelism ``gather``.
    After a layer whose weight is cut by rows, call ``reduce`` or ``reduce_scatter``. All work eagerly and under
    ``torch.compile(fullgraph=True)``. Results of ``copy``'s backward, ``reduce`` and ``gather`` are the same bits on
    every rank. A NaN or Inf on one rank reaches all ranks.

    Every rank makes the same calls with tensors of the same shape and type, in the same order. Shapes are not compared:
    if they differ, ranks wait until the time-out, whose error names them. In a group of one rank, the operations return
    their input.

    Args:
        group: process group, one-dimensional ``DeviceMesh`` or transport; None means all ranks. All its ranks make the
            channel together.
        codec: name or codec of the activations; None takes the configured one (``raw`` by default).
        algorithm: "one_shot" or "two_shot" for all-reduces of a lossy codec; None chooses by the ranks of each node.
        piece_bytes: bytes of a tensor that are sent at a time, while other pieces are encoded, summed or decoded; None
            takes 4 MiB on the CPU, 64 MiB on CUDA.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError: unknown names or options, or ``group`` is not a group.
        PlanMismatch: ranks disagree on codec or options.
        TransportError: a peer failed, stopped or timed out.
        UsageError: this process is not in the group.

    Attributes:
        rank: this process in the group.
        size: number of ranks of the group.
        codec: the codec of the activations.
        name: the name of the channel in graphs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
        codec: str | Codec | None = None,
        *,
        algorithm: str | None = None,
        piece_bytes: int | None = None,
        **codec_options: Unpack[CodecOptions],
    ) -> None:
        refuse_unknown(Channel, codec, codec_options)
        self.codec = make_codec(codec, codec_options).bare
        self._transport = context.transport(resolve(group, "tensor parallelism", "tp"))
        self.rank, self.size, nodes = self._transport.rank, self._transport.size, self._transport.node_sizes
        if algorithm is not None and (algorithm not in ("one_shot", "two_shot") or self.codec.lossless):
            expected = "None, as the codec is lossless" if self.codec.lossless else "one_shot or two_shot"
            raise ConfigError(f"tensor parallelism with {self.codec} got algorithm={algorithm!r}; expected {expected}")
        if piece_bytes is not None and piece_bytes < 1:
            raise ConfigError(f"piece_bytes={piece_bytes}; expected a number of bytes above 0, or None")
        if algorithm is None and self.codec.needs_feedback:
            # Such a codec's own collective relies on error feedback: without it, most of an activation would be lost.
            algorithm = collectives.usual(self.codec, nodes)
        self._algorithm = collectives.choose(self.codec, nodes, algorithm)
        self._piece_bytes = piece_bytes
        facts = f"{self.codec} {self._algorithm} {piece_bytes}"
        if self.size > 1:
            self._transport.agree("codec or options of tensor parallelism", facts)
        if self._transport not in _numbers:
            _numbers[self._transport] = next(_count)
        self.name = f"{facts} on {_numbers[self._transport]}"
        # _channels holds channels weakly, so an equal channel must keep alive the one that is registered by the name.
        named = _channels.setdefault(self.name, self)
        self._named = None if named is self else named

    def copy(self, x: Tensor) -> Tensor:
        """Return ``x``, the same on all ranks, as input of a layer cut over ranks; backward sums gradients."""
        copied: Tensor = x if self.size == 1 else _Copy.apply(x, self.name)  # type: ignore[no-untyped-call]
        return copied

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ranks; backward returns the gradient, the same on all ranks, unchanged."""
        total: Tensor = x if self.size == 1 else torch.ops.fusionlayer.tp_all_reduce(x, self.name)
        return total

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts ``x`` concatenated along ``dim``; backward sums and scatters gradients.

        Args:
            x: (..., n, ...), this rank's part.
            dim: the dimension to join; for sequence parallelism, that of the tokens.

        Returns:
            (..., size * n, ...)
        """
        if self.size == 1:
            return x
        whole: Tensor = torch.ops.fusionlayer.tp_all_gather(x, _positive(dim, x), self.name)
        return whole

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part along ``dim`` of the sum of ``x`` over ranks; backward gathers gradients.

        Args:
            x: (..., size * n, ...), of the same shape on all ranks.
            dim: the dimension to cut.

        Returns:
            (..., n, ...)

        Raises:
            ConfigError: the number of ranks does not divide the dimension.
        """
        if self.size == 1:
            return x
        part: Tensor = torch.ops.fusionlayer.tp_reduce_scatter(x, _positive(dim, x), self.name)
        return part

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part along ``dim`` of ``x``, which is the same on all ranks; backward gathers gradients.

        Call it where sequence parallelism begins, for instance after an embedding. Nothing is sent forward. Shapes and
        errors are ``reduce_scatter``'s.
        """
        if self.size == 1:
            return x
        dim = _positive(dim, x)
        self._check(x, dim, divided=True)
        part: Tensor = _Split.apply(x, dim, self.rank, self.size, self.name)  # type: ignore[no-untyped-call]
        return part

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts ``x`` as ``gather`` does, for layers that are the same on all ranks.

        Call it where sequence parallelism ends. The gradient is the same on all ranks there, so backward takes this
        rank's part of it without communication. (The backward of ``gather`` sums instead.)
        """
        if self.size == 1:
            return x
        dim = _positive(dim, x)
        self._check(x, dim)
        whole: Tensor = _Join.apply(x, dim, self.rank, self.name)  # type: ignore[no-untyped-call]
        return whole

    def __repr__(self) -> str:
        return f"Channel({self.name}, rank {self.rank} of {self.size})"

    # ---- the values of the operators below -----------------------------------------------------------------------

    def _all_reduce(self, x: Tensor) -> Tensor:
        self._check(x)
        x = x.contiguous()
        reduce = _IN_PIECES.get(self._algorithm) if x.dtype in DTYPE_CODES else None
        algorithm: str | collectives.AllReduce = self._algorithm
        flat = out = x.clone() if reduce is None else torch.empty_like(x)
        if reduce is not None:
            flat, algorithm = x, partial(reduce, out=out.view(-1), piece=self._piece(x))
        collectives.reduce_flat(flat.view(-1), self.codec, self._transport, algorithm=algorithm, seed=self._seed())
        return out

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._check(x, dim)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        flat, rows = x.view(-1), out.view(self.size, -1)
        all_gather(flat, rows, self.codec, self._transport, seed=self._seed(), piece=self._piece(x))
        return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._check(x, dim, divided=True)
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        out = torch.empty_like(parts[0])
        rows, into = parts.view(self.size, -1), out.view(-1)
        reduce_scatter(rows, into, self.codec, self._transport, seed=self._seed(), piece=self._piece(out))
        return out

    def _check(self, x: Tensor, dim: int | None = None, *, divided: bool = False) -> None:
        if x.dtype not in DTYPE_CODES and not (x.is_floating_point() and self.codec.lossless):
            raise ConfigError(
                f"tensor parallelism with {self.codec} got a {x.dtype} tensor; expected float32, bfloat16 or float16: "
                "cast it, or use codec='raw' for float64"
            )
        if dim is None:
            return
        if not 0 <= dim < x.dim():
            raise ConfigError(f"dim={dim} of a tensor of shape {tuple(x.shape)}; expected 0 to {x.dim() - 1}")
        if divided and x.shape[dim] % self.size:
            raise ConfigError(
                f"dimension {dim} of shape {tuple(x.shape)} is cut over {self.size} ranks; make its length a multiple "
                f"of {self.size}, by padding for instance"
            )

    def _seed(self) -> int:
        return derive_seed(self._transport.sequence)

    def _piece(self, x: Tensor) -> int:
        nbytes = self._piece_bytes or PIECE_BYTES.get(x.device.type, PIECE_BYTES["cpu"])
        return max(1, nbytes // x.element_size())


def _positive(dim: int, x: Tensor) -> int:
    return dim + x.dim() if dim < 0 else dim


def _find(name: str) -> Channel:
    channel = _channels.get(name)
    if channel is None:
        raise UsageError(f"the channel {name!r} is gone; keep the Channel as long as you use the tensors it returned")
    return channel


# ---- operators: tensors and the channel's name ----------------------------------------------------------------------


@torch.library.custom_op("fusionlayer::tp_all_reduce", mutates_args=(), schema="(Tensor x, str channel) -> Tensor")
def _all_reduce(x: Tensor, channel: str) -> Tensor:
    return _find(channel)._all_reduce(x)


@torch.library.custom_op(
    "fusionlayer::tp_all_gather", mutates_args=(), schema="(Tensor x, int dim, str channel) -> Tensor"
)
def _all_gather(x: Tensor, dim: int, channel: str) -> Tensor:
    return _find(channel)._all_gather(x, dim)


@torch.library.custom_op(
    "fusionlayer::tp_reduce_scatter", mutates_args=(), schema="(Tensor x, int dim, str channel) -> Tensor"
)
def _reduce_scatter(x: Tensor, dim: int, channel: str) -> Tensor:
    return _find(channel)._reduce_scatter(x, dim)


@_all_reduce.register_fake
def _(x: Tensor, channel: str) -> Tensor:
    _find(channel)._check(x)
    return x.new_empty(x.shape)


@_all_gather.register_fake
def _(x: Tensor, dim: int, channel: str) -> Tensor:
    _find(channel)._check(x, dim)
    return x.new_empty([n * _find(channel).size if d == dim else n for d, n in enumerate(x.shape)])


@_reduce_scatter.register_fake
def _(x: Tensor, dim: int, channel: str) -> Tensor:
    _find(channel)._check(x, dim, divided=True)
    return x.new_empty([n // _find(channel).size if d == dim else n for d, n in enumerate(x.shape)])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, ctx.dim, ctx.channel = inputs


def _nothing_to_remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep nothing for backward, which returns the gradient unchanged."""


_all_reduce.register_autograd(lambda ctx, grad: (grad, None), setup_context=_nothing_to_remember)
_all_gather.register_autograd(
    lambda ctx, grad: (torch.ops.fusionlayer.tp_reduce_scatter(grad, ctx.dim, ctx.channel), None, None),
    setup_context=_remember,
)
_reduce_scatter.register_autograd(
    lambda ctx, grad: (torch.ops.fusionlayer.tp_all_gather(grad, ctx.dim, ctx.channel), None, None),
    setup_context=_remember,
)


class _Copy(torch.autograd.Function):
    """The identity, with an all-reduce in backward.

    It is not a custom operator, because such an operator must not return its input and would have to copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: str) -> Tensor:
        ctx.channel = channel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.fusionlayer.tp_all_reduce(grad, ctx.channel), None


class _Split(torch.autograd.Function):
    """Takes this rank's part; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rank: int, size: int, channel: str) -> Tensor:
        ctx.dim, ctx.channel = dim, channel
        length = x.shape[dim] // size
        return x.narrow(dim, rank * length, length).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return torch.ops.fusionlayer.tp_all_gather(grad, ctx.dim, ctx.channel), None, None, None, None


class _Join(torch.autograd.Function):
    """Gathers; backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rank: int, channel: str) -> Tensor:
        ctx.dim, ctx.rank, ctx.length = dim, rank, x.shape[dim]
        whole: Tensor = torch.ops.fusionlayer.tp_all_gather(x, dim, channel)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.rank * ctx.length, ctx.length), None, None, None
