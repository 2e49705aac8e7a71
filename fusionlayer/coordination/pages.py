"""Large pages for large results: a page is made when it is first written, and that takes longer than writing it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["by_large_pages"]

# Two pages at least lie in it, wherever it begins.
_FROM_BYTES = 8 << 20
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def by_large_pages(x: Tensor) -> Tensor:
    """Return ``x``, which nobody has written to yet; the system makes its memory by pages of 2 MiB if it has them."""
    if x.nbytes < _FROM_BYTES or x.is_cuda or (madvise := _madvise()) is None:
        return x
    start = -(-x.data_ptr() // _PAGE) * _PAGE
    end = (x.data_ptr() + x.nbytes) // _PAGE * _PAGE
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)  # advice: it may be of no effect
    return x


@cache
def _madvise() -> Any:
    """Return the C library's function, None where there is no such advice."""
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
