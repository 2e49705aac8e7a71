"""This rank's shards of the parameters that FSDP2 gathers together, and whether an optimizer has changed them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..base.errors import ConfigError, UsageError

_all: weakref.WeakSet[Shards] = weakref.WeakSet()


class Shards:
    """The parameters that one ``fully_shard`` has sharded together, which one all-gather sends.

    Args:
        group: torch's ``FSDPParamGroup``. The attributes read here have the same names in torch 2.11 and 2.13.
        names: full name of each (module, name of the parameter in it).

    Attributes:
        version: version of the weights. It grows with every step of an optimizer that has one of the parameters, so it
            is the same on all ranks. Whether a shard has changed may differ from rank to rank.
    """

    def __init__(self, group: Any, names: Mapping[tuple[nn.Module, str], str]) -> None:
        self.version = 0
        self._group = group
        self._names = names
        self._seen: tuple[int, ...] | None = None
        if not _all:
            _listen()
        _all.add(self)

    @staticmethod
    def of(module: FSDPModule, names: Mapping[tuple[nn.Module, str], str], known: dict[int, Shards]) -> Shards | None:
        """Return the shards of ``module``, or None if it has no parameters of its own.

        ``known`` maps the identity of a group to its shards; new ones are added to it.
        """
        try:
            group: Any = module._get_fsdp_state()._fsdp_param_group
        except AssertionError as error:
            raise ConfigError(f"fsdp.compress cannot replace the collectives of a module: {error}") from error
        if group is None:
            return None
        if id(group) not in known:
            known[id(group)] = Shards(group, names)
        return known[id(group)]

    @property
    def parameters(self) -> list[DTensor]:
        """The sharded parameters, in gathering order."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def names(self) -> list[str]:
        """The names of ``parameters``, in the same order."""
        infos = [each._module_info for each in self._group.fsdp_params]
        return [self._names[info.module, info.param_name] for info in infos]

    @property
    def trained(self) -> dict[str, tuple[DTensor, int]]:
        """The parameters that require gradients, by name, each with the elements of its shard including padding.

        A reduce-scatter fills a flat tensor with their gradients, in this order.
        """
        pairs = zip(self.names, self._group.fsdp_params, strict=True)
        found = {name: (each.sharded_param, each._sharded_param_data.numel()) for name, each in pairs}
        return {name: each for name, each in found.items() if each[0].requires_grad}

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group over which torch sums gradients of copies of these shards; None without HSDP."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @replicas.setter
    def replicas(self, group: dist.ProcessGroup) -> None:
        self._group.mesh_info.replicate_process_group = group

    @property
    def replicated(self) -> dict[dist.ProcessGroup, dict[str, Tensor]]:
        """For each group of ranks that hold copies of the same shards, as HSDP's replicas do: the shards, by name."""
        found: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        for name, shard in zip(self.names, self.parameters, strict=True):
            for dim, placement in enumerate(shard.placements):
                if placement.is_replicate() and shard.device_mesh.size(dim) > 1 and not shard.is_meta:
                    found.setdefault(shard.device_mesh.get_group(dim), {})[name] = shard
        return found

    @property
    def regathering(self) -> bool:
        """Whether this gather only restores, in a smaller group, weights that forward has gathered already."""
        return bool(self._group.is_sharded_post_forward)

    def changed(self) -> None:
        """Note that a step has changed the weights."""
        self.version += 1
        if self._seen is not None:
            self._seen = self._now()  # some optimizers raise the tensors' version counters, others do not

    def check(self) -> None:
        """Check that nothing but steps has changed the weights since the last call.

        Raises:
            UsageError: something else has changed them.
        """
        now = self._now()
        if self._seen not in (None, now):
            raise UsageError(
                f"weights ({', '.join(self.names[:3])}, ...) were changed, but by no optimizer's step, and are sent "
                "as differences: call weights_changed() of the object that fsdp.compress returned, on all ranks; after "
                "loading other weights, call weights_changed(whole=True)"
            )
        self._seen = now

    def unsee(self) -> None:
        """Let the next ``check`` accept the present weights."""
        self._seen = None

    def cut(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parts of ``row`` (n,) by parameter; ``row`` has the layout of this rank's part of a gather.

        The parts are sharded as their parameters are, and share the memory of ``row``.
        """
        rows = row.split(self._lengths())
        return {name: sharded_like(p, row) for name, p, row in zip(self.names, self.parameters, rows, strict=True)}

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the row that ``cut`` would split into these parts, with the length and type of ``like``."""
        row = torch.zeros_like(like)
        for name, place in zip(self.names, row.split(self._lengths()), strict=True):
            part = local(parts[name])
            place[: part.numel()].copy_(part.flatten())
        return row

    def rows(self) -> DTensor | None:
        """Return the numbers of the rows that this rank has of the longest parameter, sharded as the parameter is.

        They identify this rank's state. None: no parameter is sharded along one dimension.
        """
        longest: DTensor | None = None
        for p, (of_mesh, along) in self._sharded_once():
            count = p.to_local().shape[along]
            size, rank = p.device_mesh.size(of_mesh), p.device_mesh.get_local_rank(of_mesh)
            start = min(p.shape[along], -(-p.shape[along] // size) * rank)
            if longest is None or p.shape[along] > len(longest):
                numbers = torch.arange(start, start + count, device=p.device_mesh.device_type)
                placements = [Shard(0) if each.is_shard() else each for each in p.placements]
                longest = DTensor.from_local(
                    numbers, p.device_mesh, placements, run_check=False, shape=p.shape[along : along + 1], stride=(1,)
                )
        return longest

    def _sharded_once(self) -> Iterator[tuple[DTensor, tuple[int, int]]]:
        """Yield parameters that are sharded along one dimension, with those of the mesh and of the parameter."""
        for p in self.parameters:
            found = [(i, each.dim) for i, each in enumerate(p.placements) if type(each) is Shard]
            if len(found) == 1 == sum(each.is_shard() for each in p.placements):
                yield p, found[0]

    def _lengths(self) -> list[int]:
        return [each._sharded_param_data.numel() for each in self._group.fsdp_params]

    def _now(self) -> tuple[int, ...]:
        return tuple(version for p in self.parameters for version in (p._version, p._local_tensor._version))


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def sharded_like(p: DTensor, row: Tensor) -> DTensor:
    """Return the first elements of ``row`` as a tensor that is sharded as ``p`` is; it shares the memory of ``row``."""
    part = p.to_local()
    part = row[: part.numel()].view(part.shape)
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _listen() -> None:
    """Register a global hook, once, with which every optimizer's step notifies the shards of its parameters."""
    global _listening
    if _listening:
        return
    _listening = True

    def stepped(optimizer: Optimizer, *_: object) -> None:
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for shards in list(_all):
            if any(id(p) in stepping for p in shards.parameters):
                shards.changed()

    register_optimizer_step_post_hook(stepped)


_listening = False
