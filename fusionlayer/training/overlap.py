"""Lets the next forward run while gradients are still in flight, and updates parameters one bucket at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..base.errors import ConfigError, UsageError
from ..scheduler import Engine
from .parameters import is_distributed

# These optimizers update each parameter from its own gradient and state alone, so updates may happen one by one.
# Another class says so by an attribute ``updates_separately = True`` next to its ``step``.
SEPARABLE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check(optimizer: Optimizer, names: Mapping[Tensor, str], model: object) -> None:
    """Raise ``ConfigError`` unless this optimizer can update ``model`` during the next forward."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"overlap_forward={type(model).__name__}; expected the model, a torch.nn.Module")
    owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    separable = inspect.unwrap(vars(owner)["step"]) in {inspect.unwrap(kind.step) for kind in SEPARABLE}
    if not separable and not vars(owner).get("updates_separately", False):
        known = ", ".join(kind.__name__ for kind in SEPARABLE)
        raise ConfigError(
            f"overlap_forward updates parameters one bucket at a time, which is known to be the same only for {known}, "
            "and for classes that declare it by updates_separately, as OneBitAdam does; leave it out for "
            f"{type(optimizer).__name__}"
        )
    check_parameters(names, model)


def check_parameters(names: Mapping[Tensor, str], model: nn.Module) -> None:
    """Raise ``ConfigError`` unless ``model`` owns all these parameters, and wholly on this rank."""
    sharded = [name for parameter, name in names.items() if is_distributed(parameter)]
    if sharded:
        raise ConfigError(
            f"overlap_forward: parameter {sharded[0]!r} is a DTensor, whose gradients stay in place; leave it out"
        )
    owned = set(model.parameters())
    lost = [name for parameter, name in names.items() if parameter not in owned]
    if lost:
        raise ConfigError(
            f"overlap_forward: parameter {lost[0]!r} of the optimizer is none of the model's; give the model whose "
            "forward uses all parameters of the optimizer"
        )


class ForwardOverlap:
    """Takes the optimizer's step bucket by bucket, each before the first module that uses its parameters runs.

    It needs no lock: ``Reducer`` lets one thread at a time use it. Only ``Engine.take`` waits for
    communication threads.
    """

    def __init__(
        self, engine: Engine, names: Mapping[Tensor, str], update: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._engine = engine
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._update = update
        self._groups: list[dict[str, Any]] = []
        self._real: Sequence[dict[str, Any]] = ()
        self._stale: set[str] = set()
        self._versions: dict[Tensor, int] = {}

    def enrol(self, names: Mapping[Tensor, str]) -> None:
        """Update these parameters too from now on. Parameters frozen now may still wait for an update."""
        self._parameters.update({name: parameter for parameter, name in names.items()})

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks that update parameters before their module's forward, and all before a save or load."""
        return [
            model.register_state_dict_pre_hook(lambda *_: self.flush()),
            model.register_load_state_dict_pre_hook(lambda *_: self.flush()),
            *self.watch_forward(model, self._parameters),
        ]

    def watch_forward(self, model: nn.Module, chosen: Iterable[str]) -> list[RemovableHandle]:
        """Register hooks that update the parameters of these names before the forward of their modules."""
        names = {self._parameters[name]: name for name in chosen}
        handles: list[RemovableHandle] = []
        for module in model.modules():
            # MultiheadAttention uses its projection's parameters without a call of that module, so take them here.
            deep = isinstance(module, nn.MultiheadAttention)
            own = [names[parameter] for parameter in module.parameters(recurse=deep) if parameter in names]
            if own:
                handles.append(module.register_forward_pre_hook(self._before_forward(own)))
        return handles

    def _before_forward(self, names: list[str]) -> Callable[..., None]:
        def before_forward(*_: object) -> None:
            self._stale.difference_update(names)
            for name in names:
                if self._engine.awaits(name):
                    self._apply(self._engine.bucket_of(name))

        eager: Callable[..., None] = torch.compiler.disable(before_forward)
        return eager

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Begin the updates of a step, after the engine's step has ended.

        They use the options that ``groups`` have now: a scheduler may change those before the last update. Options
        changed by an update, such as a count of steps, are in ``groups`` from the first update on.
        """
        self._real = [*groups]  # a group may come before the last update
        self._groups = [
            {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
            for group in groups
        ]
        for parameter in self._parameters.values():
            parameter.grad = None
            self._versions[parameter] = parameter._version
        self._stale.update(self._parameters)

    def check_used(self, name: str) -> None:
        """Raise ``UsageError`` if the parameter's module has not run since ``begin``; called for each new gradient."""
        if name in self._stale:
            raise UsageError(
                f"parameter {name!r} was used outside the forward of its module, so perhaps before its update; call "
                "the module, or leave overlap_forward out for such a model"
            )

    def flush(self) -> None:
        """Wait for the remaining results, and update the parameters that are not updated yet."""
        self._stale.clear()
        self.finish()

    def finish(self) -> None:
        """Make the remaining updates. Parameters whose module has not run since ``begin`` are still not to be used."""
        for index in sorted(self._engine.untaken):
            self._apply(index)

    def deliver(self) -> None:
        """Put the results of the ended step into the gradients, without an update."""
        for index in sorted(self._engine.untaken):
            for parameter, result in self._take(index).items():
                parameter.grad = result.clone()  # the buffer keeps its memory

    def _take(self, index: int) -> dict[Tensor, Tensor]:
        """Return the results of one bucket by parameter, except for parameters that no rank has used."""
        results = self._engine.take(index)
        unused = self._engine.unused() & results.keys()
        self._engine.memory.restore(unused)
        return {self._parameters[name]: result for name, result in results.items() if name not in unused}

    def _apply(self, index: int) -> None:
        """Update the parameters of one bucket, without changing the gradients."""
        results = self._take(index)
        for name, parameter in self._parameters.items():
            if parameter in results and parameter._version != self._versions[parameter]:
                raise UsageError(
                    f"parameter {name!r} was written after step() and before its update, which overlap_forward makes "
                    "in the next forward; call synchronize() before you write parameters"
                )
        kept = {parameter: parameter.grad for parameter in results}
        for parameter, result in results.items():
            parameter.grad = result
        parts = [{**group, "params": [p for p in group["params"] if p in results]} for group in self._groups]
        try:
            self._update(parts)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        for real, before, part in zip(self._real, self._groups, parts, strict=True):
            real.update({key: value for key, value in part.items() if key != "params" and value != before[key]})
