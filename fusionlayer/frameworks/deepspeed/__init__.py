"""Compresses DeepSpeed's traffic as a section of its configuration says; DeepSpeed is imported only when used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ... import backend, context
from ...base.errors import ConfigError
from .gradients import Gradients
from .one_bit import factory_of, options_of
from .section import KEY, DeepSpeedSection, RoleCodec
from .weights import clear_padding_of_weights, send_differences

__all__ = ["Gradients", "DeepSpeedSection", "RoleCodec", "init_distributed", "initialize", "install", "read"]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Any], Any] | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` and compress its traffic as the section ``"fusionlayer"`` says.

    Arguments and results are those of DeepSpeed. The section is read from ``config``, a mapping or the path of an HJSON
    file, or from the file that ``args.deepspeed_config`` names. Without the section, or with ``"enabled": false``,
    DeepSpeed runs unchanged. Our backend starts before DeepSpeed would start one. The engine's attribute
    ``fusionlayer`` is a ``Gradients``.

    The optimizer "OneBitAdam", which DeepSpeed has dropped in 0.19.7, is ``fusionlayer.OneBitAdam`` with DeepSpeed's
    parameters. A configuration that names it needs no section.

    Args:
        args: parsed arguments with ``local_rank`` and ``deepspeed_config``.
        model: the module to train.
        optimizer: an optimizer, or a function that makes one of the parameters.
        model_parameters: tensors to optimise, or groups of parameters.
        training_data: data set for DeepSpeed's data loader.
        lr_scheduler: a schedule, or a function that makes one of the optimizer.
        distributed_port: the port of rank 0; None: DeepSpeed's own, 29500.
        mpu: an object that knows the groups of model parallelism.
        dist_init_required: whether to start torch.distributed; None: if it does not run.
        collate_fn: merges samples into a batch.
        config: DeepSpeed's configuration.
        mesh_param: the sizes of DeepSpeed's device mesh.
        config_params: the former name of ``config``.

    Returns:
        The engine, the optimizer, the data loader and the schedule; None for absent ones.

    Raises:
        ConfigError: a key of the section is unknown or its value is invalid, torch.distributed runs with another
            backend, DeepSpeed has dropped the optimizer, or DeepSpeed is not installed.
        PlanMismatch: ranks have different sections.
    """
    given: dict[str, Any] = locals().copy()
    deepspeed = _deepspeed()
    original = getattr(deepspeed.initialize, "__wrapped__", deepspeed.initialize)
    given = {name: value for name, value in given.items() if value is not None}
    read_config, put = _configuration(given)
    if read_config is not None and optimizer is not None:
        read_config.pop("optimizer", None)  # DeepSpeed would not look at it
    section = None if read_config is None else DeepSpeedSection.of(read_config)
    if read_config is None or section is None:
        return tuple(original(**given))
    options = options_of(read_config)
    if options is not None and model is not None:
        read_config.pop("optimizer")
        given["optimizer"] = factory_of(options, model)
    put({key: value for key, value in read_config.items() if key != KEY})
    if not section.enabled:
        return tuple(original(**given))
    _start(section, options)
    engine, *rest = original(**given)
    engine.fusionlayer = Gradients(engine, section)
    if section.differences is not None:
        send_differences(engine.optimizer, section.differences, section.weights.min_bytes, engine.fusionlayer.seeds)
    elif section.weights.compresses and engine.zero_optimization_stage() == 3:
        clear_padding_of_weights(engine.optimizer)
    return engine, *rest


def init_distributed(config: Mapping[str, Any] | str | Path, **kwargs: Any) -> None:
    """Start torch.distributed with the backend as the section of ``config`` says, before something else starts it.

    Call it in programs in which a framework calls ``deepspeed.initialize``, in addition to ``install``. Call it also in
    programs that need process groups before they make a model, such as those with a ``PipelineModule``.

    Args:
        config: a mapping or the path of an HJSON file; without an enabled section, DeepSpeed's own backend starts.
        kwargs: arguments of ``deepspeed.init_distributed``, such as ``timeout``.

    Raises:
        ConfigError, PlanMismatch: as ``initialize``.
    """
    given = read(config)
    section = DeepSpeedSection.of(given)
    if section is None or not section.enabled:
        _deepspeed().init_distributed(**kwargs)
    else:
        _start(section, options_of(given), **kwargs)


def install(config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any) -> None:
    """Replace ``deepspeed.initialize`` by ``initialize``, so that frameworks call it; a second call changes nothing.

    Args:
        config: if given, also start the backend as ``init_distributed`` does: frameworks start one before they
            initialize.
        kwargs: arguments of ``deepspeed.init_distributed``.
    """
    deepspeed = _deepspeed()
    if not hasattr(deepspeed.initialize, "__wrapped__"):

        @functools.wraps(deepspeed.initialize)
        def initialize_by_section(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
            return initialize(*args, **kwargs)

        deepspeed.initialize = initialize_by_section
    if config is not None:
        init_distributed(config, **kwargs)


def read(config: object) -> dict[str, Any]:
    """Return a DeepSpeed configuration: the mapping itself, or the content of a path.

    Raises:
        ConfigError: the file does not exist, or is not a DeepSpeed configuration.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, Path)):
        raise ConfigError(f"DeepSpeed configuration {config!r}; expected keys and values, or the path of a file")
    _deepspeed()
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        return dict(load_ds_config(str(config)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed configuration {config}: {' '.join(str(error).split())}") from error


def _start(section: DeepSpeedSection, options: Mapping[str, Any] | None, **kwargs: Any) -> None:
    """Start the backend with the section's policy, or give the policy to a running one; compare sections over ranks."""
    deepspeed = _deepspeed()
    if dist.is_initialized() and backend.NAME not in dist.get_backend_config():
        raise ConfigError(
            f"torch.distributed runs already with the backend {dist.get_backend_config()!r}, which cannot compress "
            "what DeepSpeed sends; let fusionlayer.deepspeed start it: remove the call of init_process_group or "
            "init_distributed, or put fusionlayer.deepspeed.init_distributed(config) in its place"
        )
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile this operator for half a minute. Only inference uses it, to sum activations.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    runs = dist.is_initialized()
    if not runs:
        backend.use(section.policy)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend.NAME, **kwargs)
    if runs:
        backend.adopt(section.policy)
    transport = context.transport()
    transport.agree(f'the section "{KEY}" of the DeepSpeed configuration', section, f"optimizer {options}")


def _configuration(arguments: dict[str, Any]) -> tuple[dict[str, Any] | None, Callable[[dict[str, Any]], None]]:
    """Return the configuration in the arguments of ``deepspeed.initialize``, and a function that replaces it there."""
    for name in ("config", "config_params"):
        if arguments.get(name) is not None:
            return read(arguments[name]), functools.partial(arguments.__setitem__, name)
    args = arguments.get("args")
    path = getattr(args, "deepspeed_config", None)
    if path is None:
        return None, lambda config: None

    def put(config: dict[str, Any]) -> None:
        # DeepSpeed takes a configuration from one place only, so hide the one in args.
        arguments["config"] = config
        arguments["args"] = _Without(args)

    return read(path), put


class _Without:
    """Parsed arguments without the name of a configuration file."""

    deepspeed_config = None

    def __init__(self, args: object) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def _deepspeed() -> Any:
    try:
        return importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"fusionlayer.deepspeed needs DeepSpeed ({error}); install it: pip install 'fusionlayer[deepspeed]'"
        ) from error
