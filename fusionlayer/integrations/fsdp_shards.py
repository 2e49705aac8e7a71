"""What FSDP2 holds of one group of parameters, and whether an optimizer has changed it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..errors import ConfigError, UsageError

__all__ = ["Shards"]

_all: weakref.WeakSet[Shards] = weakref.WeakSet()


class Shards:
    """The parameters that one ``fully_shard`` has sharded together: those of one all-gather.

    Args:
        group: torch's ``FSDPParamGroup``. What is read of it has the same names in torch 2.11 and 2.13.
        names: of each (module, name of the parameter in it).

    Attributes:
        version: of the weights. It grows with every step of an optimizer that has one of them, so it is the same on all
            ranks; whether a rank's shard has changed would not be.
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
        """Return those of ``module``: from ``known``, by identity of the group, or new ones; None if it has none."""
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
        """The sharded parameters, in the order in which they are gathered."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        infos = [each._module_info for each in self._group.fsdp_params]
        return [self._names[info.module, info.param_name] for info in infos]

    @property
    def regathering(self) -> bool:
        """Whether what is gathered now are parts of the weights that forward has gathered, in a smaller group."""
        return bool(self._group.is_sharded_post_forward)

    def changed(self) -> None:
        """Take the weights for changed, by a step."""
        self.version += 1
        if self._seen is not None:
            self._seen = self._now()  # some optimizers count as changes of tensors, others do not

    def check(self) -> None:
        """See that nothing but steps has changed the weights since the last call.

        Raises:
            UsageError: something has.
        """
        now = self._now()
        if self._seen not in (None, now):
            raise UsageError(
                f"weights ({', '.join(self.names[:3])}, ...) were changed, but by no optimizer's step, while ranks' "
                "copies are kept up to date by differences: call weights_changed(), on all ranks, of what "
                "fsdp.compress has returned; after loading other weights, weights_changed(whole=True)"
            )
        self._seen = now

    def unsee(self) -> None:
        """Let the next ``check`` accept the weights as they are."""
        self._seen = None

    def cut(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parts of ``row`` (n,), which is laid out as this rank's part of a gather, by parameter.

        They are sharded as their parameters are, and share the memory of ``row``.
        """
        parts: dict[str, Tensor] = {}
        for name, p, start in zip(self.names, self.parameters, self._starts(), strict=True):
            local = p.to_local()
            part = row[start : start + local.numel()].view(local.shape)
            parts[name] = DTensor.from_local(
                part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        return parts

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the row, of the length and type of ``like``, that ``cut`` has made these parts of."""
        row = torch.zeros_like(like)
        for name, start in zip(self.names, self._starts(), strict=True):
            part = parts[name]
            local = part.to_local() if isinstance(part, DTensor) else part
            row[start : start + local.numel()].copy_(local.flatten())
        return row

    def _starts(self) -> Sequence[int]:
        lengths = [each._sharded_param_data.numel() for each in self._group.fsdp_params]
        return [sum(lengths[:i]) for i in range(len(lengths))]

    def _now(self) -> tuple[int, ...]:
        return tuple(version for p in self.parameters for version in (p._version, p._local_tensor._version))


def _listen() -> None:
    """Let every optimizer's step tell the shards of its parameters, from the first one on."""
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
