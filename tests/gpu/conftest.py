from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, those that are tests of the CPU run again too, as in need of a GPU."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """Where a conformance test keeps its tensors."""
    return torch.device("cuda")
