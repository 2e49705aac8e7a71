"""The state of a PyTorch training run: models, optimizers, samplers and other objects."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.plan import FusionPlan
from ...codecs import TensorState
from ...scheduler.memory import merged_residuals
from ...training.distributed import Distributed
from ...training.policies.local_steps import beginning
from ..basics import rank, size
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .sampler import ElasticSampler
from .state import ObjectState


class TorchState(ObjectState):
    """The part of a PyTorch training run that is kept when workers fail or are added.

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    Every argument becomes an attribute. Models, optimizers and samplers are kept by their ``state_dict``, other objects
    themselves. For a ``DistributedOptimizer`` the fusion plan and each rank's error feedback are kept, too.

    Args:
        model: a model, or None.
        optimizer: its optimizer, or None.
        kwargs: names and first values of other objects to keep.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in given.items():
            for kind, handler in _handler_registry:
                if isinstance(value, kind):
                    self._handlers[name] = handler(value)
                    super().__setattr__(name, value)
                    break
        rest = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **rest)

    def save(self) -> None:
        """Save all of it in this process's memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last saved state."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it; error feedback stays each rank's."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        """Adapt models, optimizers and samplers to a job that has restarted."""
        for handler in self._handlers.values():
            handler.reset()

    def export(self) -> tuple[Any, Any] | None:
        """Return the last saved state: the common part of all ranks, and this rank's error feedback."""
        parts = {name: handler.export() for name, handler in self._handlers.items()}
        shared = {"objects": self._saved_state, "handled": {name: part for name, (part, _) in parts.items()}}
        return shared, {name: part for name, (_, part) in parts.items() if part is not None}

    def adopt(self, shared: Any, own: list[Any]) -> None:
        """Import the result of ``export``."""
        for name, handler in self._handlers.items():
            if name in shared["handled"]:
                handler.adopt(shared["handled"][name], [part[name] for part in own if name in part])
        super().adopt(shared, own)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Keeps one object that has a ``state_dict``. Base of handlers for other types.

    ``set_handler_registry`` registers a handler of your own.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Save the object's state."""
        self.saved = copy_to_host(self.value.state_dict())

    def restore(self) -> None:
        """Restore the object's last saved state."""
        # Optimizers keep the tensors that they are given.
        self.value.load_state_dict(copy_to_host(self.saved))

    def sync(self) -> None:
        """Give every rank the object's state on rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        """Keep another object from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt the object to a job that has restarted."""

    def export(self) -> tuple[Any, Any]:
        """Return the last saved state: the common part of all ranks, and this rank's own or None."""
        return self.saved, None

    def adopt(self, shared: Any, own: list[Any]) -> None:
        """Import the result of ``export``, and restore it. ``own`` is a list: the own parts of several ranks."""
        self.saved = shared
        self.restore()


class ModelStateHandler(StateHandler):
    """Keeps a model."""

    def sync(self) -> None:
        """Give every rank rank 0's parameters and buffers."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class SamplerStateHandler(StateHandler):
    """Keeps an ``ElasticSampler``."""

    def reset(self) -> None:
        """Deal the rest of the epoch out to the ranks that there are now."""
        self.value.reset()


class OptimizerStateHandler(StateHandler):
    """Keeps an optimizer. For a distributed one it also keeps error feedback, plan and outer momentum."""

    plan: bytes | None = None
    waiting: dict[str, Any] | None = None
    """Error feedback in a job of one rank, which sends nothing: kept, as the plan is, for a larger one."""

    def save(self) -> None:
        """Save state, error feedback and plan."""
        super().save()
        plan = getattr(self.value, "fusion_plan", None)
        if plan is not None:
            self.plan = plan.to_bytes()

    def restore(self) -> None:
        """Bring the optimizer back; of a commit of another rank or number of ranks, without error feedback."""
        state = copy_to_host(self.saved)
        own = state.get("fusionlayer", {})
        if (own.get("rank"), own.get("size")) != (rank(), size()) and own:
            state["fusionlayer"] = {"rank": rank(), "size": size(), "step": own["step"]}
        self.value.load_state_dict(state)

    def sync(self) -> None:
        """Give every rank rank 0's state; error feedback stays each rank's.

        With local steps a round begins, with the outer momentum that rank 0 has or, since ``reset``, has saved. Every
        rank gets the codec states that must be equal on all ranks, such as the factors with which PowerSGD begins a
        step.
        """
        broadcast_optimizer_state(self.value, root_rank=0)
        state = self.value.state_dict()
        own = state.get("fusionlayer", {"tensors": {}})
        momentum = _outer_momentum(state) or _outer_momentum(self.saved)
        momentum, shared = broadcast_object((momentum, _shared(own["tensors"])), name="optimizer.outer")
        if momentum and "fusionlayer" in state:
            own["local"] = beginning(momentum)
            self.value.load_state_dict(state)
        engine = self.value.reducer.engine if isinstance(self.value, Distributed) else None
        if engine is not None and (shared or _shared(own["tensors"])):
            kept = engine.memory.state_dict()
            mine = {name: _without(each, TensorState.SHARED) for name, each in kept["tensors"].items()}
            tensors = {name: mine.get(name, {}) | shared.get(name, {}) for name in mine.keys() | shared.keys()}
            engine.memory.load_state_dict({**kept, "tensors": tensors})

    def reset(self) -> None:
        """Let the optimizer reduce gradients over the present job. Those of a failed step are dropped."""
        reconnect = getattr(self.value, "reconnect", None)
        if reconnect is not None:
            reconnect()
        self.value.zero_grad()

    def export(self) -> tuple[Any, Any]:
        """Return the optimizer's state with its plan, and the error feedback."""
        saved = dict(self.saved)
        own = saved.pop("fusionlayer", self.waiting)
        shared = {"state": saved, "step": None if own is None else own["step"], "plan": self.plan}
        return {**shared, "momentum": _outer_momentum(self.saved)}, own

    def adopt(self, shared: Any, own: list[Any]) -> None:
        """Take in state, plan and the error feedback of the ranks that this one replaces."""
        self.saved = dict(shared["state"])
        if shared["step"] is not None:
            feedback = {"rank": rank(), "size": size(), "step": shared["step"], **merge_feedback(own)}
            if shared.get("momentum"):
                feedback["local"] = beginning(shared["momentum"])
            if size() > 1:
                self.saved["fusionlayer"] = feedback
            else:
                self.waiting = feedback
        self.plan = shared["plan"]
        self.restore()
        adopt_plan = getattr(self.value, "adopt_plan", None)
        if adopt_plan is not None and self.plan is not None:
            adopt_plan(FusionPlan.from_bytes(self.plan))


def _outer_momentum(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outer momentum in an optimizer's state, by parameter; it is the same on all ranks."""
    found: dict[str, Tensor] = state.get("fusionlayer", {}).get("local", {}).get("momentum", {})
    return found


def copy_to_host(value: Any) -> Any:
    """Return a copy that shares nothing with ``value``, with all of its tensors in the memory of the host."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps type and attributes: a model's state has its version in one
        copied.update((key, copy_to_host(inner)) for key, inner in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(copy_to_host(inner) for inner in value)
    return copy.deepcopy(value)


def merge_feedback(parts: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the error feedback of a rank that replaces those of ``parts``, which ``Memory.state_dict`` has made.

    Residuals and velocities of codecs are added up, so that none is dropped. For all other codec states, such as
    thresholds and factors, the first one counts: they decide how to send, not which values.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, dict[str, float]] = {}
    for part in parts:
        for name, kept in part["tensors"].items():
            merged = tensors.setdefault(name, {})
            both = kept.keys() & merged.keys() & TensorState.ADDED
            tensors[name] = {**kept, **merged, **{key: merged[key] + kept[key] for key in both}}
        for name, remembered in part["numbers"].items():
            numbers.setdefault(name, remembered)
    return {"residuals": merged_residuals(parts), "tensors": tensors, "numbers": numbers}


def _shared(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return the codec states that must be equal on all ranks, by parameter."""
    kept = {name: _without(each, each.keys() - TensorState.SHARED) for name, each in tensors.items()}
    return {name: copy_to_host(each) for name, each in kept.items() if each}


def _without(kept: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: value for name, value in kept.items() if name not in names}


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of a type and the handler that keeps its objects. The first pair that fits counts."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace what ``get_handler_registry`` returns."""
    global _handler_registry
    _handler_registry = registry
