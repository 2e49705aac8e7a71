"""Codecs: what the bytes of a message mean. ``names`` lists them, ``options`` what they take; ``get`` makes one."""

from ._base import Codec, registry
from ._capabilities import (
    AgreeingCodec,
    PartsCodec,
    StatefulCodec,
    TransformCodec,
    TwoLevelCodec,
    VariableSizeCodec,
    ZippedCodec,
)
from ._homomorphic import HomomorphicCodec
from ._native import NativeCodec
from ._options import CodecOptions
from ._sparse import Sparsifier, ThresholdSparsifier
from ._state import Part, TensorState
from ._torch import TorchCodec

__all__ = [
    "AgreeingCodec",
    "Codec",
    "CodecOptions",
    "HomomorphicCodec",
    "NativeCodec",
    "Part",
    "PartsCodec",
    "Sparsifier",
    "StatefulCodec",
    "TensorState",
    "ThresholdSparsifier",
    "TorchCodec",
    "TransformCodec",
    "TwoLevelCodec",
    "VariableSizeCodec",
    "ZippedCodec",
    "get",
    "names",
    "options",
]

get = registry.get
names = registry.names
options = registry.options
