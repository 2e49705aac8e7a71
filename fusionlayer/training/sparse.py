"""Handles an optimizer's sparse gradients: gathers their rows by name, makes them dense, or refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..scheduler import Engine


@dataclass(frozen=True)
class ByName:
    """The part of named operations in an optimizer's step, in a job that uses them.

    Attributes:
        begin: called when a step begins.
        gather: begins the reduction of a sparse gradient, given its name and the gradient. It returns a function that
            waits for the result and returns it.
    """

    begin: Callable[[], object]
    gather: Callable[[str, Tensor], Callable[[], Tensor]]


class SparseGradients:
    """Decides which gradients are gathered by name: those that are sparse on any rank in the first step.

    During the first step, hooks only note which gradients are sparse on this rank. At its end, all ranks decide
    together.

    Attributes:
        gathers: by parameter, what waits for a gradient that is being gathered.
    """

    def __init__(self, engine: Engine, make_dense: bool) -> None:
        self.by_name: ByName | None = None
        """Operations by name; None: this job does not use them, so no gradient is gathered."""
        self._engine = engine
        self._make_dense = self._asked_dense = make_dense
        self._noted: set[str] = set()
        self.gathered: frozenset[str] | None = None
        """Names of the gradients that are gathered; None until the end of the first step."""
        self.gathers: dict[Tensor, Callable[[], Tensor]] = {}

    @property
    def pending(self) -> bool:
        """Whether gradients of the step in flight have been noted or are being gathered."""
        return bool(self._noted or self.gathers)

    def take(self, name: str, parameter: Tensor) -> bool:
        """Note or gather the gradient of a parameter; return False if the engine has to take it."""
        gradient = parameter.grad
        if self.gathered is None:
            if self._make_dense or gradient is None or not gradient.is_sparse or not self._can_leave_out:
                return False
            self._noted.add(name)
            return True
        if name not in self.gathered:
            return False
        assert self.by_name is not None
        self.gathers[parameter] = self.by_name.gather(name, _rows(parameter))
        return True

    def agree(self) -> frozenset[str]:
        """Return the names of the gradients that are gathered.

        All ranks call it at the end of the first step. That call decides; later ones return the same names.
        """
        if self.gathered is None:
            can = self._can_leave_out
            self.gathered = self._engine.leave_out(self._noted) if can else frozenset()
            # A gradient that was dense in the first step has a slot in the plan. If it is sparse later, make it dense.
            self._make_dense = self._make_dense or can
            self._noted.clear()
        return self.gathered

    def decide_anew(self) -> None:
        """Treat the step that begins as a first one: its plan is new, and ranks decide together again."""
        self.gathered, self._make_dense = None, self._asked_dense

    def end(self) -> dict[Tensor, Callable[[], Tensor]]:
        """Begin the next step; return, by parameter, the functions that wait for the gradients gathered in this one."""
        gathers, self.gathers = self.gathers, {}
        return gathers

    def dense(self, name: str, parameter: Tensor) -> Tensor:
        """Return the gradient of a parameter as a dense tensor; zeros if it has none."""
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            if not self._make_dense:
                fixed = "plan, overlap_forward and planning by costs"
                instead = f", or leave out {fixed}" if self.by_name is not None else ""
                raise ConfigError(
                    f"gradient {name!r} is sparse; give sparse_as_dense=True to DistributedOptimizer, or sparse=False "
                    f"to the embedding{instead}"
                )
            parameter.grad = gradient = gradient.to_dense()
        return gradient

    def make_sparse(self, parameters: Iterable[Tensor]) -> None:
        """Turn gradients that were made dense into rows again, for an optimizer that takes no dense ones."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.dim():
                parameter.grad = gradient.to_sparse(1)

    @property
    def _can_leave_out(self) -> bool:
        return self.by_name is not None and self._engine.may_leave_out


def _rows(parameter: Tensor) -> Tensor:
    """Return a gradient as a sparse tensor of rows with their indices, each row once."""
    gradient = parameter.grad
    if gradient is None:
        rows = parameter.detach()[:0]
        numbers = rows.new_empty((1, 0), dtype=torch.int64)
        return torch.sparse_coo_tensor(numbers, rows, parameter.shape, check_invariants=False, device=rows.device)
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
