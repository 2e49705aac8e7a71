"""Cases within one test, for those that take milliseconds each: ``looped`` is used as ``pytest.mark.parametrize`` is.

    @looped("world", (1, 2, 3))
    @looped("name, codec", [("ring", RAW), ("ring", INT4)])
    def test_sum(name, codec, world): ...

The first case that fails ends the test; the last line of its captured output says which it was. All cases share the
test's fixtures: use ``parametrize`` where a case needs a folder, a patch or a mark of its own. No case may skip, since
that would leave out the cases after it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["looped"]


def looped(
    names: str, values: Iterable[Any], ids: Sequence[str] | Callable[[Any], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that calls a test once for each of ``values``.

    Args:
        names: names of the arguments, separated by commas.
        values: values of the argument; tuples where there are several arguments.
        ids: ignored, as ``parametrize`` has them.
    """
    arguments = [name.strip() for name in names.split(",")]
    cases = [value if len(arguments) > 1 else (value,) for value in values]
    assert cases, f"no values for {names}"
    assert not any(isinstance(value, type(pytest.param())) for case in cases for value in (case, *case)), (
        f"{names}: pytest.param has marks and names, which a loop would drop; use parametrize"
    )

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(*this: Any, **fixtures: Any) -> None:
            for case in cases:
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
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return decorate
