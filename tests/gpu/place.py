"""Where the tests of this folder run: on a CUDA device or, to try them before there is one, on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

ON = os.environ.get("GPU_TESTS_ON", "cuda")
"""Type of the device. With "cpu" the tests are rehearsed: they compare the CPU with itself."""

GPU = torch.device(ON)

PATIENCE = float(os.environ.get("GPU_TESTS_PATIENCE", "110"))
"""Seconds after which two ranks that have not ended are ended; on a device no test takes a quarter."""

SMALL = "GPU_TESTS_SMALL" in os.environ
"""Whether to leave out the longest tensors: compute-sanitizer makes kernels many times slower."""

needs_device = pytest.mark.skipif(ON != "cuda", reason="rehearsed on the CPU, which has no streams")


class TensorsOn(TorchFunctionMode):
    """Within it, tensors are made on a device unless another is named, and what the CPU draws goes there."""

    _DRAWING = (torch.rand, torch.randn, torch.randint, torch.randperm)

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> TensorsOn:
        self._device.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._device.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self._DRAWING and "generator" in kwargs:
            return function(*args, **{**kwargs, "device": "cpu"}).to(self._device)
        return function(*args, **kwargs)
