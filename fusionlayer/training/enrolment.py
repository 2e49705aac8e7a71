"""Which parameters of an optimizer are reduced: those that require gradients when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError, UsageError
from ..functional import Group
from .parameters import given_names, local_part, name_parameters, one_device

Groups = Sequence[Mapping[str, Any]]

_PARAMS = itemgetter("params")
_REQUIRES_GRAD = attrgetter("requires_grad")
_SHOWN = 3


class Enrolment:
    """The names of all parameters of an optimizer, and which of them required gradients at the last look.

    A user may freeze and unfreeze parameters and add groups after the optimizer was wrapped. So each step asks whether
    anything has changed.

    Attributes:
        names: the names of all present and former parameters of the optimizer, also of those without gradients.
        look_again: whether ``changed`` is true at the next step in any case.
    """

    def __init__(
        self, groups: Groups, named_parameters: nn.Module | Iterable[tuple[str, Tensor]] | None, group: Group = None
    ) -> None:
        self._given = given_names(named_parameters)
        self._group = group
        self._parameters: list[Tensor] = []
        self._trainable: list[bool] = []
        self._frozen: list[Tensor] = []
        self.look_again = False
        self._device: torch.device | None = None
        self.names = name_parameters(groups, self._given, group)

    @property
    def device(self) -> torch.device:
        """The device of all parameters that are reduced; call ``reduced`` before."""
        assert self._device is not None
        return self._device

    def by_name(self) -> dict[str, Tensor]:
        """Return every parameter by its name. Of two with one name, the later one has replaced the other."""
        return {name: parameter for parameter, name in self.names.items()}

    def changed(self, groups: Groups) -> bool:
        """Return whether parameters were added, removed, frozen or unfrozen since ``reduced``. Every step asks once."""
        # A step has hundreds of parameters, so only loops in C look at each.
        parameters = list(chain.from_iterable(map(_PARAMS, groups)))
        return (
            self.look_again
            or list(map(_REQUIRES_GRAD, parameters)) != self._trainable
            or not all(map(is_, parameters, self._parameters))
        )

    def reduced(
        self, groups: Groups, under_way: Callable[[Tensor], bool] = lambda parameter: False
    ) -> dict[Tensor, str]:
        """Check all parameters; return the names of those that are reduced from now on, in the optimizer's order.

        Args:
            groups: the optimizer's parameter groups.
            under_way: returns whether a parameter has accumulated a gradient that is not reduced yet. It then stays
                until that has happened, even if it needs no more gradients.

        Raises:
            ConfigError: a new parameter has the name of another one, is sharded, or is on another device.
        """
        names = name_parameters(groups, self._given, self._group, known=self.names)
        chosen = {p: name for p, name in names.items() if p.requires_grad or under_way(p)}
        if chosen or self._device is None:
            device = one_device(chosen)
            self._device = self._device or device
            if device != self._device:
                raise ConfigError(self._elsewhere(device))
        self.names.update(names)
        self._parameters = list(_every(groups))
        self._trainable = list(map(_REQUIRES_GRAD, self._parameters))
        self._frozen = [p for p in self._parameters if p not in chosen]
        self.look_again = any(not p.requires_grad for p in chosen)
        return chosen

    def newcomers(self, groups: Groups) -> dict[Tensor, str]:
        """Return the names of parameters that have come since the last look, also of those that are frozen."""
        names = name_parameters(groups, self._given, self._group, known=self.names)
        new = {parameter: name for parameter, name in names.items() if parameter not in self.names}
        trained = {parameter: name for parameter, name in new.items() if parameter.requires_grad}
        if trained and one_device(trained) != self._device:
            raise ConfigError(self._elsewhere(one_device(trained)))
        return new

    def refuse_unreduced(self, groups: Groups) -> None:
        """Raise ``UsageError`` if a parameter has a gradient but was not enrolled when the step began."""
        suspects: Iterable[Tensor] = filter(_REQUIRES_GRAD, self._frozen)
        if sum(map(len, map(_PARAMS, groups))) != len(self._parameters):
            known = set(self._parameters)
            suspects = chain(suspects, (p for p in _every(groups) if p not in known))
        for parameter in suspects:
            gradient = None if parameter.grad is None else local_part(parameter.grad)
            # Zeros that ``zero_grad(set_to_none=False)`` has left are the same on all ranks.
            if gradient is not None and (gradient.is_sparse or gradient.any()):
                name = self.names.get(parameter, f"of a new parameter of shape {tuple(parameter.shape)}")
                raise UsageError(
                    f"gradient {name!r} is not reduced: its parameter was unfrozen or added after this step had begun "
                    "to reduce gradients; do that before backward"
                )

    def _elsewhere(self, device: torch.device) -> str:
        return f"new parameters are on {device}, those before on {self._device}; wrap one optimizer for each device"


def what_changed(before: Mapping[Tensor, str], now: Mapping[Tensor, str]) -> str:
    """Return a clause that names the parameters which are reduced from now on, and those which no longer are."""
    clauses = [
        (f"{listed(name for p, name in now.items() if p not in before)} now require gradients", now.keys() - before),
        (f"{listed(name for p, name in before.items() if p not in now)} no longer do", before.keys() - now),
    ]
    return "; ".join(clause for clause, changed in clauses if changed)


def _every(groups: Groups) -> Iterable[Tensor]:
    return chain.from_iterable(map(_PARAMS, groups))


def listed(names: Iterable[str]) -> str:
    """Return the first names, for a message."""
    given = list(names)
    return ", ".join(map(repr, given[:_SHOWN])) + (f" and {len(given) - _SHOWN} more" if given[_SHOWN:] else "")
