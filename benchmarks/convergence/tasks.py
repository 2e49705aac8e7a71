"""What is trained for a loss: models with data to train on, and data that is held out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from benchmarks.training.resnet import ResNet
from examples.gpt import GPT, Config, Corpus

__all__ = ["TASKS", "Digits", "Task", "Text"]


class Task(ABC):
    """A model and its data.

    Attributes:
        words: what is trained.
        pieces: number of examples that are held out, each of which is one piece of work.
    """

    words: str
    pieces: int

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, from torch's random numbers; its forward takes a batch and returns its mean loss."""

    @abstractmethod
    def load(self) -> None:
        """Read the data. What comes before it, such as the words, needs none."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``count`` random examples to train on: inputs and targets."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the ``pieces`` examples that no training sees, always the same."""


class Text(Task):
    """A GPT on the sources of Python's standard library."""

    pieces = 64

    def __init__(self, config: Config) -> None:
        self._config = config
        self.words = f"GPT of width {config.width}, {config.layers} layers and context {config.context}"

    def model(self) -> nn.Module:  # noqa: D102 - described in Task
        return GPT(self._config)

    def load(self) -> None:  # noqa: D102
        self._corpus = Corpus()

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._corpus.sample(count, self._config.context, generator)

    def held_out(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._corpus.validate(self.pieces, self._config.context)


class Digits(Task):
    """A ResNet on scikit-learn's 1,797 handwritten digits, of which every sixth is held out."""

    words = "ResNet of 1.2 million parameters on digits"
    pieces = 300

    def model(self) -> nn.Module:  # noqa: D102 - described in Task
        return ResNet()

    def load(self) -> None:  # noqa: D102
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        except ImportError:
            raise SystemExit("the model resnet trains on scikit-learn's digits; pip install scikit-learn") from None
        digits = load_digits()
        pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels, held = torch.tensor(digits.target), torch.arange(len(pictures)) % 6 == 0
        self._train, self._held = (pictures[~held], labels[~held]), (pictures[held], labels[held])

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: D102
        pictures, labels = self._train
        chosen = torch.randint(len(labels), (count,), generator=generator)
        return pictures[chosen], labels[chosen]

    def held_out(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._held


TASKS: dict[str, Task] = {
    "gpt": Text(Config(width=384, layers=6, heads=6, context=128, tied=False)),
    "small": Text(Config()),
    "resnet": Digits(),
}
