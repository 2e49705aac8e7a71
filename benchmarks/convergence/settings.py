"""What is trained, and by which methods gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.variants import codec_presets
from examples.gpt import Config

__all__ = ["MODELS", "OPTIMIZERS", "PEERS", "VALIDATION_PIECES", "Settings", "methods"]

OPTIMIZERS = ("AdamW", "SGD")
MODELS = {"gpt": Config(width=384, layers=6, heads=6, context=128, tied=False), "small": Config()}

VALIDATION_PIECES = 64


@dataclass(frozen=True)
class Settings:
    """All that decides a run, but for its method and seed.

    Attributes:
        model: key of ``MODELS``.
        workers: number of processes.
        batch_size: pieces of text per worker and step.
        steps: optimizer steps.
        learning_rate: at the end of its warm-up.
        every: steps between two looks at the validation loss.
        optimizer: "AdamW", or "SGD" with momentum 0.9. Where the codec has momentum, the optimizer has none of its own.
    """

    model: str = "gpt"
    workers: int = 2
    batch_size: int = 2
    steps: int = 600
    learning_rate: float = 1e-3
    every: int = 50
    optimizer: str = "AdamW"

    @property
    def theme(self) -> str:
        """What its result file begins with."""
        return f"convergence-{self.model}-{self.workers}x1-{self.optimizer.lower()}"

    @property
    def title(self) -> str:
        """All settings in words: runs of equal titles can be compared."""
        config = MODELS[self.model]
        return (
            f"Convergence: GPT of width {config.width}, {config.layers} layers and context {config.context}; "
            f"{self.workers} workers with batches of {self.batch_size}; {self.steps} steps of {self.optimizer}, "
            f"learning rate {self.learning_rate:g}; loss on {VALIDATION_PIECES} pieces every {self.every} steps"
        )


PEERS = ("ddp", "ddp-powersgd")
"""DDP as it is, and DDP with PowerSGD."""


def methods() -> list[str]:
    """Return DDP as it is, DDP with PowerSGD, and fusionlayer with each codec."""
    return [*PEERS, *codec_presets()]
