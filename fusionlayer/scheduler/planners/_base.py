"""What a planner is: a pure function from tensors in backward order, and costs, to runs that travel together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ConfigError
from ...plan import TensorInfo
from ...registry import Registry
from ._costs import Pipeline, StepCosts

__all__ = ["Planner", "registry"]

registry: Registry[Planner] = Registry("planner", __package__)


@dataclass(frozen=True)
class Planner(ABC):
    """Cuts the tensors of a step into buckets; its fields are its options.

    A subclass names itself in the class statement and gives ``cut``.

    Attributes:
        name: what ``fusionlayer.planners.get`` calls it.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        registry.add(name, cls)

    @property
    def needs_costs(self) -> bool:
        """Whether its cuts follow from what a step costs."""
        return False

    @abstractmethod
    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return ``tensors``, all of one element type and in the order of their arrival, as consecutive runs."""

    def __call__(self, tensors: Sequence[TensorInfo], costs: StepCosts | None = None) -> list[list[TensorInfo]]:
        """Return every tensor in one run, the runs in the order in which they become complete.

        Element types are never mixed, and a group of the user's is a run of its own.

        Args:
            tensors: of a step, in order of arrival.
            costs: of the step; the same on all ranks, so that they make the same plan.

        Raises:
            ConfigError: the planner needs costs, and none are given.
        """
        position = {tensor.name: i for i, tensor in enumerate(tensors)}
        pools: dict[tuple[str, int | None], list[TensorInfo]] = {}
        for tensor in tensors:
            pools.setdefault((tensor.dtype, tensor.group), []).append(tensor)
        runs: list[list[TensorInfo]] = []
        for (_, group), pool in pools.items():
            if group is None:
                runs += self.cut(pool, costs if costs is None else costs.within(tensors, pool))
            else:
                runs.append(pool)
        return sorted(runs, key=lambda run: position[run[-1].name])

    def pipeline(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> Pipeline:
        """Return what runs of ``tensors`` cost, for planners that need it."""
        if costs is None:
            raise ConfigError(
                f"planner {self.name!r} plans by measured costs and was given none; measure a profile with "
                "`fusionlayer profile` and make a plan from it with `fusionlayer plan`"
            )
        return Pipeline(tensors, costs)


def split_at(tensors: Sequence[TensorInfo], ends: Iterable[int]) -> list[list[TensorInfo]]:
    """Return the runs of ``tensors`` that end before the indices ``ends``, growing, the last of them the length."""
    runs, begin = [], 0
    for end in ends:
        runs.append(list(tensors[begin:end]))
        begin = end
    return runs
