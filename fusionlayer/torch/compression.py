"""``Compression``: the names that ``compression=`` takes, for optimizers and reductions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import codecs
from ..base.errors import ConfigError
from ..codecs import Codec


class Compressor:
    """Base of ``compression=``: one function before the sum over ranks and one after it.

    Attributes:
        codec: used instead of the two functions, unless None. A collective then sums messages of this codec.
    """

    codec: ClassVar[Codec | None] = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a tensor to sum instead of ``tensor``, and the context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the caller's form of the sum."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors are sent uncompressed."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor."""
        return tensor


class _Cast(Compressor):
    _dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return floats in 16 bits, other tensors unchanged."""
        return (tensor.to(cls._dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """Floats are sent as float16; beyond 65504 they become Inf."""

    _dtype = torch.float16


class BF16Compressor(_Cast):
    """Floats are sent as bfloat16: f32's range, 8 bits of precision."""

    _dtype = torch.bfloat16


class CodecCompressor(NoneCompressor):
    """A codec of fusionlayer. Call it to set options: by name, or the first one by position.

    A ``DistributedOptimizer`` encodes whole buckets with it, or each gradient ahead of fusion, with error feedback
    where that pays. An ``allreduce`` encodes each tensor by itself, without error feedback.

    Args:
        name: the name of the codec, as ``fusionlayer.codecs.get`` takes it.
        options: the options of the codec.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.codec: Codec = codecs.get(name, **options).bare  # type: ignore[misc]
        self._name, self._options = name, options

    def __call__(self, *first: Any, **options: Any) -> CodecCompressor:
        """Return the same codec with other options."""
        if first:
            fields = [field.name for field in dataclasses.fields(self.codec) if field.name != "header"]
            if len(first) > 1 or not fields:
                raise ConfigError(f"Compression.{self._name}{first}; give options by name: {', '.join(fields)}")
            options = {fields[0]: first[0], **options}
        return CodecCompressor(self._name, **{**self._options, **options})

    def __repr__(self) -> str:
        return f"Compression.{self._name}({', '.join(f'{k}={v!r}' for k, v in self._options.items())})"


class _Names(type):
    """Makes the name of every codec an attribute."""

    def __getattr__(cls, name: str) -> CodecCompressor:
        if name.startswith("_"):
            raise AttributeError(name)
        if not codecs.knows(name):
            raise AttributeError(f"Compression has no {name!r}; it has none, fp16, bf16, {', '.join(codecs.names())}")
        return CodecCompressor(name)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *codecs.names()})


class Compression(metaclass=_Names):
    """Values for ``compression=``: ``none``, ``fp16``, ``bf16`` and every codec, such as ``int8`` or ``topk(0.01)``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def codec_of(compression: Any) -> Codec | None:
    """Return the codec of a compression, or None if it is a pair of functions."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigError(f"compression={compression!r}; expected hvd.Compression.none, .fp16, .int8, ...")
    codec: Codec | None = getattr(compression, "codec", None)
    return codec
