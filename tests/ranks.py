"""Ranks that are threads of the test's process, and tests that are written as what each rank does.

    @on_threads(4)
    def test_sum(transport): ...

    @on_ranks(2)
    def test_optimizer(rank): ...

    @on_processes(2)                       # by ``harness.run_ranks``
    def test_job(rank, world, tmp_path): ...

Fixtures and parameters follow the arguments of a rank. Without a number of ranks the decorator takes it from the test's
parameter ``world``.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fusionlayer.transport import Transport, local
from tests.harness import run_ranks

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


def on_threads(world: int | None = None, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs ``test(transport, ...)`` on every rank; ``how`` is passed to ``over_threads``."""

    def start(body: Callable[..., None], given: dict[str, Any]) -> None:
        over_threads(given["world"] if world is None else world, functools.partial(body, **given), **how)

    return lambda body: _test_of(body, start, {"transport"})


def on_ranks(world: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs ``test(rank, ...)`` on every rank, a thread for each."""

    def start(body: Callable[..., None], given: dict[str, Any]) -> None:
        local.run(lambda rank: body(rank, **given), given["world"] if world is None else world)

    return lambda body: _test_of(body, start, {"rank"})


def on_processes(world: int | None = None, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs ``test(rank, world, ...)`` on every rank; ``how`` is passed to ``run_ranks``."""

    def start(body: Callable[..., None], given: dict[str, Any]) -> None:
        of_ranks = [value for name, value in given.items() if name != "world"]
        run_ranks(body, given["world"] if world is None else world, *of_ranks, **how)

    return lambda body: _test_of(body, start, {"rank", "world"} if world else {"rank"})


def _test_of(
    body: Callable[..., None], start: Callable[[Callable[..., None], dict[str, Any]], None], of_rank: set[str]
) -> Callable[..., None]:
    @functools.wraps(body)
    def test(**given: Any) -> None:
        start(body, given)

    signature = inspect.signature(body)
    kept = [each.replace(kind=each.KEYWORD_ONLY) for name, each in signature.parameters.items() if name not in of_rank]
    test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    body.__qualname__ += ".of_rank"  # where processes find it by name
    test.of_rank = body  # type: ignore[attr-defined]
    return test
