"""Codecs: what the bytes of a message mean. ``get`` and ``names`` are the way to them."""

from ._base import Codec, registry
from ._homomorphic import HomomorphicCodec
from ._native import NativeCodec
from ._sparse import Sparsifier, ThresholdSparsifier
from ._state import Part, TensorState
from ._torch import TorchCodec

__all__ = [
    "Codec",
    "HomomorphicCodec",
    "NativeCodec",
    "Part",
    "Sparsifier",
    "TensorState",
    "ThresholdSparsifier",
    "TorchCodec",
    "get",
    "names",
]

get = registry.get
names = registry.names
