"""Facts about an optimizer's parameters that ``DistributedOptimizer`` needs: names, sizes, device, groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError, require
from ..base.plan import TensorInfo, plain_name
from ..functional import Group


def name_parameters(
    groups: Iterable[Mapping[str, Any]],
    given: Mapping[Tensor, str] | None,
    group: Group = None,
    known: Mapping[Tensor, str] | None = None,
) -> dict[Tensor, str]:
    """Return the name of each parameter of an optimizer, in its order.

    Args:
        groups: the optimizer's parameter groups.
        given: names that the user has given; None: the position in the optimizer names each parameter.
        group: ranks to reduce over.
        known: names of the parameters that the optimizer had before, which stay. Parameters that came later may be
            missing in ``given``. Then ``add_param_group`` has their names, or their position names them.

    Raises:
        ConfigError: names are missing or not unique, or a parameter is sharded over ranks of ``group``.
    """
    names: dict[Tensor, str] = {}
    owner: dict[str, Tensor] = {}
    for i, each in enumerate(groups):
        for j, parameter in enumerate(each["params"]):
            if known is not None and parameter in known:
                name = known[parameter]
            elif given is not None and parameter in given:
                name = given[parameter]
            elif known is None and given is not None:
                raise ConfigError(
                    f"parameter {j} of group {i}, shape {tuple(parameter.shape)}, is not in named_parameters; name all "
                    "parameters of the optimizer, or none"
                )
            else:
                own = each.get("param_names") if known is not None else None
                name = plain_name(own[j]) if own else f"allreduce.noname.{i}.{j}"
            if owner.setdefault(name, parameter) is not parameter:
                raise ConfigError(
                    f"parameter {j} of group {i}, shape {tuple(parameter.shape)}, has the name {name!r} of another "
                    "one; give each parameter of the optimizer its own name"
                )
            refuse_sharded(name, parameter, group)
            names[parameter] = name
    return names


def given_names(named_parameters: nn.Module | Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str] | None:
    """Return the names that a user gives, by parameter; None if there are none.

    Names do not depend on what ``torch.compile`` has compiled, so plans, rules and states fit with and without it.
    """
    if named_parameters is None:
        return None
    if isinstance(named_parameters, nn.Module):
        named_parameters = named_parameters.named_parameters()
    expected = "the model, or (name, parameter) pairs, such as model.named_parameters()"
    require(named_parameters, Iterable, "named_parameters", expected)
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError(f"named_parameters: expected {expected}")
    pairs = [(plain_name(name), parameter) for name, parameter in pairs]
    counts: dict[str, int] = {}
    for name, _ in pairs:
        counts[name] = counts.get(name, 0) + 1
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters has {twice[0]!r} more than once; names must be unique over all models")
    return {parameter: name for name, parameter in pairs}


def replicated_by(module: nn.Module, group: Group = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of ``module`` without gradients, and its buffers, except those divided over ranks."""

    def whole(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {plain_name(name): x for name, x in named if not (is_distributed(x) and _ranks_of_parts(x, group))}

    return whole((name, p) for name, p in module.named_parameters() if not p.requires_grad), whole(
        module.named_buffers()
    )


def is_distributed(parameter: Tensor) -> bool:
    """Return whether ``parameter`` is a DTensor, so that this rank holds a part of it."""
    return type(parameter).__name__ == "DTensor"


def local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or ``x`` itself if it is a plain tensor; both share memory with ``x``."""
    part: Tensor = x.to_local() if is_distributed(x) else x  # type: ignore[attr-defined]
    return part


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients are finite; of DTensors also the parts of other ranks, all of which call this."""
    finite = True
    meshes: dict[Any, None] = {}
    for gradient in gradients:
        finite = finite and bool(local_part(gradient).isfinite().all())
        if is_distributed(gradient):
            meshes[gradient.device_mesh] = None  # type: ignore[attr-defined]
    for mesh in meshes:
        for dim in range(mesh.ndim):
            flag = torch.tensor(int(finite), dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(dim))
            finite = bool(flag.item())
    return finite


def refuse_sharded(name: str, parameter: Tensor, group: Group) -> None:
    """Raise ``ConfigError`` if FSDP shards the parameter, or tensor parallelism does over ranks of ``group``.

    FSDP calls the same hooks after it has reduced gradients itself, and different parts of a parameter have no average.
    """
    flat = type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_sharded_param_data")
    ranks = _ranks_of_parts(parameter, group) if is_distributed(parameter) else []
    if flat or ranks:
        over = f" over ranks {ranks}" if ranks else ""
        raise ConfigError(
            f"parameter {name!r} is sharded by FSDP or tensor parallelism{over}, and gradients of its parts have no "
            "average; with FSDP, which reduces gradients itself, use fusionlayer.fsdp.compress(model) instead, or for "
            "local steps between replicas give fully_shard the mesh of the shards alone; with tensor parallelism give "
            "group= the ranks that hold the same part"
        )


def _ranks_of_parts(parameter: Tensor, group: Group) -> list[int]:
    """Return the other ranks of ``group`` that are in the mesh of a DTensor."""
    within = group if isinstance(group, dist.ProcessGroup) else None
    mesh = parameter.device_mesh.mesh  # type: ignore[attr-defined]
    return sorted({*dist.get_process_group_ranks(within)} & {*mesh.flatten().tolist()} - {dist.get_rank()})


def one_device(names: Mapping[Tensor, str]) -> torch.device:
    """Return the device of all gradients; raise ``ConfigError`` if there are several devices, or no parameters."""
    devices = {parameter.device for parameter in names}
    if len(devices) != 1:
        raise ConfigError(
            f"parameters that get gradients are on {sorted(map(str, devices)) or 'no device: there are none'}; one "
            "optimizer reduces tensors of one device: move them, or wrap one optimizer for each device"
        )
    return next(iter(devices))


def describe(
    names: Mapping[Tensor, str],
    groups: int | Sequence[Sequence[Tensor]] | None,
    every: Collection[Tensor] | None = None,
) -> list[TensorInfo]:
    """Return the name, size, type, group and shape of each parameter, for a planner.

    ``groups`` may have other tensors of ``every`` too; None: it may not.
    """
    number = _number_groups(names, groups, names.keys() if every is None else every)
    shapes = {name: tuple(local_part(parameter.detach()).shape) for parameter, name in names.items()}
    return [
        TensorInfo(
            name,
            math.prod(shapes[name]),
            str(parameter.dtype).removeprefix("torch."),
            parameter.itemsize,
            number.get(parameter),
            shapes[name],
        )
        for parameter, name in names.items()
    ]


def _number_groups(
    names: Mapping[Tensor, str], groups: int | Sequence[Sequence[Tensor]] | None, every: Collection[Tensor]
) -> dict[Tensor, int]:
    if groups is None:
        return {}
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"groups={groups}; expected a number of buckets, 0 to let the planner decide")
        count = min(groups, len(names))
        return {parameter: i * count // len(names) for i, parameter in enumerate(names)} if count else {}
    number: dict[Tensor, int] = {}
    require(groups, Iterable, "groups", "a number of buckets, or a list of lists of parameters")
    for index, members in enumerate(groups):
        require(members, Iterable, f"groups[{index}]", "a list of parameters of the optimizer")
        for parameter in members:
            if not isinstance(parameter, Tensor) or parameter not in every:
                raise ConfigError(f"groups[{index}] has something that is not a parameter of the optimizer")
            if parameter in number:
                raise ConfigError(
                    f"parameter {names.get(parameter)!r} is in groups {number[parameter]} and {index}; one is enough"
                )
            number[parameter] = index
    return number
