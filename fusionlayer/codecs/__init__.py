"""Codecs: what the bytes of a message mean. ``get`` makes one, ``names`` lists them."""

from ._base import Codec, registry
from ._capabilities import (
    AgreeingCodec,
    ChangeCodec,
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
from ._packed import PackedPart, PackedResidual
from ._sparse import Sparsifier, ThresholdSparsifier
from ._state import Part, TensorState
from ._torch import TorchCodec

__all__ = [
    "AgreeingCodec",
    "ChangeCodec",
    "Codec",
    "CodecOptions",
    "HomomorphicCodec",
    "NativeCodec",
    "PackedPart",
    "PackedResidual",
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
    "knows",
    "names",
    "options",
]

get = registry.get
knows = registry.knows
names = registry.names
options = registry.options
