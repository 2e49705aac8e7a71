"""The weights that ZeRO gathers: as differences from the copies that all ranks have, and without undefined padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...backend import hints
from ...codecs import Codec
from .patches import replace

_OF_ZERO = ("bit16_groups_flat", "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups")
_OF_BF16_OPTIMIZER = ("bf16_groups_flat", "bf16_partitioned_groups", "fp32_groups_flat_partition")
"""For each group: all weights of the model, flat; their parts; and this rank's part in the optimizer."""


def send_differences(optimizer: Any, codec: Codec, min_bytes: int, seeds: Callable[[], Iterator[int]]) -> None:
    """Let the steps of ZeRO 1 and 2 send by ``codec`` how weights differ from the model's (SDP4Bit, section 3.1).

    The model's weights are the copy that every rank keeps, the same bits on all. A step does not put this rank's part
    of the optimizer's own weights there: it adds the values that all ranks decode. The next difference has the loss of
    a message. So DeepSpeed's checkpoints have all that there is: the copy is the model's state, and the optimizer's
    weights are the optimizer's.

    Args:
        optimizer: of ZeRO stage 1 or 2.
        codec: the codec of the differences.
        min_bytes: groups of weights that take fewer bytes are sent uncompressed.
        seeds: returns the numbers of this step's calls.
    """
    names = _OF_ZERO if hasattr(optimizer, _OF_ZERO[0]) else _OF_BF16_OPTIMIZER

    def differences() -> dict[int, hints.Differences]:
        found = {}
        groups = (*(getattr(optimizer, name) for name in names), optimizer.real_dp_process_group)
        for flat, parts, main, group in zip(*groups, strict=True):
            if flat.nbytes >= min_bytes and dist.get_world_size(group) > 1:
                before = parts[dist.get_rank(group)].detach().clone()
                found[flat.data_ptr()] = hints.Differences(codec, before, main)
        return found

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with hints.hint(differences=differences(), seeds=seeds()):
            return original(*args, **kwargs)

    replace(optimizer, "step", step)


def clear_padding_of_weights(optimizer: Any) -> None:
    """Fill the padding after partitioned weights, which ZeRO-3 leaves uninitialised, with zeros.

    The padding is sent with the weights and shares blocks with them. The optimizer's copies get zeros too. Gradients
    there are zeros, so the padding stays zero.
    """
    with torch.no_grad():
        for group in optimizer.fp16_groups:
            for parameter in group:
                numel = parameter.partition_numel()
                rank = dist.get_rank(optimizer._get_param_partition_group(parameter))
                filled = min(max(parameter.ds_numel - rank * numel, 0), numel)
                if filled == numel:
                    continue
                parameter.ds_tensor.view(-1)[filled:].zero_()
                index, place, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                master = optimizer.fp32_partitioned_groups_flat[index]
                if master.numel() >= place + numel:  # smaller if DeepSpeed has swapped it out
                    master[place + filled : place + numel].zero_()
