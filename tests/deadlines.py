"""When a test that hangs ends: it fails after its ``timeout``; where that does not help, its process ends later on.

pytest-timeout raises an error in the test, which a call of native code does not let through. So faulthandler ends the
process, and with it what a worker of pytest-xdist has still to run. It knows one deadline for all tests: here a test
that may take longer gets as much more until then.
"""

import faulthandler

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key


@pytest.hookimpl(tryfirst=True)  # after pytest has set the deadline of all tests, before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put the end of the process off for a test whose mark ``timeout`` is above the usual one."""
    mark, config = item.get_closest_marker("timeout"), item.config
    usual, end = float(config.getini("timeout") or 0), float(config.getini("faulthandler_timeout") or 0)
    if mark is not None and end:
        own = float(mark.args[0] if mark.args else mark.kwargs["timeout"])
        if own > usual:
            stderr, leave = config.stash[fault_handler_stderr_fd_key], config.getini("faulthandler_exit_on_timeout")
            faulthandler.dump_traceback_later(end + own - usual, file=stderr, exit=bool(leave))
