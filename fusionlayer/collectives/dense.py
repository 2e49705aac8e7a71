"""``dense``: the transport's own all-reduce, on values that are not encoded."""

from __future__ import annotations

from torch import Tensor

from ..codecs import Codec
from ..transport import Transport
from ._base import check_pair, collective


@collective("dense", takes=lambda codec, size: codec.lossless, because="sends values as they are")
def dense(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum ``x`` uncompressed. The codec is not used, so it must be lossless."""
    check_pair("dense", codec, transport.size)
    transport.all_reduce(x)
