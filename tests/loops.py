"""Cases within one test, for those that take milliseconds each: ``looped`` is used as ``pytest.mark.parametrize`` is.

    @looped("world", (1, 2, 3))
    @looped("name, codec", [("ring", RAW), ("ring", INT4)])
    def test_sum(name, codec, world): ...

The first case that fails ends the test; the last line of its captured output says which it was. All cases share the
test's fixtures: use ``parametrize`` where a case needs a folder, a patch or a mark of its own. No case may skip, since
that would leave out the cases after it. Cases of ``tiers.tiered`` make a test for each tier.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.tiers import exhaustive, long

__all__ = ["looped"]

_PARAM = type(pytest.param())
_TIERS: dict[str, Any] = {"fast": (), "rest": exhaustive, "long": long}
_OF_MARKS: dict[tuple[str, ...], str] = {(): "fast", ("exhaustive",): "rest", ("long",): "long"}


def looped(
    names: str, values: Iterable[Any], ids: Sequence[str] | Callable[[Any], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that calls a test once for each of ``values``.

    Args:
        names: names of the arguments, separated by commas.
        values: values of the argument, tuples where there are several arguments; or ``tiers.tiered`` of them.
        ids: ignored, as ``parametrize`` has them.
    """
    arguments = [name.strip() for name in names.split(",")]
    tiers: dict[str, list[Sequence[Any]]] = {tier: [] for tier in _TIERS}
    for value in values:
        marks: tuple[str, ...] = ()
        if isinstance(value, _PARAM):
            marks = tuple(mark.name for mark in value.marks)
            dropped = value.id is not None or marks not in _OF_MARKS
            assert not dropped, f"{names}: a loop drops the marks and names of pytest.param; use parametrize"
            case: Sequence[Any] = value.values
        else:
            case = value if len(arguments) > 1 else (value,)
        assert not any(isinstance(each, _PARAM) for each in case), f"{names}: a case has pytest.param within"
        tiers[_OF_MARKS[marks]].append(case)
    assert tiers["fast"], f"no values for {names}"
    several = [pytest.param(tier, marks=marks) for tier, marks in _TIERS.items() if tiers[tier]]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(*this: Any, **fixtures: Any) -> None:
            for case in tiers[fixtures.pop("tier") if several[1:] else "fast"]:
                given = dict(zip(arguments, case, strict=True))
                print(", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in given.items()))
                try:
                    test(*this, **fixtures, **given)
                except pytest.skip.Exception as skipped:
                    raise AssertionError(f"a case of a loop skips, and with it all after it: {skipped}") from skipped

        signature = inspect.signature(test)
        missing = set(arguments) - set(signature.parameters)
        assert not missing, f"{test.__name__} takes no {', '.join(missing)}"
        kept = [each for name, each in signature.parameters.items() if name not in arguments]
        if several[1:]:
            assert "tier" not in signature.parameters, f"{test.__name__} has two loops over cases of several tiers"
            kept.append(inspect.Parameter("tier", inspect.Parameter.KEYWORD_ONLY))
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("tier", several)(loop) if several[1:] else loop

    return decorate
