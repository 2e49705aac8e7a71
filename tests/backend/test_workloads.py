"""DDP, FSDP2, tensor parallelism, compiled functional collectives and pipelines over the backend."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fusionlayer import backend
from tests.harness import run_ranks

from .workloads import WORKLOADS

pytestmark = pytest.mark.medium


def hold(rank: int, world: int) -> dict[str, tuple[set[str], bool, float]]:
    """Return for each workload what int8 compressed, whether passing calls changed a bit, and the error of int8."""
    told = {}
    for name, (run, ops) in WORKLOADS.items():
        rules = [{"codec": "int8", "min_bytes": 256, "options": {"group_size": 64}}]
        plain = dist.new_group(None, timedelta(seconds=150), "gloo")
        passing = dist.new_group(None, timedelta(seconds=150), "fusionlayer")
        compressing = dist.new_group(None, timedelta(seconds=150), "fusionlayer", {"rules": rules})
        expected, same, near = run(plain), run(passing), run(compressing)
        equal = all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(near, expected, strict=True))
        assert not backend.traffic(passing).calls
        sent = backend.traffic(compressing)
        assert sent.bytes_sent and set(sent.calls) == ops, (name, sent)
        told[name] = (set(sent.calls), equal, error)
    return told


def test_trainings_keep_their_bits_when_calls_pass_and_come_near_with_int8() -> None:
    for told in run_ranks(hold, 2, backend="fusionlayer"):
        for name, (_, equal, error) in told.items():
            assert equal, f"{name}: calls that should pass changed something"
            assert 0 < error < 0.02, f"{name}: int8 is off by {error}"
