"""Starts torchtitan without a GPU: what it asks of CUDA, the CPU does. Arguments are those of ``torchtitan.train``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["main"]

MEMORY = 1 << 34


def main() -> None:
    """Train."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
    for name, answer in {
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(total_memory=MEMORY),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 was made for a torch after 2.13
        dist.set_timeout = lambda *_: None
    from torchtitan import train
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = flex.create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense)
    train.main()


def dense(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **rest: Any) -> tuple[Tensor, None]:
    """Return the attention of (batch, heads, tokens, n); torch's own kernel for such masks has no backward on a CPU."""
    mask = flex.create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    grouped = rest.get("enable_gqa", False)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped), None


if __name__ == "__main__":
    main()
