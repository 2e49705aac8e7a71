"""The backend beside plain gloo: the same calls, results and errors."""

import itertools
import random
import warnings
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer import backend
from tests.harness import run_ranks

from .differential import outcome
from .workloads import WORKLOADS

pytestmark = pytest.mark.medium

CASES = 500
PASS = backend.Policy()
LOSSLESS = backend.Policy((backend.Rule("zip", op=backend.OPS, min_bytes=0),))


def compare(rank: int, world: int) -> tuple[Counter[str], int, int]:
    warnings.simplefilter("ignore", FutureWarning)
    trios = []
    subsets = [ranks for n in range(1, world + 1) for ranks in itertools.combinations(range(world), n)]
    for ranks in subsets:
        plain = dist.new_group(ranks, timedelta(seconds=150), "gloo")
        ours = [dist.new_group(ranks, timedelta(seconds=150), "fusionlayer", policy) for policy in (PASS, LOSSLESS)]
        trios.append((plain, *ours))
    draw = random.Random(9)
    errors = 0
    for number in range(CASES):
        plain, *ours = draw.choice([*trios, trios[-1], trios[-1]])
        if plain is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        what, expected, error = outcome(number, plain)
        for group in ours:
            _, found, told = outcome(number, group)
            # Of an average of integers we say what to do; gloo names types of C++. What else gloo refuses we say in
            # words of the call.
            meant = told.startswith("ConfigError: ") and "AVG" in what and "can't be cast" in (error or "")
            meant = meant or told.startswith("_GlooRefusal: ") and (error or "").startswith("RuntimeError: ")
            assert meant or told == error, f"case {number}, {what}: {told!r} for {error!r}"
            for a, b in zip(found, expected, strict=True):
                assert same(a, b, exactly="AVG" not in what), f"case {number}, {what}: {a} for {b}"
        errors += bool(error)
    here = [trio for trio in trios if trio[0] is not dist.GroupMember.NON_GROUP_MEMBER]
    assert not any(backend.traffic(passing).calls for _, passing, _ in here), "something that should pass did not"
    calls = sum((backend.traffic(lossless).calls for _, _, lossless in here), Counter[str]())
    return calls, backend.traffic(trios[-1][2]).bytes_sent, errors


def same(a: Tensor, b: Tensor, *, exactly: bool) -> bool:
    """Return whether two results are equal; averages up to the rounding of dividing before the sum, not after it."""
    if exactly or not a.dtype.is_floating_point:
        return a.dtype == b.dtype and torch.equal(a, b)
    close = 4 * torch.finfo(a.dtype).eps
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=close, atol=close, equal_nan=True)


def test_500_calls_are_those_of_gloo() -> None:
    for calls, sent, errors in run_ranks(compare, 3):
        assert sent and errors > 10 and all(calls[op] >= 8 for op in (*backend.OPS, "recv")), (calls, errors)


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
