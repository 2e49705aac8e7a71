"""What is trained for a loss."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.training.workloads import MODELS

__all__ = ["Settings"]


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
        hosts: that the workers are spread over, which matters to collectives of two levels; None: one host each.
    """

    model: str = "gpt"
    workers: int = 2
    batch_size: int = 2
    steps: int = 600
    learning_rate: float = 1e-3
    every: int = 50
    optimizer: str = "AdamW"
    hosts: int | None = None

    @property
    def layout(self) -> str:
        """Hosts and workers on each, such as "2x1"."""
        hosts = self.hosts or self.workers
        return f"{hosts}x{self.workers // hosts}"

    @property
    def theme(self) -> str:
        """What its result file begins with."""
        return f"scoreboard-{self.model}-{self.layout}-{self.optimizer.lower()}"

    @property
    def title(self) -> str:
        """All settings in words: runs of equal titles can be compared."""
        workload = MODELS[self.model]
        where = f"{self.workers} workers{f' on {self.hosts} hosts' if self.hosts else ''}"
        return (
            f"Convergence: {workload.words}; {where} with batches of {self.batch_size}; {self.steps} steps of "
            f"{self.optimizer}, learning rate {self.learning_rate:g}; loss on {workload.pieces} pieces every "
            f"{self.every} steps"
        )
