"""``DistributedOptimizer`` with Horovod's arguments, made from ``fusionlayer.DistributedOptimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .. import codecs, functional
from ..base.errors import ConfigError, require
from ..codecs import Codec
from ..training import optimizer as _optimizer
from ..training.sparse import ByName
from ..transport import Transport, local
from .adasum_optimizer import adasum_optimizer
from .basics import session, size
from .compression import BF16Compressor, Compression, FP16Compressor, NoneCompressor, codec_of
from .joining import enlist
from .mpi_ops import Adasum, Average, Sum, sparse_allreduce_async
from .process_sets import ProcessSet, global_process_set, number_of, transport_of
from .requests import ReduceOp, choose_op


def DistributedOptimizer(  # noqa: N802 - the name that Horovod's users know
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Optimizer:
    """Return ``optimizer``, changed so that its gradients are reduced over ranks during backward, fused and compressed.

    It is the same object and keeps its state. Gradients are sent by a plan that ranks compare once, so steps do not
    negotiate. Arguments of ``fusionlayer.DistributedOptimizer`` may be given too; its documentation says more.

    Args:
        optimizer: any optimizer over parameters of one device.
        named_parameters: ``model.named_parameters()``.
        compression: ``hvd.Compression.none``, ``.fp16``, ``.bf16``, or a codec: ``.int8``, ``.topk(0.01)``. None takes
            the configured one: ``none`` without ``FUSIONLAYER_CODEC`` or a file.
        backward_passes_per_step: number of backward passes whose gradients are accumulated before they are reduced.
        op: ``Average``, ``Sum`` or ``Adasum``. With ``Adasum`` the ranks' steps are reduced, not their gradients.
        gradient_predivide_factor: with ``Average``, gradients are divided by it before the sum. The rest of the
            division by the number of ranks follows after the sum.
        num_groups: deprecated name for an integer ``groups``.
        groups: number of buckets, or lists of the tensors that are sent together.
        sparse_as_dense: make sparse gradients dense. If False, gradients that are sparse in the first step on any rank
            are gathered in every step. ``plan``, ``overlap_forward`` and planning by costs cannot be
            combined with that. Gradients that become sparse later are made dense.
        process_set: ranks to reduce over. On other ranks the optimizer steps by itself.
        options: further arguments of ``fusionlayer.DistributedOptimizer``: ``planner``, ``overlap_forward``, ``codec``
            instead of ``compression``, ...
            ``broadcast`` is False by default: call ``broadcast_parameters`` before the first step, as with Horovod. A
            warning names parameters that differ over ranks then or later.

    Raises:
        ConfigError: an argument has a value that cannot be used; the message says which values can.
    """
    chosen = choose_op(op)
    if chosen not in (Average, Sum, Adasum):
        raise ConfigError(
            f"op={chosen.name}; expected hvd.Average, hvd.Sum or hvd.Adasum, or call hvd.allreduce on gradients"
        )
    if chosen is Adasum and size() > 1:
        if process_set is not global_process_set or gradient_predivide_factor != 1.0 or options:
            raise ConfigError(
                f"op=Adasum with process_set={process_set}, gradient_predivide_factor={gradient_predivide_factor}, "
                f"{options}; it combines the steps of all ranks, not gradients: leave these out"
            )
        return adasum_optimizer(optimizer, named_parameters, compression or Compression.none)
    require(process_set, ProcessSet, "process_set", "what add_process_set() has returned")
    if "group" in options or (compression is not None and "codec" in options):
        raise ConfigError("got group, or both compression and codec; give process_set, and compression or codec alone")
    if compression is not None:
        options["codec"] = _codec(compression)
    if isinstance(groups, Iterable):
        groups = list(groups)
    transport: Transport | None = None
    if process_set is not global_process_set:
        transport = transport_of(process_set) if process_set.included() else local.alone()
    session()
    distributed = _optimizer.DistributedOptimizer(
        optimizer,
        named_parameters,
        op=functional.Sum if chosen is Sum else functional.Average,
        backward_passes_per_step=backward_passes_per_step,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        group=transport,
        **{"broadcast": False, **options},
    )
    distributed.reducer.end_in_step(partial(_by_name, process_set, chosen))
    return distributed


def _by_name(process_set: ProcessSet, op: ReduceOp, optimizer: Optimizer) -> ByName:
    """Return the optimizer's operations by name: to notify joined ranks of steps, to send sparse gradients."""
    here = session()
    key = enlist(number_of(process_set), optimizer)

    def gather(name: str, gradient: Tensor) -> Callable[[], Tensor]:
        return sparse_allreduce_async(gradient, f"gradient.{key[0]}.{key[1]}.{name}", op, process_set)

    return ByName(partial(here.begin_step, key), gather)


_OWN = {NoneCompressor: "raw", FP16Compressor: "fp16", BF16Compressor: "bf16"}


def _codec(compression: Any) -> Codec:
    codec = codec_of(compression)
    if codec is not None:
        return codec
    if compression not in _OWN:
        raise ConfigError(
            f"compression={compression!r}; a DistributedOptimizer takes hvd.Compression.none, .fp16, .bf16 and codecs: "
            "make a codec of your own functions (docs/adding_a_codec.md)"
        )
    return codecs.get(_OWN[compression])
