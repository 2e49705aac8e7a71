"""The base of planners: pure functions that cut tensors, in order of arrival, into runs that are sent together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import ConfigError
from ...base.plan import TensorInfo
from ...base.registry import Registry
from ._costs import Pipeline, StepCosts

registry: Registry[Planner] = Registry("planner", __package__, "fusionlayer.planners")


@dataclass(frozen=True)
class Planner(ABC):
    """Cuts the tensors of a step into buckets; its fields are its options.

    A subclass gives its name in the class statement and implements ``cut``.

    Attributes:
        name: the planner's name in ``fusionlayer.planners.get``.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        registry.add(name, cls)

    @property
    def needs_costs(self) -> bool:
        """Whether ``cut`` needs the costs of a step."""
        return False

    def sized(self, edge: int, threshold: int) -> Planner:
        """Return the planner with bytes of a bucket that follow the job, where its options leave them open.

        Args:
            edge: largest number of bytes in the first and in the last bucket.
            threshold: largest number in any bucket.
        """
        return self

    @abstractmethod
    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return ``tensors`` as consecutive runs; they have one element type and are in order of arrival."""

    def __call__(self, tensors: Sequence[TensorInfo], costs: StepCosts | None = None) -> list[list[TensorInfo]]:
        """Return the runs in order of completion; every tensor is in one run.

        A run never mixes element types, and each of the user's groups is a run of its own.

        Args:
            tensors: the tensors of a step, in order of arrival.
            costs: the costs of the step; all ranks must pass the same, so that they make the same plan.

        Raises:
            ConfigError: the planner needs costs and none are given.
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
        """Return the costs of runs of ``tensors``, for planners that need costs."""
        if costs is None:
            raise ConfigError(
                f"planner {self.name!r} plans by measured costs and was given none; measure a profile with "
                "`fusionlayer profile` and make a plan from it with `fusionlayer plan`"
            )
        return Pipeline(tensors, costs)


def split_at(tensors: Sequence[TensorInfo], ends: Iterable[int]) -> list[list[TensorInfo]]:
    """Return the runs of ``tensors`` that end before the indices ``ends``; these grow, and the last is the length."""
    runs, begin = [], 0
    for end in ends:
        runs.append(list(tensors[begin:end]))
        begin = end
    return runs
