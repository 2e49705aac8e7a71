"""Large pages for large results. The kernel makes a page at its first write, and that takes longer than the write."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

# Smallest tensor, in bytes, that gets large pages. At least two whole pages lie in it, at any address.
_FROM_BYTES = 8 << 20
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def by_large_pages(x: Tensor) -> Tensor:
    """Return ``x``, its memory marked for pages of 2 MiB where the system has them. ``x`` must not be written yet."""
    if x.nbytes < _FROM_BYTES or x.is_cuda or (madvise := _madvise()) is None:
        return x
    start = -(-x.data_ptr() // _PAGE) * _PAGE
    end = (x.data_ptr() + x.nbytes) // _PAGE * _PAGE
    madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE
    )  # only advice: the result does not matter
    return x


@cache
def _madvise() -> Any:
    """Return the C library's ``madvise``, or None if the system has no such call."""
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
