"""``Compression``: what gradients and tensors of an allreduce travel as."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import codecs
from ..codecs import Codec
from ..errors import ConfigError

__all__ = ["CodecCompressor", "Compression", "Compressor", "codec_of"]


class Compressor:
    """What ``compression=`` takes: a pair of functions around the sum over ranks.

    Attributes:
        codec: instead of the functions: tensors are encoded for each message, and summed by a collective.
    """

    codec: ClassVar[Codec | None] = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a tensor that can be summed in place of this one, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return what the sum stands for."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

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
        """Return floats in 16 bits, other tensors as they are."""
        return (tensor.to(cls._dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """Floats travel as float16; beyond 65504 they become Inf."""

    _dtype = torch.float16


class BF16Compressor(_Cast):
    """Floats travel as bfloat16: f32's range, 8 bits of precision."""

    _dtype = torch.bfloat16


class CodecCompressor(NoneCompressor):
    """A codec of fusionlayer; called, it takes the codec's options, the first of them by place.

    In a ``DistributedOptimizer`` it encodes whole buckets, or each gradient ahead of fusion, with error feedback where
    that pays; in an ``allreduce`` each tensor by itself, without.

    Args:
        name: what ``fusionlayer.codecs.get`` calls it.
        options: of the codec.
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
    """Every codec's name is an attribute."""

    def __getattr__(cls, name: str) -> CodecCompressor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in codecs.names():
            raise AttributeError(f"Compression.{name}: there is none, fp16, bf16 and {', '.join(codecs.names())}")
        return CodecCompressor(name)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *codecs.names()})


class Compression(metaclass=_Names):
    """Names for ``compression=``: ``none``, ``fp16``, ``bf16`` and every codec, such as ``int8`` or ``topk(0.01)``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def codec_of(compression: Any) -> Codec | None:
    """Return the codec of a compression, None for a pair of functions.

    Raises:
        ConfigError: it is neither.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigError(f"compression={compression!r}; expected hvd.Compression.none, .fp16, .int8, ...")
    codec: Codec | None = getattr(compression, "codec", None)
    return codec
