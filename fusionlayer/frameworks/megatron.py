"""Lets Megatron-Core's distributed optimizer send weights and gradients compressed.

Megatron's process groups are made by ``torch.distributed``, so a policy of the backend names codecs for most of its
traffic. No policy can express this: weights are sent as differences, which need the weights that all ranks hold.
Nothing of Megatron is imported; ``compress`` replaces two methods of the objects that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import backend, context
from ..backend.group import CompressingGroup
from ..backend.hints import Differences
from ..base.errors import ConfigError, kind_of
from ..codecs import Codec
from ..functional import make_codec
from ..training.weights import Weights, both_ways

__all__ = ["compress"]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def compress(optimizer: Any, weights: str | Codec | None = None, gradients: str | Codec | None = None) -> None:
    """Compress the messages of Megatron's distributed optimizer between data-parallel ranks.

    Megatron reduce-scatters gradients in buckets and all-gathers the weights that each rank has updated. Its order,
    buckets and overlap stay. Call ``compress`` on all ranks alike, after ``get_megatron_optimizer``; a second call
    replaces the first one's settings.

        dist.init_process_group("fusionlayer")  # before Megatron makes its groups
        ...
        optimizer = get_megatron_optimizer(config, [model])
        fl.megatron.compress(optimizer, "sdp4bit")

    With weights="qwd" ranks send the difference of their weights to those that all ranks hold, in int4 (SDP4Bit,
    section 3.1). The f32 weights that the optimizer keeps stay exact, so the next difference contains the loss of this
    one. With weights="delta" the differences lose no bit.

    Only bf16 and f16 weights are compressed. The optimizer keeps no weights besides the model's, so f32 weights are
    sent uncompressed. If gradients lose bits and the model is also tensor-parallel, its ranks average the gradients of
    shared parameters, such as norms: Megatron does this for parameters with the attribute
    ``average_gradients_across_tp_domain``, which ``compress`` sets.

    Args:
        optimizer: the result of ``get_megatron_optimizer``, with ``use_distributed_optimizer``.
        weights: "delta": differences that lose no bit. "qwd": differences in int4. "qw", "qwz": weights in int4 or
            int8. Or a codec. "sdp4bit" is "qwd" with gradients "tlq_hs", "zero++" is "qwz" with "qgz". None: as before.
        gradients: name or codec for reduce-scatters; None: as the backend's policy says.

    Raises:
        ConfigError: a name is unknown, a codec needs error feedback, the optimizer is not distributed or has no 16-bit
            weights, its groups have another backend, or its options exclude compression.
        PlanMismatch: ranks have given different arguments.
    """
    weights, gradients = both_ways(weights, gradients, default=None)
    sending = None if weights is None else Weights.of(weights)
    reducing = None if gradients is None else make_codec(gradients, {}).bare
    parts = [_Sharded(each) for each in _chained(optimizer)]
    for part in parts:
        part.check(sending, reducing)
    context.transport().agree("the arguments of megatron.compress", sending, reducing)
    if sending is not None and sending.codec.name != "raw" and not any(map(_has_sixteen_bits, parts)):
        raise ConfigError(
            f"weights={sending.codec}: the model has no bf16 or f16 weights, and Megatron keeps no f32 copy of others; "
            "train in bf16, or leave weights out"
        )
    turns = _Turns()
    for part in parts:
        part.set_rules(sending, reducing)
        if reducing is not None and not reducing.lossless:
            part.average_whole_parameters()
        if sending is not None:
            part.send(sending, turns)


class _Turns:
    """The optimizer whose step is in flight, of several in a chain."""

    now: _Sharded | None = None


class _Sharded:
    """One distributed optimizer of Megatron, its buckets, and the bucket groups that send them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        stub = getattr(optimizer, "is_stub_optimizer", False)
        self.buckets: list[Any] = [] if stub else [b for buffer in optimizer.buffers for b in buffer.buckets]
        mine = {id(bucket) for bucket in self.buckets}
        self._groups = [each for each in _bucket_groups(optimizer) if any(id(b) in mine for b in each.buckets)]
        self._before: dict[int, Tensor] = {}

    def check(self, weights: Weights | None, gradients: Codec | None) -> None:
        """Raise ``ConfigError`` if the options of Megatron do not fit the compression."""
        options = self._optimizer.ddp_config
        if gradients is not None and gradients.needs_feedback:
            raise ConfigError(
                f"gradients={gradients}: the codec needs error feedback, which Megatron's buckets do not have; choose "
                "one that sends all, such as int8 or tlq_hs"
            )
        if gradients is not None and getattr(options, "reduce_scatter_with_fp32_accumulation", False):
            raise ConfigError(
                "reduce_scatter_with_fp32_accumulation=True sends gradients by an all-to-all, not by a reduce-scatter; "
                "leave it out: compressed gradients are summed in f32"
            )
        if weights is not None and not weights.codec.lossless and options.num_distributed_optimizer_instances > 1:
            raise ConfigError(
                f"num_distributed_optimizer_instances={options.num_distributed_optimizer_instances} with "
                f"weights={weights.codec}: each instance would round weights in its own way; use 1, or weights='delta'"
            )
        for each in self._groups:
            group = _group_of(each)
            if not isinstance(group, CompressingGroup):
                raise ConfigError(
                    f"the data-parallel group of Megatron has the backend {dist.get_backend(group)!r}; start "
                    f"torch.distributed by init_process_group({backend.NAME!r}) before Megatron makes its groups"
                )

    def set_rules(self, weights: Weights | None, gradients: Codec | None) -> None:
        """Put rules before those of the data-parallel groups; calls that none of them fits stay unchanged."""
        rules = []
        if gradients is not None:
            rules.append(backend.Rule(gradients.name, gradients.options, "reduce_scatter"))
        if weights is not None and not weights.differences:
            names = [str(dtype).removeprefix("torch.") for dtype in _SIXTEEN_BITS]
            rules.append(backend.Rule(weights.codec.name, weights.codec.options, "all_gather", dtype=names))
        for group in {id(group): group for group in map(_group_of, self._groups)}.values():
            group.take(backend.Policy((*rules, *group.policy.rules), group.policy.min_bytes))

    def average_whole_parameters(self) -> None:
        """Have tensor-parallel ranks average the gradients of parameters that they all hold.

        Each of them reduces these gradients with other neighbours, so the codec loses something else on each. Those
        that Megatron sums over these ranks are equal already.
        """
        for chunk in self._optimizer.model_chunks:
            for name, parameter in chunk.named_parameters():
                config = chunk.config
                summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
                normed = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
                is_of_experts = not getattr(parameter, "allreduce", True)
                if not (summed or normed or is_of_experts or getattr(parameter, "tensor_model_parallel", False)):
                    parameter.average_gradients_across_tp_domain = True

    def send(self, weights: Weights, turns: _Turns) -> None:
        """Send the weights of each step as ``weights`` says."""
        optimizer = self._optimizer
        optimizer.step_with_ready_grads = partial(self._step, turns, weights.differences)
        for each in self._groups:
            each.start_param_sync = partial(self._start, turns, weights.codec, each)

    def _step(self, turns: _Turns, differences: bool) -> Any:
        """Do a step of the optimizer, which overwrites this rank's part of the weights; keep the former values."""
        self._before.clear()
        if differences:
            self._before.update((id(bucket), own.clone()) for bucket, own in self._own_parts())
        turns.now = self
        try:
            return type(self._optimizer).step_with_ready_grads(self._optimizer)
        finally:
            turns.now = None

    def _start(self, turns: _Turns, codec: Codec, bucket_group: Any, force_sync: bool = False) -> None:
        """Start to gather the weights of ``bucket_group``."""
        if turns.now not in (None, self):
            return  # a step of another optimizer gathers all weights of the model, and these have not changed
        differences = {}
        for bucket, own in self._own_parts(bucket_group):
            before = self._before.pop(id(bucket), None)
            if before is not None:
                differences[bucket.param_data.data_ptr()] = Differences(codec, before, own.float())
        with backend.hint(differences=differences):
            type(bucket_group).start_param_sync(bucket_group, force_sync=force_sync)

    def _own_parts(self, *bucket_groups: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield the buckets with weights of 16 bits, each with the part (n,) of these that this rank updates."""
        for each in bucket_groups or self._groups:
            group = _group_of(each)
            for bucket in each.buckets:
                if bucket.param_data is not None and bucket.param_data.dtype in _SIXTEEN_BITS and group.size() > 1:
                    yield bucket, bucket.param_data.detach().view(group.size(), -1)[group.rank()]


def _chained(optimizer: Any) -> Sequence[Any]:
    """Return the distributed optimizers that ``optimizer`` consists of; raise ``ConfigError`` if there are others."""
    chained: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for each in chained:
        if not hasattr(each, "step_with_ready_grads") or not hasattr(each, "ddp_config"):
            raise ConfigError(
                f"got {kind_of(each)}; expected Megatron's distributed optimizer: what get_megatron_optimizer returns "
                "with use_distributed_optimizer=True. For others a rule of the backend names a codec for all_reduce"
            )
        if getattr(each.ddp_config, "use_megatron_fsdp", False):
            raise ConfigError(
                "use_megatron_fsdp=True shards weights in another way; name codecs by rules of the backend"
            )
    return chained


def _bucket_groups(optimizer: Any) -> list[Any]:
    chunks = [] if getattr(optimizer, "is_stub_optimizer", False) else optimizer.model_chunks
    return [each for chunk in chunks for each in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def _group_of(bucket_group: Any) -> Any:
    """Return the data-parallel ranks that share the weights of a bucket group."""
    return bucket_group.intra_distributed_optimizer_instance_group


def _has_sixteen_bits(part: _Sharded) -> bool:
    return any(b.param_data is not None and b.param_data.dtype in _SIXTEEN_BITS for b in part.buckets)
