"""States that are published in tests: tensors of every kind, which change by little from version to version."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fusionlayer.publishing.snapshot import Snapshot
from tests.codecs.test_delta import moved
from tests.synthetic import bit_patterns, gradient

RUN = "0123456789abcdef"


def odd_state(version: int = 0) -> dict[str, Tensor]:
    """Return tensors whose bits are easily lost: NaN payloads, -0.0, no elements, no dimensions, ties, strides."""
    weights = gradient(4_000, 1, torch.bfloat16)
    for i in range(version):
        weights = moved(weights, 0.02, stream=10 * i)
    tied = weights.view(50, 80)
    return {
        "tied.a": tied,
        "patterns": bit_patterns(torch.float32).roll(version),
        "halves": bit_patterns(torch.float16)[: 3000 + version],  # its shape changes
        "all bf16": bit_patterns(torch.bfloat16),
        "tied.b": tied,
        "strided": gradient(600, 2).view(20, 30).t()[::2],
        "scalar": torch.tensor(-0.0 if version % 2 else float("nan")),
        "count": torch.tensor(version),
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "no ints": torch.empty(0, dtype=torch.int64),
        "mask": torch.arange(70) % (2 + version) == 0,
        "doubles": torch.linspace(0, 1, 33, dtype=torch.float64) * version,
        "complex": torch.complex(torch.ones(3), torch.full((3,), float(version))),
        "bytes": torch.arange(40, dtype=torch.uint8),
        "small floats": gradient(64, 3).to(torch.float8_e4m3fn),
        **({f"only in {version}": torch.full((5,), float(version))}),
    }


def plain_state(version: int, numel: int = 20_000) -> dict[str, Tensor]:
    """Return weights in bf16 of which each version changes a few."""
    weights = gradient(numel, 7, torch.bfloat16)
    weights[version % 50 :: 50] *= 1 + version
    return {"weight": weights, "bias": gradient(100, 8), "step": torch.tensor(version)}


def bits(state: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    """Return what must be equal of two states: names, types, shapes and bytes."""
    return {
        name: (x.dtype, tuple(x.shape), x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if x.numel()
        else (x.dtype, tuple(x.shape), b"")
        for name, x in state.items()
    }


def snapshot(version: int, state: Mapping[str, Tensor], run: str = RUN) -> Snapshot:
    """Return a state as a version, with copies of its tensors; what is tied stays so."""
    copies = {id(x): torch.empty(x.shape, dtype=x.dtype).copy_(x) for x in state.values()}
    return Snapshot(run, version, {name: copies[id(x)] for name, x in state.items()})


def until(condition: Callable[[], bool], deadline: float = 180) -> None:
    """Return when something that another thread or process brings about is so."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
