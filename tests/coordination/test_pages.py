"""Large results are made by large pages, where the system has them."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from fusionlayer.coordination.pages import by_large_pages

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
