"""What all fronts have in common: one small model, its training step by step, and what a rank may do otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fusionlayer as fl

if TYPE_CHECKING:
    from .worker import Worker

__all__ = ["BATCH", "CLASSES", "FEATURES", "RATE", "Front", "Habits", "Marked", "arguments"]

FEATURES, CLASSES, BATCH = 24, 8, 6
RATE = 0.05


@dataclass(frozen=True)
class Habits:
    """What a user's program does; one rank may do otherwise.

    Attributes:
        seed: of the weights; None: left to chance.
        extra: layers more than the other ranks have.
        dtype: of the model.
        codec: in place of the job's; with options, behind a question mark: "int8?group_size=64".
        options: of the optimizer or hook.
        sum: sums gradients where others average them.
        swap: takes equally long calls in another order.
        skip: step whose update is left out.
        freeze: begins with the first layer frozen.
        unfreeze: step before which the first layer is unfrozen.
    """

    seed: int | None = 0
    extra: int = 0
    dtype: str = "float32"
    codec: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sum: bool = False
    swap: bool = False
    skip: int | None = None
    freeze: bool = False
    unfreeze: int | None = None


class Front(ABC):
    """A rank's training.

    Attributes:
        habits: of this rank.
        codec: of the job, or of this rank.
    """

    def __init__(self, worker: Worker, codec: str) -> None:
        self.worker, self.job, self.rank = worker, worker.job, worker.rank
        self.habits = Habits(**{**self.job.habits, **self.job.changes.get(self.rank, {})})
        self.codec = self.habits.codec or codec
        self.join()
        self.dtype: torch.dtype = getattr(torch, self.habits.dtype)
        if self.habits.seed is None:
            torch.seed()
        else:
            torch.manual_seed(self.habits.seed)
        self.model: nn.Module = self.make_model()
        if self.habits.freeze:
            self.thaw(False)
        self.wrap()

    def make_model(self) -> nn.Module:
        """Return the model with its first weights."""
        width = self.job.width
        layers = [nn.Linear(FEATURES, width), Marked(self.worker), nn.Linear(width, width), nn.Tanh()]
        layers += [nn.Linear(width, width) for _ in range(self.habits.extra)]
        return nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(self.dtype)

    def thaw(self, wanted: bool) -> None:
        """Freeze the first layer, or let it learn again."""
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(wanted)

    @property
    def layers(self) -> nn.Sequential:
        """The model's layers, whatever they are wrapped in."""
        inner = getattr(self.model, "module", self.model)
        assert isinstance(inner, nn.Sequential)
        return inner

    def batch(self, step: int) -> Tensor:
        """Return this rank's input of a step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(BATCH, FEATURES, generator=generator).to(self.dtype)

    def loss(self, x: Tensor) -> Tensor:
        """Return what is to become less."""
        target = x.float().sin()[:, :CLASSES]
        loss: Tensor = (self.model(x).float() - target).square().mean()
        return loss

    def step(self, number: int) -> None:
        """Take one training step, and tell the points that it passes."""
        worker = self.worker
        worker.at("forward", number)
        if number == self.habits.unfreeze:
            self.thaw(True)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        self.reduce()
        worker.at("reduced", number)
        if number != self.habits.skip:
            self.optimizer.step()
        worker.at("stepped", number)

    optimizer: Any

    def join(self) -> None:
        """Join the job, as a program of this front does."""
        fl.init()

    @abstractmethod
    def wrap(self) -> None:
        """Make ``optimizer``, and what else the front needs."""

    def reduce(self) -> None:  # noqa: B027 - most fronts have nothing to do here
        """Reduce gradients, where that is not done in backward."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def state(self) -> list[Tensor]:
        """Return the final parameters: those of this rank, if ranks hold different ones."""
        return list(self.model.parameters())

    def leave(self) -> None:
        """Leave the job, as a program of this front does."""
        fl.shutdown()


class Marked(nn.Tanh):
    """A layer whose backward is a point: the gradients of all later layers are on their way by then."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._passes = 0
        self.register_full_backward_hook(lambda *_: self._pass())

    def _pass(self) -> None:
        self._passes += 1
        self._worker.at("backward", self._passes - 1)

    def __deepcopy__(self, memo: Any) -> Marked:
        return Marked(self._worker)


def arguments(codec: str) -> dict[str, Any]:
    """Return ``codec`` and its options as arguments: "int8?group_size=64" has one option."""
    name, _, text = codec.partition("?")
    pairs = [part.split("=") for part in text.split("&") if part]
    return {"codec": name, **{key: float(value) if "." in value else int(value) for key, value in pairs}}
