"""Updates that wait for their results one bucket at a time, while the next forward runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, UsageError
from ..scheduler import Engine
from .parameters import is_distributed

__all__ = ["ForwardOverlap", "check"]

# They update every parameter from its own gradient and state alone, so they may do so at different moments.
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
    """Raise ``ConfigError`` unless this optimizer's updates of ``model`` may wait for the next forward."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"overlap_forward={type(model).__name__}; expected the model, a torch.nn.Module")
    if inspect.unwrap(type(optimizer).step) not in {inspect.unwrap(kind.step) for kind in SEPARABLE}:
        known = ", ".join(kind.__name__ for kind in SEPARABLE)
        raise ConfigError(
            f"overlap_forward updates parameters one bucket at a time, which is known to be the same only for {known}; "
            f"leave it out for {type(optimizer).__name__}"
        )
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
            "forward uses all of them"
        )


class ForwardOverlap:
    """Takes the optimizer's step bucket by bucket: each before the first module that uses its parameters runs.

    Args:
        engine: whose results are waited for.
        names: of the parameters.
        update: takes a step with the parameter groups that it is given and the gradients that are there.
    """

    def __init__(
        self, engine: Engine, names: Mapping[Tensor, str], update: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._engine = engine
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._update = update
        self._groups: list[dict[str, Any]] = []
        self._stale: set[str] = set()

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Update parameters before every forward of their module, all of them before the model is saved or loaded."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        handles = [
            model.register_state_dict_pre_hook(lambda *_: self.flush()),
            model.register_load_state_dict_pre_hook(lambda *_: self.flush()),
        ]
        for module in model.modules():
            deep = isinstance(module, nn.MultiheadAttention)  # it never calls its projection, but uses its parameters
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

    def begin(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the step from now on, with the options that ``groups`` have now; the engine's step has ended."""
        self._groups = [
            {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
            for group in groups
        ]
        for parameter in self._parameters.values():
            parameter.grad = None
        self._stale.update(self._parameters)

    def check_used(self, name: str) -> None:
        """Raise ``UsageError`` if a parameter has got a gradient, though its module has not run since ``begin``."""
        if name in self._stale:
            raise UsageError(
                f"parameter {name!r} was used outside the forward of its module, so perhaps before its update; call "
                "the module, or leave overlap_forward out for such a model"
            )

    def flush(self) -> None:
        """Update all parameters that are still to be updated."""
        self._stale.clear()
        for index in sorted(self._engine.untaken):
            self._apply(index)

    def deliver(self) -> None:
        """Put the results of the engine's step, which has ended, into the gradients instead of updating with them."""
        for index in sorted(self._engine.untaken):
            for name, result in self._engine.take(index).items():
                self._parameters[name].grad = result

    def _apply(self, index: int) -> None:
        results = {self._parameters[name]: result for name, result in self._engine.take(index).items()}
        kept = {parameter: parameter.grad for parameter in results}
        for parameter, result in results.items():
            parameter.grad = result
        try:
            self._update(
                [
                    {**group, "params": [parameter for parameter in group["params"] if parameter in results]}
                    for group in self._groups
                ]
            )
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
