"""Ranks that are threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fusionlayer.transport import Transport, local

Result = TypeVar("Result")


def over_threads(
    world: int, body: Callable[[Transport], Result], timeout: float = 180, ranks_per_node: int | None = None
) -> list[Result]:
    """Return what ``body`` returns on each of ``world`` ranks; it is given the rank's transport."""

    def rank_main(rank: int) -> Result:
        transport = local.current()
        assert transport is not None and transport.rank == rank
        return body(transport)

    return local.run(rank_main, world, timeout=timeout, ranks_per_node=ranks_per_node)
