"""A test that may take long does not end the run; one that hangs where no signal helps does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.short

INI = "[pytest]\ntimeout = 0.2\nfaulthandler_timeout = 0.4\nfaulthandler_exit_on_timeout = true\n"
TESTS = """
import signal, time
import pytest

@pytest.fixture(scope="module")
def built():
    time.sleep(0.6)

@pytest.mark.timeout(60)
def test_of_something_that_is_built(built): pass

def test_of_signals_that_do_not_help():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)

def test_that_nobody_sees(): pass
"""


def test_the_process_ends_after_the_deadline_of_the_test_itself(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeini(INI)
    pytester.makepyfile(test_it=TESTS)
    plugins = [word for name in ("tests.deadlines", "no:cacheprovider", "no:xdist") for word in ("-p", name)]
    done = pytester.runpytest_subprocess("-v", *plugins)
    told = done.stdout.str() + done.stderr.str()
    assert "test_of_something_that_is_built PASSED" in told
    assert "in test_of_signals_that_do_not_help" in told and "test_that_nobody_sees" not in told
