"""FSDP2 whose weights and gradients travel compressed, through its custom communication objects."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import codecs, context
from ..backend.calls import is_sum, scale
from ..codecs import Codec
from ..collectives import halves, zipped
from ..collectives.switching import switcher_of
from ..errors import ConfigError
from ..functional import AUTO
from ..seeds import derive_seed
from ..transport import Transport
from ..wire import DTYPE_CODES, WIRE_VERSION
from .choice import Choice

__all__ = ["Compression", "compress"]

_RAW = codecs.get("raw").bare
_SAMPLE = 4096


class _Given(Enum):
    NOT = "not given"


class Compression:
    """What ``compress`` has put in the place of torch's collectives.

    Attributes:
        weights: what all-gathers of weights carry, in words; None: torch's own all-gather.
        gradients: what reduce-scatters of gradients carry; None: torch's own reduce-scatter.
    """

    def __init__(self, all_gather: _AllGather | None, reduce_scatter: _ReduceScatter | None) -> None:
        self.weights = str(all_gather.choice) if all_gather else None
        self.gradients = str(reduce_scatter.choice) if reduce_scatter else None
        self._collectives = [c for c in (all_gather, reduce_scatter) if c]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent in these collectives so far; torch's own are not counted."""
        return sum(c.bytes_sent for c in self._collectives)


def compress(
    model: nn.Module,
    weights: str | Codec | None = AUTO,
    gradients: str | Codec | None = AUTO,
    *,
    all_gather: str | Codec | None | _Given = _Given.NOT,
    reduce_scatter: str | Codec | None | _Given = _Given.NOT,
) -> Compression:
    """Let the weights and gradients of ``model``, to which ``fully_shard`` has been applied, travel compressed.

    Every module of it that ``fully_shard`` was applied to sends its weights by an all-gather before it is used, and its
    gradients by a reduce-scatter after backward; they keep torch's order and prefetching. Call it on all ranks alike,
    after the last ``fully_shard``; once more, on a part of the model too, replaces what is there.

    Weights: one quantisation, and the same bits on every rank, owners of a shard included. The shard itself, which the
    optimizer updates, is what it was. Gradients: one quantisation, sums in rank order in f32,
    no error feedback. Elements of other types than f32, bf16 and f16, and weights of several types that torch sends
    together, travel as they are.

    Args:
        model: holds modules that ``fully_shard`` was applied to, or is one.
        weights: name or codec of what all-gathers carry. "auto" changes no bit: weights go as they are, or by ``zip``
            where that was measured to take less time (``fusionlayer.switcher`` of the group tells). None leaves torch's
            all-gather.
        gradients: the same for reduce-scatters. Lossless codecs send in bf16 what is in f32 for the sum only, as
            gradients of a bf16 model are.
        all_gather: another name of ``weights``: what the all-gather carries.
        reduce_scatter: another name of ``gradients``.

    Raises:
        ConfigError: unknown names, a sparsifier, both names of one argument, or a model without such modules.
        PlanMismatch: from the first forward or backward, ranks disagree on codecs.
        TransportError: from forward and backward, a peer was lost, stopped or late.
    """
    modules = _sharded_modules(model)
    gathering = _choice("weights", weights, "all_gather", all_gather)
    reducing = _choice("gradients", gradients, "reduce_scatter", reduce_scatter)
    gather = _AllGather("weights", gathering) if gathering else None
    scatter = _ReduceScatter("gradients", reducing) if reducing else None
    for module in modules:
        try:
            if gather:
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            if scatter:
                module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"fsdp.compress cannot replace the collectives of a module: {error}") from error
    return Compression(gather, scatter)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "ReplicateModule" in names:
        raise ConfigError(
            "fsdp.compress got a model that replicate() was applied to, whose weights do not travel; wrap its "
            "optimizer in fusionlayer.DistributedOptimizer instead of replicate()"
        )
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        what = "FullyShardedDataParallel, FSDP1," if "FullyShardedDataParallel" in names else "none of its modules"
        raise ConfigError(
            f"fsdp.compress got a {type(model).__name__} with {what} where modules of FSDP2 are expected; apply "
            "torch.distributed.fsdp.fully_shard to it first"
        )
    return modules


def _choice(name: str, value: str | Codec | None, alias: str, other: str | Codec | None | _Given) -> Choice | None:
    """Return what a user has named by one of two arguments."""
    if not isinstance(other, _Given):
        if value not in (AUTO, other):
            raise ConfigError(f"fsdp.compress got {name}={value} and {alias}={other}, which mean the same; give one")
        value = other
    if value is None:
        return None
    choice = Choice.of(value, {})
    if choice.codec.ahead:
        raise ConfigError(
            f"fsdp.compress got {name}={choice}, which leaves most elements out and needs error feedback; choose a "
            "codec that sends all"
        )
    return choice


class _Collective:
    """What both directions share: a codec, and the transports over the groups that torch calls it with.

    The interface is that of torch's ``Comm``, which is not public and says no more.
    """

    def __init__(self, what: str, choice: Choice) -> None:
        self.choice = choice
        self.bytes_sent = 0
        self._what = what
        self._agreed: weakref.WeakSet[Transport] = weakref.WeakSet()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _over(self, group: dist.ProcessGroup) -> Transport:
        """Return the transport over ``group``, whose ranks have compared codecs."""
        transport = context.transport(group)
        if transport not in self._agreed:
            facts = f"{self._what} {self.choice} {WIRE_VERSION}"
            digest = hashlib.sha256(facts.encode()).digest()
            transport.check_agreement(f"the codec of FSDP's {self._what}", digest)
            self._agreed.add(transport)
        return transport

    def _codec_for(self, x: Tensor) -> Codec:
        return self.choice.codec if x.dtype in DTYPE_CODES else _RAW


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` (size * n,) with all ranks' ``input_tensor`` (n,), which is this rank's part of it."""
        transport = self._over(group)
        before = transport.bytes_sent
        codec = self._codec_for(input_tensor)
        if self.choice.auto and codec.zips:
            switcher_of(transport, codec).all_gather(input_tensor, output_tensor)
        else:
            rows, seed = output_tensor.view(transport.size, -1), derive_seed(transport.sequence)
            halves.all_gather(input_tensor, rows, codec, transport, seed=seed)
        self.bytes_sent += transport.bytes_sent - before


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (n,) with the sum of part ``rank`` of all ranks' ``input_tensor`` (size * n,), scaled.

        It is there when the call returns (CPU) or on the current stream (CUDA): torch waits for nothing else.
        """
        transport = self._over(group)
        before = transport.bytes_sent
        codec = self._codec_for(input_tensor)
        if self.choice.auto and codec.zips:
            switcher_of(transport, codec).run(
                "reduce_scatter",
                (transport.size - 1) * output_tensor.nbytes,
                lambda: _reduce(input_tensor, output_tensor, _RAW, transport),
                lambda: _reduce_zipped(input_tensor, output_tensor, codec, transport),
                like=input_tensor,
            )
        elif codec.zips:
            _reduce_zipped(input_tensor, output_tensor, codec, transport)
        else:
            # Other replicas of the shard (HSDP) have the same sequence and must not round alike: errors would add up.
            seed = derive_seed(transport.sequence, dist.get_process_group_ranks(group)[0])
            _reduce(input_tensor, output_tensor, codec, transport, seed)
        _scale(output_tensor, op, transport.size)
        self.bytes_sent += transport.bytes_sent - before


def _reduce(x: Tensor, out: Tensor, codec: Codec, transport: Transport, seed: int = 0) -> None:
    halves.reduce_scatter(x.view(transport.size, -1), out, codec, transport, seed=seed)


def _reduce_zipped(x: Tensor, out: Tensor, codec: Codec, transport: Transport) -> None:
    """Sum as ``_reduce`` does, to the same bits; what was bf16 before it was made f32 for the sum travels as bf16.

    Gradients of a bf16 model are, unless they were accumulated (ZipCCL, section 5.2); ranks ask each other.
    """
    if x.dtype is torch.float32:
        narrow = _as_bf16(x)
        wide = torch.tensor([narrow is None], dtype=torch.uint8)
        transport.all_reduce_max(wide)
        if narrow is not None and not wide:
            x = narrow
    zipped.reduce_scatter(x, out, codec, transport)


def _as_bf16(x: Tensor) -> Tensor | None:
    """Return f32 ``x`` in bf16 if that has all of its bits; a sample tells most that have more."""
    for part in (x[:_SAMPLE], x):
        narrow = part.bfloat16()
        if not torch.equal(narrow.float(), part):
            return None
    return narrow


def _scale(total: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType, size: int) -> None:
    """Make of the sum over ``size`` ranks what ``op`` makes of the summands."""
    if not is_sum(op):
        raise ConfigError(f"FSDP asks for a reduction by {op}, which is unknown here; expected SUM, AVG or PREMUL_SUM")
    scale(total, op, size)
