"""An optimizer whose ranks take their own steps; Adasum then combines the steps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import ConfigError, UsageError
from ..training.averaging import claim, refuse_averaged, refuse_wrapper
from ..training.enrolment import Enrolment
from ..training.live import refuse_twice
from . import mpi_ops as ops
from .adasum import check_world
from .basics import size
from .compression import codec_of


def adasum_optimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, compression: Any
) -> Optimizer:
    """Return ``optimizer``, changed so that ``step`` moves every parameter by the Adasum of all ranks' steps.

    It is the same object. Each rank takes the step of the wrapped optimizer with its own gradients. The changes of the
    parameters are sent, so momenta and adaptive rates are each rank's own (Maleki et al., MLSys 2021, section 4.1).
    Parameters without a gradient count as not moved. The learning rate is that of one rank. Parameters may be unfrozen
    or added later, on all ranks before the same step.
    """
    check_world(size())
    if codec_of(compression) is not None:
        raise ConfigError(f"op=Adasum with {compression}; it scales tensors by their products: give none, fp16 or bf16")
    refuse_wrapper(optimizer)
    enrolment = Enrolment(optimizer.param_groups, named_parameters)
    names = enrolment.reduced(optimizer.param_groups)
    refuse_twice(names)
    refuse_averaged(names, gradients=False)
    base = type(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's wrapper there would bypass the class's new step()
    optimizer.__class__ = type(base.__name__, (_Adasum, base), {"__doc__": base.__doc__, "__module__": __name__})
    assert isinstance(optimizer, _Adasum)
    optimizer.adasum = _AdasumSteps(enrolment, _sorted(names), compression)
    claim(optimizer)
    return optimizer


class _AdasumSteps:
    """Makes steps whose changes of the parameters are the Adasum of all ranks' changes.

    Args:
        enrolment: the parameters.
        names: the names of those that have ever required gradients, in the same order on all ranks.
        compression: pair of functions that the changes are sent by.
    """

    def __init__(self, enrolment: Enrolment, names: dict[Tensor, str], compression: Any) -> None:
        self._enrolment = enrolment
        self._names = names
        self._compression = compression

    def step(self, groups: list[dict[str, Any]], update: Callable[[], Any]) -> Any:
        """Call ``update``, the step of the wrapped optimizer, then replace its changes by the Adasum of all ranks'."""
        if self._enrolment.changed(groups):
            # Those that are frozen now stay: their changes are zeros, also where only some ranks have frozen them.
            self._names = _sorted({**self._names, **self._enrolment.reduced(groups)})
        starts = [parameter.detach().clone() for parameter in self._names]
        result = update()
        with torch.no_grad():
            changes = [p.detach() - start for p, start in zip(self._names, starts, strict=True)]
            changes = ops.grouped_allreduce(
                changes, name="adasum.changes", compression=self._compression, op=ops.Adasum
            )
            for parameter, start, change in zip(self._names, starts, changes, strict=True):
                parameter.copy_(start.add_(change))
        return result


class _Adasum(Optimizer):
    """Overrides of the wrapped optimizer's class; it precedes that class in the method resolution order."""

    adasum: _AdasumSteps

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the step of the wrapped optimizer, then replace its changes by the Adasum of all ranks' changes."""
        self._opt_called = True
        update = partial(super().step, **kwargs) if closure is None else partial(super().step, closure, **kwargs)
        return self.adasum.step(self.param_groups, update)

    # torch's marks. hooked: the wrapped class runs step hooks already. _wrapped_by_lr_sched: schedulers need not wrap
    # this step, since it sets _opt_called itself.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Do nothing: ``step`` reduces the steps, and nothing reduces gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise ``UsageError``: ``step`` has to reduce."""
        raise UsageError("skip_synchronize() with op=Adasum, which reduces steps, not gradients; call step() alone")
        yield


def _sorted(names: dict[Tensor, str]) -> dict[Tensor, str]:
    return dict(sorted(names.items(), key=lambda item: item[1]))
