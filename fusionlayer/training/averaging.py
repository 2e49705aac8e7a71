"""Finds other objects that average the gradients of parameters, so that no gradient is averaged twice."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import ConfigError
from ..functional import Group

_REMEDIES = {
    "DistributedDataParallel": "keep it and compress its gradients by fusionlayer.ddp.register(model), with a plain "
    "optimizer; or train the bare model, without it",
    "FullyShardedDataParallel": "shard the model by torch.distributed.fsdp.fully_shard and compress it by "
    "fusionlayer.fsdp.compress(model), with a plain optimizer; or train the bare model, without it",
    "DeepSpeedEngine": "give DeepSpeed a plain optimizer and compress its traffic by fusionlayer.deepspeed.initialize; "
    "or train the bare model, without it",
}
"""Classes of modules that average gradients, by name so that nothing is imported, and a remedy for each."""

_FRAMEWORKS = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
}

_claimed: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def claim(optimizer: Optimizer) -> None:
    """Note that an optimizer averages values over ranks by itself, as long as it lives."""
    _claimed.add(optimizer)


def refuse_wrapper(optimizer: object) -> None:
    """Raise ``ConfigError`` if a framework has wrapped an optimizer, so that its steps are not the optimizer's own."""
    kept = getattr(optimizer, "__dict__", {})
    inner = next((x for x in map(kept.get, ("optimizer", "_optimizer")) if x is not None), None)
    for cls in type(optimizer).__mro__:
        framework = "Horovod" if _is_horovods(cls) else _FRAMEWORKS.get(cls.__module__.partition(".")[0])
        if framework is not None and (inner is not None or framework == "Horovod"):
            within = "" if inner is None else f" around {type(inner).__name__}"
            raise ConfigError(
                f"got {framework}'s {cls.__name__}{within}, which steps and averages in {framework}'s way; give the "
                f"plain optimizer, as it was before {framework} wrapped it"
            )


def refuse_averaged(
    names: Mapping[Tensor, str],
    model: nn.Module | None = None,
    group: Group = None,
    *,
    gradients: bool = True,
    modules: bool = True,
) -> None:
    """Raise ``ConfigError`` if something else that is alive averages gradients of these parameters.

    Args:
        names: the parameters, and their names in messages.
        model: a module that may average, or hold one that does; others are found among the objects of this process.
        group: ranks over which the caller averages.
        gradients: whether the caller averages gradients, in the same hooks as others. False: it averages parameters
            (local steps), so others may average gradients over ranks that are not in ``group``.
        modules: whether modules that average are looked for, and not only optimizers.
    """

    def first() -> tuple[str, str, str] | None:
        return _first(names, _reducers(model, modules), group, gradients)

    if first() is None:
        return
    # A cycle of references, such as a traceback's, may have kept what no rank uses any more.
    gc.collect()
    found = first()
    if found is not None:
        name, reducer, remedy = found
        raise ConfigError(
            f"the gradient of parameter {name!r} is averaged by {reducer} already, and would be averaged twice: "
            + remedy
        )


def _first(
    names: Mapping[Tensor, str], reducers: Iterable[Any], group: Group, gradients: bool
) -> tuple[str, str, str] | None:
    """Return the name of a parameter that another object reduces, that object, and a remedy."""
    for each in reducers:
        what, remedy = type(each).__name__, "train by one of the two optimizers, and delete the other"
        if isinstance(each, nn.Module):
            what = _kind(each)
            remedy = _REMEDIES[what]
            if not gradients and not _shares_ranks(getattr(each, "process_group", None), group):
                continue
        elif each not in _claimed:
            what = f"{what} that Horovod has wrapped"
        for parameter in _parameters_of(each):
            if parameter in names:
                return names[parameter], f"{'an' if what[0] in 'AEIOU' else 'a'} {what}", remedy
    return None


def _reducers(model: nn.Module | None, modules: bool) -> list[Any]:
    """Return the modules and optimizers of this process that average gradients.

    Parameters do not show which hooks they have, since those of DDP are C++. So all objects of Python are looked at,
    which takes tens of milliseconds.
    """
    found: list[Any] = [*_claimed]
    if model is not None:
        found += [module for module in model.modules() if _kind(module)]
    if dist.is_available() and dist.is_initialized() or "horovod" in sys.modules:
        kinds = {cls for cls in _below(Optimizer) if _is_horovods(cls)}
        if modules:
            kinds |= {cls for cls in _below(nn.Module) if any(base.__name__ in _REMEDIES for base in cls.__mro__)}
        found += [each for each in gc.get_objects() if type(each) in kinds]
    return found


def _kind(module: nn.Module) -> str:
    """Return the class of modules that average gradients to which a module belongs, or nothing."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _REMEDIES), "")


def _parameters_of(reducer: Any) -> Iterator[Tensor]:
    if isinstance(reducer, Optimizer):
        yield from chain.from_iterable(group["params"] for group in reducer.__dict__["param_groups"])
        return
    ignored: Collection[str] | None = getattr(reducer, "parameters_to_ignore", None)
    module = reducer if ignored is None else reducer.module
    yield from (parameter for name, parameter in module.named_parameters() if name not in (ignored or ()))


def _below(cls: type) -> Iterator[type]:
    """Yield all classes that are derived from a class."""
    each: type
    for each in type.__subclasses__(cls):
        yield each
        yield from _below(each)


def _is_horovods(cls: type) -> bool:
    # Horovod makes a class for each class of optimizers, with its own methods.
    return "_allreduce_grad_async" in vars(cls)


def _shares_ranks(theirs: dist.ProcessGroup | None, group: Group) -> bool:
    """Return whether two groups have another rank than this one in common."""
    ours = group if isinstance(group, dist.ProcessGroup) else None
    ranks = {*dist.get_process_group_ranks(theirs)} & {*dist.get_process_group_ranks(ours)}
    return bool(ranks - {dist.get_rank()})
