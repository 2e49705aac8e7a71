"""DeepSpeed with its traffic compressed: every kind of parallelism, in one start of two processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusionlayer import ConfigError, PlanMismatch
from tests.harness import run_ranks

from . import deepspeed_training as training

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.medium

STEPS = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_gloo(rank: int, world: int, port: int) -> dict[str, Any]:
    """DeepSpeed alone."""
    training.join(rank, world, port)
    import deepspeed

    found = {}
    for kind in training.KINDS:
        result = training.train(deepspeed.initialize, kind, STEPS)
        found[kind] = (result["losses"], result["digest"])
    return found


def compressed(rank: int, world: int, port: int) -> dict[str, Any]:
    """All that needs the backend."""
    training.join(rank, world, port)
    import fusionlayer as fl

    section: dict[str, Any] = {"gradients": "raw"}
    fl.deepspeed.init_distributed(training.settings("zero0", section))
    found: dict[str, Any] = {"backend": dist.get_backend()}
    for name, section, kinds in (
        ("raw", {"gradients": "raw"}, training.KINDS),
        ("int8", {"gradients": {"codec": "int8", "min_bytes": 0}}, training.KINDS),
    ):
        for kind in kinds:
            print("KIND", name, kind, rank, flush=True)
            result = training.train(fl.deepspeed.initialize, kind, STEPS, section)
            found[name, kind] = (result["losses"], result["digest"])
    return found


@pytest.mark.timeout(300)
def test_raw_is_deepspeed_on_gloo_bit_for_bit() -> None:
    plain = run_ranks(on_gloo, 2, free_port(), backend=None, timeout=150)
    found = run_ranks(compressed, 2, free_port(), backend=None, timeout=150)
    for expected, mine in zip(plain, found, strict=True):
        for kind in training.KINDS:
            assert mine["raw", kind] == expected[kind], kind
            assert mine["int8", kind] != expected[kind], kind
            print(kind, expected[kind][0], mine["int8", kind][0])
