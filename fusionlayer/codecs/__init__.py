"""Codecs: the meaning of a message's bytes. ``get`` makes one, ``names`` lists them."""

from .base import Codec, registry
from .capabilities import (
    AgreeingCodec,
    ChangeCodec,
    PartsCodec,
    StatefulCodec,
    TransformCodec,
    TwoLevelCodec,
    VariableSizeCodec,
    ZippedCodec,
)
from .homomorphic import HomomorphicCodec
from .keywords import CodecOptions
from .native import NativeCodec
from .packed import PackedPart, PackedResidual
from .pytorch import TorchCodec
from .sparse.sparsifier import Sparsifier, ThresholdSparsifier
from .state import Part, TensorState

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
