"""``dense``: the transport's own all-reduce, on values that are not encoded."""

from __future__ import annotations

from torch import Tensor

from ..codecs import Codec
from ..errors import ConfigError
from ..transport import Transport
from ._base import collective

__all__ = ["dense"]


@collective("dense")
def dense(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum ``x`` uncompressed. The codec is not used, so it must be lossless."""
    if not codec.lossless:
        raise ConfigError(
            f"algorithm 'dense' sends values as they are and cannot use {codec}; choose another algorithm"
        )
    transport.all_reduce(x)
