"""What a planner is: a pure function from tensors in backward order to runs that travel together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...plan import TensorInfo
from ...registry import Registry

__all__ = ["Planner", "registry"]

registry: Registry[Planner] = Registry("planner", __package__)


@dataclass(frozen=True)
class Planner(ABC):
    """Cuts the tensors of a step into buckets; its fields are its options.

    A subclass names itself in the class statement and gives ``cut``.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        registry.add(name, cls)

    @abstractmethod
    def cut(self, tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
        """Return ``tensors``, all of one element type and in the order of their arrival, as consecutive runs."""

    def __call__(self, tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
        """Return every tensor in one run, the runs in the order in which they become complete.

        Element types are never mixed, and a group of the user's is a run of its own.
        """
        position = {tensor.name: i for i, tensor in enumerate(tensors)}
        pools: dict[tuple[str, int | None], list[TensorInfo]] = {}
        for tensor in tensors:
            pools.setdefault((tensor.dtype, tensor.group), []).append(tensor)
        runs: list[list[TensorInfo]] = []
        for (_, group), pool in pools.items():
            runs += self.cut(pool) if group is None else [pool]
        return sorted(runs, key=lambda run: position[run[-1].name])
