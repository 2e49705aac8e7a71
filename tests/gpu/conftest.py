import json
import os
import time

import pytest
import torch

from tests.gpu.place import GPU, ON

# Set by tests.gpu.stages: when the stage's time is over, and the file that gets a line for each test.
UNTIL, LOG = "GPU_TESTS_UNTIL", "GPU_TESTS_LOG"
# Whether there is a device is asked without CUDA: ranks are forked, and cannot use it where their parent has.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
NOT_RUN = "no time was left in this stage"
MOST_OF_A_TRACE = 20_000  # characters
_is_worker = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, those that are tests of the CPU run again too, as in need of a GPU."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if ON == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test when the stage's time is over, so that what has run until then is reported."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(NOT_RUN)


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist sends its reports to the process that started it, which writes them down."""
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test went as soon as it has ended: a device that hangs takes all later reports along."""
    path = os.environ.get(LOG)
    if path is None or _is_worker or (report.when != "call" and report.passed):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    outcome = "not run" if report.skipped and NOT_RUN in reason else report.outcome
    line = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)}
    if report.failed:
        sections = [f"{name}\n{text}" for name, text in report.sections]
        line["trace"] = "\n".join([report.longreprtext, *sections])[-MOST_OF_A_TRACE:]
    with open(path, "a") as log:
        log.write(json.dumps(line) + "\n")


@pytest.fixture
def device() -> torch.device:
    """Where a conformance test keeps its tensors."""
    return GPU
