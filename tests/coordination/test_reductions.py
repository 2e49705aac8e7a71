"""Reductions of every kind and type: against torch's own, and with ranks that have nothing to add."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusionlayer.collectives import Scaling
from fusionlayer.collectives.reduction import scale_
from fusionlayer.coordination.pages import by_large_pages
from fusionlayer.coordination.reductions import combine, neutral, reduce_as
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads

OPS = {
    "Sum": lambda every: every.sum(0),
    "Min": lambda every: every.amin(0),
    "Max": lambda every: every.amax(0),
    "Product": lambda every: every.prod(0),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def values(rank: int, dtype: torch.dtype) -> Tensor:
    """Return small whole numbers, which no order of operations rounds; some are negative, where there are such."""
    return ((torch.arange(11) * (rank + 2)) % 5 - (dtype.is_signed and rank) * 1).to(dtype)


def oracle(op: str, parts: list[Tensor]) -> Tensor:
    return OPS[op](torch.stack(parts).to(torch.float64)).to(parts[0].dtype)


@looped("dtype", DTYPES, ids=str)
@looped("op", OPS)
def test_who_adds_nothing_changes_nothing(op: str, dtype: torch.dtype) -> None:
    parts = [values(rank, dtype) for rank in range(3)]
    total = combine(parts, op)
    assert total.dtype is dtype and torch.equal(total, oracle(op, parts))
    nothing = torch.full_like(total, neutral(op, dtype))
    assert torch.equal(combine([nothing, *parts, nothing], op), total)


@looped("op", OPS)
def test_scales_before_and_after(op: str) -> None:
    before, after = 0.5, 8.0

    def body(transport: Transport) -> Tensor:
        x = values(transport.rank, torch.float32)
        reduce_as(op, x, transport, Scaling(before, after))
        return x

    expected = oracle(op, [values(rank, torch.float32) * before for rank in range(3)]) * after
    assert all(torch.equal(found, expected) for found in over_threads(3, body))


@looped("dtype", [torch.int32, torch.int64])
def test_whole_numbers_are_scaled_towards_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([-7, 7, -1, 3], dtype=dtype)
    total = x.clone()
    Scaling.of(dtype, 2, average=True).scale_after_(total)
    assert total.tolist() == scale_(x.clone(), 0.5).tolist() == [-3, 3, 0, 1]
    assert scale_(x.clone(), 0.9).tolist() == [-6, 6, 0, 2]


MAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(
    not (MAPS.exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()), reason="a system without large pages"
)
def test_large_memory_is_of_large_pages() -> None:
    # A mapping of its own: memory that torch gives out, after other tests, may have the advice already.
    memory = mmap.mmap(-1, 40 << 20)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    assert "hg" not in _flags(x)
    assert by_large_pages(x) is x
    assert "hg" in _flags(x)
    assert x.fill_(7).eq(7).all()


def _flags(x: torch.Tensor) -> list[str]:
    """Return what the system knows of the mapping in which the middle of a tensor lies."""
    middle = x.data_ptr() + x.nbytes // 2
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", MAPS.read_text()):
        start, end = (int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))
        if start <= middle < end:
            return entry.split("VmFlags:")[1].split()
    raise AssertionError("the memory is not mapped")
