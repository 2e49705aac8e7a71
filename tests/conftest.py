from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# No test asserts a time, and a failure that is seen once can be seen again.
settings.register_profile("fusionlayer", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fusionlayer")


@pytest.fixture
def device() -> torch.device:
    """Where a conformance test keeps its tensors; ``tests/gpu`` overrides it."""
    return torch.device("cpu")
