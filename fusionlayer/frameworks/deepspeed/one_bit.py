"""1-bit Adam where DeepSpeed's configuration names it: ``"optimizer": {"type": "OneBitAdam"}``.

DeepSpeed had the optimizer until 0.19.6, with "ZeroOneAdam" and "OneBitLamb". From 0.19.7 on it says of all three that
they are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.plan import plain_name
from ...base.registry import nearest
from ...training.policies.onebit_adam import OneBitAdam

Factory = Callable[[Any], "EngineOneBitAdam"]

_NAME = "onebitadam"
_DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "freeze_step": 100000,
}
"""DeepSpeed's own, where they are not ours."""
_WITHOUT_EFFECT = ("bias_correction", "eps_inside_sqrt", "cuda_aware", "comm_backend_name")
"""The first two had none in DeepSpeed's optimizer. The others have none here: fusionlayer moves the messages."""
_REFUSED = {
    "amsgrad": "1-bit Adam has no such variant: leave it out",
    "max_grad_norm": 'DeepSpeed clips by "gradient_clipping", next to "optimizer": set that instead',
}
_DROPPED = {
    "zerooneadam": 'its steps without messages are not there under DeepSpeed; use "OneBitAdam", with freeze_step '
    "instead of var_freeze_step and what follows it",
    "onebitlamb": 'its frozen rates of layers have no counterpart here; use "OneBitAdam", or "Lamb" with "gradients": '
    '"int8" in the section "fusionlayer"',
}


def options_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of ``EngineOneBitAdam`` in a DeepSpeed configuration; None: it names another optimizer."""
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(kind, str):
        return None
    if kind.lower() in _DROPPED:
        raise ConfigError(f'optimizer "{kind}", which DeepSpeed has dropped in 0.19.7: {_DROPPED[kind.lower()]}')
    if kind.lower() != _NAME:
        return None
    given = optimizer.get("params", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f'optimizer "{kind}": params={given!r}; expected keys and values')
    found = dict(_DEFAULTS)
    for key, value in given.items():
        if key in _REFUSED and value:
            raise ConfigError(f'optimizer "{kind}": {key}={value}; {_REFUSED[key]}')
        if key not in (*_DEFAULTS, *_WITHOUT_EFFECT, *_REFUSED):
            raise ConfigError(f'optimizer "{kind}": unknown parameter {key!r}; {nearest(key, list(_DEFAULTS))}')
        if key in _DEFAULTS and value != "auto":
            found[key] = _checked(kind, key, value)
    return found


def _checked(kind: str, key: str, value: Any) -> Any:
    def is_number(x: object) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool)

    if key == "betas":
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value)):
            return tuple(value)
        raise ConfigError(f'optimizer "{kind}": betas={value!r}; expected two numbers')
    if key == "freeze_step" and (type(value) is not int or value < 1):
        raise ConfigError(f'optimizer "{kind}": freeze_step={value!r}; expected a whole number of steps, at least 1')
    if not is_number(value):
        raise ConfigError(f'optimizer "{kind}": {key}={value!r}; expected a number')
    return value


def factory_of(options: Mapping[str, Any], model: nn.Module) -> Factory:
    """Return the function that makes the optimizer of DeepSpeed's list of parameters, with the names of ``model``."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}

    def make(parameters: Iterable[Any]) -> EngineOneBitAdam:
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        return EngineOneBitAdam(trained, names, **options)

    return make


class EngineOneBitAdam(OneBitAdam):
    """``OneBitAdam`` in a DeepSpeed engine: once the variance is frozen it averages momenta by itself, in its step.

    Until then the engine averages gradients, uncompressed. After that it does not: gradients are the rank's own.
    DeepSpeed scales and clips them, and then calls ``step``, in f32 regardless of the type of the model.

    Args:
        params: groups of parameters.
        names: the names of the parameters, by id.
        options: as ``options_of`` returns them.
    """

    def __init__(self, params: Iterable[dict[str, Any]], names: Mapping[int, str], **options: Any) -> None:
        params = list(params)
        # DeepSpeed may put copies in f32 into the groups, so names go by places.
        named = [names.get(id(p), f"{i}.{j}") for i, group in enumerate(params) for j, p in enumerate(group["params"])]
        super().__init__(params, **options, bias_correction=False)
        self._names = named
        self._engine: Any = None
        self._average: Callable[[Mapping[str, Tensor]], None] | None = None

    def attach(self, engine: Any, average: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Begin to work for ``engine``; ``average`` replaces tensors, by name, by their averages over ranks."""
        for what, there in (
            ("experts", engine.has_moe_layers),
            ("a pipeline", engine.pipeline_parallelism),
            ("sequence parallelism", engine.sequence_parallel_size > 1),
        ):
            if there:
                raise ConfigError(
                    f'optimizer "OneBitAdam" with {what}: it averages over all replicas alike; use "Adam"'
                )
        self._engine, self._average = engine, average
        self._tell()

    def step(self, closure: Any = None) -> Any:
        """Take a step, by averaged gradients or, once the variance is frozen, by momenta that are averaged here."""
        if self._engine is None or self._average is None:
            # DeepSpeed takes a step by zeros to make the states of its copies of 16-bit models. Here they come later.
            return None
        self._settle()
        if self.frozen and dist.get_world_size(self._engine.seq_data_parallel_group) > 1:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for parameter in parameters:
                self.exchanged(parameter)
            self._average({name: p.grad for name, p in zip(self._names, parameters, strict=True)})
        loss = super().step(closure)
        self._tell()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, and with it which side averages."""
        super().load_state_dict(state_dict)
        if self._engine is not None:
            self._tell()

    def _tell(self) -> None:
        """Let the engine average gradients while the optimizer warms up, and no longer."""
        self._engine.enable_backward_allreduce = not self.frozen
