"""The communication objects that FSDP2 calls instead of its own: one of each kind for every sharded module.

They have the interface of torch's ``Comm``, which is neither public nor documented.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .. import codecs, context
from ..backend.calls import is_sum, scaling_of
from ..base.errors import ConfigError
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..collectives import halves, scale_, zipped
from ..collectives.switching import switcher_of
from ..native.wire import DTYPE_CODES
from ..training.codec_or_auto import CodecOrAuto
from ..transport import Transport
from .fsdp_shards import Shards
from .replica import Replica

_RAW = codecs.get("raw").bare
_SAMPLE = 4096
_RATIO = 0.5  # of bf16 to f32: s of ZipCCL's equation 7, where values of f32 are sent zipped as bf16


@dataclass(eq=False)
class Direction:
    """State that all modules share for one kind of collective: a codec, and transports over the groups of torch.

    Attributes:
        what: "weights", "gradients" or "sums over replicas", for error messages.
        choice: the codec.
        differences: whether the codec encodes differences.
        ranks_per_node: as ``context.transport`` takes it.
        native: whether zipping has to beat torch's own collective, and not one with the bits of the zipped form.
        algorithm: name of the collective, where there is a choice; None chooses by codec and nodes.
        error_feedback: add the codec's loss to the next gradient; None: where the codec says that it pays.
        parameters: name, shape and type of each parameter that is sent. Ranks compare them with the codec.
        bytes_sent: payload bytes that this rank has sent.
    """

    what: str
    choice: CodecOrAuto
    differences: bool = False
    ranks_per_node: int | None = None
    native: bool = False
    algorithm: str | None = None
    error_feedback: bool | None = None
    parameters: list[str] = field(default_factory=list, init=False)
    bytes_sent: int = field(default=0, init=False)
    _agreed: weakref.WeakSet[Transport] = field(default_factory=weakref.WeakSet, init=False)

    def __str__(self) -> str:
        return f"differences, {self.choice}" if self.differences else str(self.choice)

    @property
    def feeds_back(self) -> bool:
        """Whether there is error feedback to be saved."""
        codec = self.choice.codec
        return not codec.lossless and (codec.feedback_pays if self.error_feedback is None else self.error_feedback)

    @contextmanager
    def sending(self, group: dist.ProcessGroup) -> Iterator[Transport]:
        """Give the transport over ``group``, and count its bytes; at its first use, its ranks compare codecs."""
        transport = context.transport(group, self.ranks_per_node)
        if transport not in self._agreed:
            options = self.native, self.ranks_per_node, self.algorithm, self.error_feedback
            facts = (self.what, str(self), *options, *self.parameters)
            transport.agree(f"the codec or the parameters of FSDP's {self.what}", *facts)
            self._agreed.add(transport)
        before = transport.bytes_sent
        yield transport
        self.bytes_sent += transport.bytes_sent - before

    def drain(self) -> None:
        """Wait until the device has done all of these collectives that were called."""
        for transport in list(self._agreed):
            transport.drain()

    def codec_for(self, x: Tensor) -> Codec:
        """Return the codec for ``x``."""
        return self.choice.codec if x.dtype in DTYPE_CODES else _RAW


class _Collective:
    """A collective of one sharded module; ``number`` is the module's place in the model, on which seeds depend."""

    def __init__(self, direction: Direction, shards: Shards, number: int) -> None:
        self._direction = direction
        self._shards = shards
        self._number = number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """Gathers weights by a codec."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` (size * n,) with all ranks' ``input_tensor`` (n,), a view of this rank's part."""
        codec = self._direction.codec_for(input_tensor)
        if self._shards.regathering and not codec.lossless:
            # Forward's gather has passed these weights through the codec. Backward must use the same values.
            codec = _RAW
        with self._direction.sending(group) as transport:
            if self._direction.choice.auto and codec.zips:
                switcher_of(transport, codec).all_gather(input_tensor, output_tensor)
            else:
                # The seed is the same within a step, so that stochastic rounding gives backward forward's weights.
                rows, seed = output_tensor.view(transport.size, -1), derive_seed(self._shards.version, self._number)
                halves.all_gather(input_tensor, rows, codec, transport, seed=seed)


class ReplicaGather(_Collective):
    """Gathers differences once for every step, and adds them to a copy of all weights that each rank keeps."""

    def __init__(self, direction: Direction, shards: Shards, number: int) -> None:
        super().__init__(direction, shards, number)
        self.replica = Replica(direction.choice.codec, number)
        self._loaded: tuple[int, dict[str, Tensor]] | None = None

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """Return the version that was sent last, and this rank's part of the replica by parameter.

        The parts are sharded as the parameters are. Before there is a replica, the version is -1 and the parts are the
        weights: a checkpoint needs tensors of the right shapes to load a replica into.
        """
        if self._loaded is not None:
            return self._loaded
        if self.replica.own is None or self.replica.version is None:
            weights = (p.detach().clone() for p in self._shards.parameters)
            return -1, dict(zip(self._shards.names, weights, strict=True))
        return self.replica.version, self._shards.cut(self.replica.own)

    def load(self, version: int, parts: Mapping[str, Tensor]) -> None:
        """Continue from the result of ``state``."""
        self.forget()
        if version >= 0:
            self._loaded = version, {name: parts[name].detach().clone() for name in self._shards.names}

    def forget(self) -> None:
        """Forget the replica: the next gather sends whole weights, unless ``load`` is called before."""
        self.replica.forget()
        self._loaded = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the replica's own memory if this gather fills the replica, else new memory."""
        if self._shards.regathering or dtype not in DTYPE_CODES:
            return super().allocate(size, dtype=dtype, device=device)
        return self.replica.memory(math.prod(size), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` (size * n,) with the replica, updated with all ranks' shards."""
        with self._direction.sending(group) as transport:
            if self._shards.regathering or input_tensor.dtype not in DTYPE_CODES:
                rows = output_tensor.view(transport.size, -1)
                transport.all_gather(input_tensor.view(torch.uint8), rows.view(torch.uint8))
                return
            if self._loaded is not None:
                version, parts = self._loaded
                self.replica.restore(self._shards.join(parts, like=input_tensor), version)
                self._loaded = None
            self._shards.check()
            self.replica.gather(input_tensor, transport, self._shards.version)


class ReduceScatter(_Collective):
    """Sums gradients over ranks and gives each rank its part."""

    def __init__(self, direction: Direction, shards: Shards, number: int) -> None:
        super().__init__(direction, shards, number)
        self.sums = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (n,) with the scaled sum of part ``rank`` of all ranks' ``input_tensor`` (size * n,).

        The result is complete when the call returns (CPU), or is ordered on the current stream (CUDA): torch waits for
        nothing else.
        """
        codec = self._direction.codec_for(input_tensor)
        with self._direction.sending(group) as transport:
            if self._direction.choice.auto and codec.zips:
                self._reduce_switched(input_tensor, output_tensor, codec, group, transport)
            elif codec.zips:
                _reduce_zipped(input_tensor, output_tensor, codec, transport)
            else:
                # With HSDP, other groups hold the same shard and have made as many sums. The group's first rank is in
                # the seed so that they do not round alike: equal errors would add up.
                seed = derive_seed(self.sums, self._number, dist.get_process_group_ranks(group)[0])
                _reduce(input_tensor, output_tensor, codec, transport, seed)
            _scale(output_tensor, op, transport.size)
        self.sums += 1

    def _reduce_switched(
        self, x: Tensor, out: Tensor, codec: Codec, group: dist.ProcessGroup, transport: Transport
    ) -> None:
        nbytes = (transport.size - 1) * x.nbytes // transport.size

        def native() -> None:
            if not self._direction.native:
                return _reduce(x, out, _RAW, transport)
            dist.reduce_scatter_tensor(out, x, group=group)
            transport.bytes_sent += nbytes

        switcher_of(transport, codec).run(
            "reduce_scatter",
            nbytes,
            native,
            lambda: _reduce_zipped(x, out, codec, transport),
            like=x,
            precision=_RATIO if x.dtype is torch.float32 else 1.0,
        )


def _reduce(x: Tensor, out: Tensor, codec: Codec, transport: Transport, seed: int = 0) -> None:
    halves.reduce_scatter(x.view(transport.size, -1), out, codec, transport, seed=seed)


def _reduce_zipped(x: Tensor, out: Tensor, codec: Codec, transport: Transport) -> None:
    """Sum to the same bits as ``_reduce``, but send f32 values as bf16 if no rank loses bits by that.

    Gradients of a bf16 model lose none, unless they were accumulated (ZipCCL, section 5.2). Ranks exchange whether
    theirs do.
    """
    if x.dtype is torch.float32:
        narrow = _as_bf16(x)
        wide = torch.tensor([narrow is None], dtype=torch.uint8, device="cpu")
        transport.all_reduce_max(wide)
        if narrow is not None and not wide:
            x = narrow
    zipped.reduce_scatter(x, out, codec, transport)


def _as_bf16(x: Tensor) -> Tensor | None:
    """Return f32 ``x`` in bf16 if that loses no bits, else None; a sample finds most cases of None quickly."""
    for part in (x[:_SAMPLE], x):
        narrow = part.bfloat16()
        if not torch.equal(narrow.float(), part):
            return None
    return narrow


def _scale(total: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType, size: int) -> None:
    """Scale the sum over ``size`` ranks as ``op`` says.

    Other reductions scale before they send. Here that would scale ``size`` times as many elements, and values of a bf16
    model would no longer fit into bf16. If a sum could overflow, torch itself scales before and after.
    """
    if not is_sum(op):
        raise ConfigError(f"FSDP asks for a reduction by {op}, which is unknown here; expected SUM, AVG or PREMUL_SUM")
    scale_(total, scaling_of(op, total.dtype, size).before)
