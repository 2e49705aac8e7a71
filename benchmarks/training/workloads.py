"""What is trained: models, their optimizers and their data, the same for every method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from examples.gpt import GPT, Config, Corpus

from .resnet import ResNet

__all__ = ["MODELS", "Workload", "gpt", "gpt_small", "make_workload", "resnet"]


class Workload(ABC):
    """A model with its data; every call for the same seed, rank and step gives the same bits.

    Args:
        seed: of weights and data.
        rank: of the worker, each of which has data of its own.

    Attributes:
        name: what ``make_workload`` calls it.
        words: what is trained.
        batch_size: examples of a worker's step.
        pieces: number of examples that are held out.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    batch_size: ClassVar[int]
    pieces: ClassVar[int]

    def __init__(self, seed: int, rank: int) -> None:
        self.seed = seed
        self.rank = rank

    def model(self) -> nn.Module:
        """Return a new model, whose forward takes a batch and returns its loss."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self._model()

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a new model with its optimizer after a first step that is the same on all ranks.

        Before it Adam's second moments are zeros. Of these torch's square root takes five times as long on a CPU, which
        dense gradients end with their first step, but sparse ones only after hundreds.
        """
        model = self.model()
        optimizer = self.optimizer(model)
        model(*self._batch_of(0, -1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one step."""
        return self._batch_of(self.rank, step)

    def _batch_of(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        number = (self.seed * 10_007 + rank + 1) * 1_000_003 + step
        return self.sample(self.batch_size, torch.Generator().manual_seed(number))

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for ``model``."""

    @abstractmethod
    def _model(self) -> nn.Module: ...

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``count`` random examples to train on: inputs and targets."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the ``pieces`` examples that no training sees, always the same."""


class Text(Workload):
    """A GPT on the sources of Python's standard library, two pieces of text for each worker."""

    name = "gpt"
    words = "GPT of width 384, 6 layers and context 128"
    batch_size = 2
    pieces = 64
    config = Config(width=384, layers=6, heads=6, context=128, tied=False)

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self._corpus = Corpus()

    def _model(self) -> nn.Module:
        return GPT(self.config)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._corpus.sample(count, self.config.context, generator)

    def held_out(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._corpus.validate(self.pieces, self.config.context)


class SmallText(Text):
    """The same with the GPT of the examples."""

    name = "gpt-small"
    words = "GPT of width 128, 4 layers and context 64"
    config = Config()


class Digits(Workload):
    """A ResNet on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, 32 for each worker; every sixth is held out.

    Its batch normalization keeps running means. DDP broadcasts rank 0's before every forward unless told not to, and
    that is left as it is; other methods leave each worker its own.
    """

    name = "resnet"
    words = "ResNet of 1.2 million parameters on digits"
    batch_size = 32
    pieces = 300

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        except ImportError:
            raise SystemExit("the model resnet trains on scikit-learn's digits; pip install scikit-learn") from None
        digits = load_digits()
        pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels, held = torch.tensor(digits.target), torch.arange(len(pictures)) % 6 == 0
        self._train, self._held = (pictures[~held], labels[~held]), (pictures[held], labels[held])

    def _model(self) -> nn.Module:
        return ResNet()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: D102
        pictures, labels = self._train
        chosen = torch.randint(len(labels), (count,), generator=generator)
        return pictures[chosen], labels[chosen]

    def held_out(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._held


MODELS: dict[str, type[Workload]] = {kind.name: kind for kind in (Text, SmallText, Digits)}


def make_workload(name: str, seed: int, rank: int) -> Workload:
    """Return the workload of the model ``name``, one of ``MODELS``."""
    return MODELS[name](seed, rank)


def to_profile(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]:
    """Return what ``fusionlayer profile --model benchmarks.training.workloads:NAME`` calls."""

    def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        workload = make_workload(name, 0, 0)
        return workload.model(), workload.batch(0)

    return make


gpt, gpt_small, resnet = (to_profile(kind.name) for kind in (Text, SmallText, Digits))
