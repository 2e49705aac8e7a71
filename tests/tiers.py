"""Which cases of a test run before every push (the fast tier), in CI as well (exhaustive), or when asked for (long)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
long = pytest.mark.long
engine = pytest.mark.engine

FAST = "not gpu and not exhaustive and not long"
"""What chooses the tests of the fast tier, as ``-m`` of pytest."""

# The groups of tests that take a worker longest, about in this order. Other orders are right too, but slower.
LONGEST = (
    "netns",
    "tests/examples/test_ray.py",
    "tests/integrations/test_fsdp.py",
    "tests/integrations/test_megatron.py",
    "tests/examples/test_examples.py",
    "tests/integrations/test_flips.py",
    "tests/transport/test_faults.py",
    "tests/transport/test_connecting.py",
    "tests/transport/test_mpi.py",
    "tests/collectives/test_processes.py",
)

DRAWS = find_spec("matplotlib") is not None
"""Whether pictures can be drawn. The extra `test` has no matplotlib: there, tests of results skip their pictures."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a package is not installed; it does not import them, which takes seconds."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def tiered(cases: Iterable[Any], fast: Callable[..., bool], ci: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Return ``cases`` for ``parametrize``: those for which ``fast(*case)`` is false are marked ``exhaustive``.

    Args:
        cases: tuples of parameters, or single parameters.
        fast: tells whether a case shows something that no other case of the fast tier shows as well.
        ci: tells of the other cases whether CI runs them; if not, they are marked ``long``.
    """
    tuples = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=() if fast(*case) else exhaustive if ci(*case) else long) for case in tuples]


def unguarded(items: Sequence[pytest.Item]) -> list[str]:
    """Return the test functions that no tier before theirs has a case of, or another test for: they guard alone.

    A test that is exhaustive as a whole names the test of the fast tier that guards the same:
    ``exhaustive(guarded_by="tests/file.py::test_name")``; ``long(guarded_by)`` names one of the fast or the exhaustive
    tier. The name is believed if that file was not collected.
    """
    first: dict[str, int] = {}
    guards: dict[str, str] = {}
    for item in items:
        name, tier = item.nodeid.partition("[")[0], 0
        for number, mark in enumerate(map(item.get_closest_marker, ("exhaustive", "long")), 1):
            if mark:
                tier = number
                guards[name] = mark.kwargs.get("guarded_by", guards.get(name, ""))
        first[name] = min(tier, first.get(name, tier))
    files = {name.partition("::")[0] for name in first}

    def guarded(guard: str, tier: int) -> bool:
        return first[guard] < tier if guard in first else bool(guard) and guard.partition("::")[0] not in files

    return [name for name, tier in first.items() if tier and not guarded(guards[name], tier)]


def longest_first(groups: Mapping[str, Sequence[pytest.Item]]) -> list[Sequence[pytest.Item]]:
    """Return the groups of tests, by name, in the order of ``LONGEST``, and then all others in their own."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    return [groups[name] for name in sorted(groups, key=lambda name: rank.get(name, len(rank)))]


def spread(groups: Sequence[Sequence[pytest.Item]], rest: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return all tests in an order in which workers that share them out keep all cores busy.

    Tests in ``groups`` start processes and wait for them, so others should run beside them. They are spread over the
    first three quarters of the ``rest``, whose files of few cases come first: those that have hundreds are quick ones,
    and no worker has a long group or a long test left at the end.
    """
    files = [item.nodeid.partition("::")[0] for item in rest]
    cases = Counter(files)
    rest = [item for _, item in sorted(zip(files, rest, strict=True), key=lambda pair: cases[pair[0]])]
    step = max(1, len(rest) * 3 // (4 * max(1, len(groups))))
    ordered: list[pytest.Item] = []
    for number, group in enumerate(groups):
        ordered += [*group, *rest[number * step : (number + 1) * step]]
    return ordered + list(rest[len(groups) * step :])
