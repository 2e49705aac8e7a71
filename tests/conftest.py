import gc
import os
import signal
from collections.abc import Generator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import settings

from tests.cores import one_core
from tests.tiers import longest_first, spread, unguarded

pytest_plugins = ["pytester", "tests.deadlines"]

# No test asserts a time, and a failure that is seen once can be seen again.
settings.register_profile("fusionlayer", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fusionlayer")

# The tests that need more threads ask for them. Others would wait for threads on the same core, see below.
torch.set_num_threads(1)

# Torch's store looks up the name of each process that connects, and answers nobody meanwhile. Where a name server loses
# a question, the C library asks again after five seconds, unless it is told to be quicker.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# Where it is set, Python writes each argument of ``print`` by itself, and processes that share a pipe write into each
# other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)

# A job that a shell has put into the background ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected, neither now nor in a test: each look takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Refuse tests that no earlier tier guards; share out tests that start processes over pytest-xdist's workers.

    A file's tests that start processes run one after the other on one worker, and so do all that make network
    namespaces. All others go wherever there is time.
    """
    # One case that was asked for by its name may well be exhaustive.
    alone = [] if any("::" in argument for argument in config.args) else unguarded(items)
    if alone:
        raise pytest.UsageError(
            "every case is exhaustive or long: leave one to an earlier tier, or name a guarded_by of one: "
            + ", ".join(alone)
        )
    shared_out = config.pluginmanager.hasplugin("xdist")
    for item in items if shared_out else []:
        if item.get_closest_marker("medium"):
            group = "netns" if item.get_closest_marker("netns") else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))
    yield
    if shared_out:  # those of this tier
        groups: dict[str, list[pytest.Item]] = {}
        rest = []
        for item in items:
            mark = item.get_closest_marker("xdist_group")
            (groups.setdefault(mark.args[0], []) if mark else rest).append(item)
        items[:] = spread(longest_first(groups), rest)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep a test of one process on one core."""
    with nullcontext() if item.get_closest_marker("medium") else one_core():
        return (yield)


@pytest.fixture
def device() -> torch.device:
    """Where a conformance test keeps its tensors; ``tests/gpu`` overrides it."""
    return torch.device("cpu")
