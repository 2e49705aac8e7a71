from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import settings

# No test asserts a time, and a failure that is seen once can be seen again.
settings.register_profile("fusionlayer", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fusionlayer")

# A job that a shell has put into the background ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give all tests that start processes to one worker of pytest-xdist: they have the other cores for their ranks."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("medium"):
                item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture
def device() -> torch.device:
    """Where a conformance test keeps its tensors; ``tests/gpu`` overrides it."""
    return torch.device("cpu")
