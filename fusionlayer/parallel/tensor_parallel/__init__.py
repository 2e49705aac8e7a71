"""Tensor parallelism with compressed activations: operations on tensors, and styles for DTensor models."""

from .channel import Channel
from .styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

__all__ = ["Channel", "ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"]
