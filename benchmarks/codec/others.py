"""What stands beside the codecs in the tables: the same in operations of torch, and ZipNN."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.codec.rows import Row
from fusionlayer.codecs.zip import window_base


def torch_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and codes of the int4 preset, computed with torch operations, for comparison."""
    rotated = (x.view(-1, 32) @ _hadamard(x.device)).view(-1, 128)
    scale = rotated.abs().amax(1, keepdim=True) / 7
    codes = torch.round(rotated * (1 / scale)).nan_to_num_().to(torch.int8)
    return scale, (codes[:, :64] & 15) | (codes[:, 64:] << 4)


def torch_int4_decode(scale: Tensor, packed: Tensor) -> Tensor:
    """Return what ``torch_int4`` made, decoded with torch operations."""
    codes = torch.cat([packed << 4 >> 4, packed >> 4], 1).float()
    return (codes.view(-1, 32) @ _hadamard(packed.device)).view(-1, 128) * (scale / 32)


def torch_zip(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, three planes of bits and escapes of a bf16 tensor, computed with torch operations."""
    bits = x.view(torch.int16).int()
    exponent, byte = bits >> 7 & 255, (bits >> 8 & 128 | bits & 127).to(torch.uint8)
    code = exponent - (window_base(1.0) - 1)
    code = torch.where((code > 0) & (code < 8), code, 0)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    planes = torch.stack(
        [((code >> p & 1).to(torch.uint8).view(-1, 8) * weights).sum(1, dtype=torch.uint8) for p in range(3)]
    )
    return byte, planes, exponent[code == 0].to(torch.uint8)


def torch_zip_decode(byte: Tensor, planes: Tensor, escapes: Tensor) -> Tensor:
    """Return the bf16 tensor that ``torch_zip`` took apart, put together with torch operations."""
    shifts = torch.arange(8, dtype=torch.uint8, device=byte.device)
    bits = (planes.unsqueeze(-1) >> shifts & 1).view(3, -1).int()
    code = bits[0] + 2 * bits[1] + 4 * bits[2]
    exponent = code + (window_base(1.0) - 1)
    exponent[code == 0] = escapes.int()
    wide = byte.int()
    return ((wide & 128) << 8 | exponent << 7 | wide & 127).to(torch.int16).view(torch.bfloat16)


def torch_int4_rows(x: Tensor) -> Iterator[Row]:
    """Yield rows of the int4 preset in torch operations."""
    scale, packed = torch_int4(x)
    nbytes = x.nbytes + 4 * scale.numel() + packed.numel()
    yield Row("int4 in torch", "encode", "float32", nbytes, partial(torch_int4, x), waits=True)
    yield Row("int4 in torch", "decode", "float32", nbytes, partial(torch_int4_decode, scale, packed), waits=True)


def torch_zip_rows(x: Tensor) -> Iterator[Row]:
    """Yield rows of ``zip`` in torch operations and, on the CPU, of ZipNN."""
    parts = torch_zip(x)
    assert torch.equal(torch_zip_decode(*parts), x)
    nbytes = x.nbytes + sum(part.nbytes for part in parts)
    yield Row("zip in torch", "encode", "bfloat16", nbytes, partial(torch_zip, x), waits=True)
    yield Row("zip in torch", "decode", "bfloat16", nbytes, partial(torch_zip_decode, *parts), waits=True)
    if x.device.type == "cpu":
        yield from zipnn_rows(x)


def zipnn_rows(x: Tensor) -> Iterator[Row]:
    """Yield rows of ZipNN on one thread, for comparison; none where it is not installed."""
    try:
        from zipnn import ZipNN
    except ImportError:
        print("no rows of ZipNN: pip install zipnn safetensors zstandard", file=sys.stderr)
        return
    zipnn = ZipNN(input_format="torch", threads=1)
    payload = zipnn.compress(x.clone())
    assert torch.equal(zipnn.decompress(payload), x)
    dtype, nbytes = str(x.dtype).removeprefix("torch."), x.nbytes + len(payload)
    yield Row("ZipNN", "encode", dtype, nbytes, lambda: zipnn.compress(x), x.nbytes / len(payload))
    yield Row("ZipNN", "decode", dtype, nbytes, lambda: zipnn.decompress(payload))


def _hadamard(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device)
    while len(h) < 32:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h
