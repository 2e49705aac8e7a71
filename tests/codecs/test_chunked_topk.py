"""``chunked_topk``: bytes of an oracle in plain numpy, which elements go, how many bytes travel, what stays."""

import math

import numpy as np
import torch
from torch import Tensor

from fusionlayer.codecs import TensorState
from fusionlayer.codecs.sparse.chunked_topk import ChunkedTopK
from tests.loops import looped
from tests.synthetic import awkward, gradient
from tests.tiers import tiered

from .conformance import DTYPES, decoded, encoded

F32 = np.float32


def make(density: float = 1 / 64, bits: int = 2, chunk: int = 4096) -> ChunkedTopK:
    return ChunkedTopK(density, bits, chunk, header=False)


# ---- the oracle: bits as lists of 0 and 1 ---------------------------------------------------------------------------


def bf16(value: np.floating) -> int:
    """Return the bits of ``value``, to nearest even, but never those of infinity."""
    bits = int(torch.tensor(float(value)).bfloat16().view(torch.int16))
    return min(bits, 0x7F7F)


def of_bf16(bits: int) -> np.float32:
    return F32(torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().item())


def fields(numbers: list[int], width: int) -> list[int]:
    return [number >> place & 1 for number in numbers for place in range(width)]


def packed(bits: list[int]) -> bytes:
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def oracle(v: np.ndarray, kept: int, bits: int) -> tuple[bytes, bytes, bytes, np.ndarray]:
    """Return levels, positions and codes of one chunk ``v`` (n,) f32, and the values (n,) that they stand for."""
    size, magnitudes = v.size, np.abs(v)
    low = min(range(12, -1, -1), key=lambda low: kept * low + (size - 1 >> low))
    places = kept + (size - 1 >> low)
    nothing = bytes(-(-places // 8) + -(-kept * low // 8)), bytes(-(-kept * bits // 8))
    out = np.zeros(size, F32)
    if not np.isfinite(v).all():
        return np.array([0x7FC0, 0], "<u2").tobytes(), *nothing, np.full(size, np.nan, F32)
    if magnitudes.max() < 2.0**-100:
        return bytes(4), *nothing, out
    chosen = np.sort(np.argsort(-magnitudes, kind="stable")[:kept])
    sent = magnitudes[chosen]
    high = [0] * places
    for i, place in enumerate(chosen.tolist()):
        high[(place >> low) + i] = 1
    positions = packed(high) + packed(fields([place % (1 << low) for place in chosen.tolist()], low))
    if bits == 32:
        out[chosen] = v[chosen]
        return np.array([0x3F80, 0], "<u2").tobytes(), positions, v[chosen].tobytes(), out
    top = 2 ** (bits - 1) - 1
    least, most = sent.min(), sent.max()
    if bits == 2:
        units = np.rint(sent * (F32(2**20) / most)).astype(np.int64)
        above = units * kept > units.sum()
        unit = most * F32(2.0**-20)
        least = F32(units[~above].sum()) / F32((~above).sum()) * unit
        most = F32(units[above].sum()) / F32(above.sum()) * unit if above.any() else least
    first = bf16(least)
    step = F32(F32(most - of_bf16(first)) / F32(top))
    second = bf16(step) if step >= 2.0**-118 else 0
    inverse = F32(1) / of_bf16(second) if second else F32(0)
    levels = np.rint(np.clip((sent - of_bf16(first)) * inverse, 0, top)).astype(np.int64)
    codes = (levels | np.signbit(v[chosen]).astype(np.int64) << (bits - 1)).tolist()
    values = of_bf16(first) + levels.astype(F32) * of_bf16(second)
    out[chosen] = np.copysign(values, v[chosen])
    return np.array([first, second], "<u2").tobytes(), positions, packed(fields(codes, bits)), out


def by_the_oracle(codec: ChunkedTopK, wanted: Tensor) -> tuple[list[bytes], Tensor]:
    """Return the planes of a message of ``wanted`` (n,) f32, and what it decodes to."""
    planes, out = [b"", b"", b""], []
    k = max(1, math.floor(codec.density * codec.chunk))
    for part in wanted.split(codec.chunk):
        kept = max(1, k * part.numel() // codec.chunk)
        with np.errstate(all="ignore"):
            *parts, values = oracle(part.numpy(), kept, codec.bits)
        planes = [plane + part for plane, part in zip(planes, parts, strict=True)]
        out.append(torch.from_numpy(values))
    return planes, torch.cat(out)


GRID = [
    (density, bits, chunk)
    for density in (0.001, 1 / 64, 0.01, 0.3, 1.0)
    for bits in (2, 3, 4, 8, 32)
    for chunk in (64, 512, 4096)
]


@looped(
    "density, bits, chunk",
    tiered(GRID, lambda density, bits, chunk: (density, chunk) == (1 / 64, 4096) or (bits, chunk) == (3, 512)),
)
def test_bytes_are_those_of_the_oracle(density: float, bits: int, chunk: int) -> None:
    codec = make(density, bits, chunk)
    for i, n in enumerate((1, 2, 63, chunk - 1, chunk, 3 * chunk + 17, 9001)):
        for x in (gradient(n, i, DTYPES[i % 3]), awkward(n, 32, DTYPES[i % 3]), gradient(n, 7).sign() * 0.3):
            residual = gradient(n, 40 + i) * 0.1
            wanted, before = x.float() + residual, residual.clone()
            message = encoded(codec, x, residual=residual)
            planes, values = by_the_oracle(codec, wanted)
            for view, plane in zip(codec.wire(n, x.dtype).views(message), planes, strict=True):
                assert view.view(torch.uint8).numpy().tobytes() == plane
            got = decoded(codec, message, n, x.dtype, torch.float32)
            assert torch.equal(got.nan_to_num(nan=9.0), values.nan_to_num(nan=9.0))
            lost = wanted - values
            assert torch.equal(residual, torch.where(lost.isfinite(), lost, before))


# ---- what it promises -----------------------------------------------------------------------------------------------


@looped("bits", [2, 3, 4, 8, 32])
def test_feedback_loses_nothing(bits: int) -> None:
    """What was sent plus what stays is what was given; each value that goes is off by what its levels allow."""
    n, codec = 10_000, make(0.05, bits)
    state, given, sent = (
        TensorState(torch.zeros(n)),
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    for step in range(30):
        x = gradient(n, step)
        wanted = x * 0.25 + state.residual
        payload = torch.zeros(codec.wire(n).capacity, dtype=torch.uint8)
        codec.encode_tensor(x, payload, state, scale=0.25)
        out = decoded(codec, payload, n, torch.float32)
        assert torch.equal(state.residual, wanted - out) and int((out != 0).sum()) == codec.target(n)
        given += x * 0.25
        sent += out
        for values, target in zip(wanted.split(4096), out.split(4096), strict=True):
            went = target != 0
            smallest, largest = values[went].abs().min(), values.abs().max()
            assert smallest >= values[~went].abs().max()
            off = (values - target)[went].abs().max()
            if bits > 2:
                # Half a step, and what bf16 loses of the lowest level and of the step.
                bound = (largest - smallest) / (2 ** (bits - 1) - 1) * (0.5 + 2**bits / 1024) + smallest / 256
                assert off <= (bound if bits < 32 else 0)
    assert (sent + state.residual - given).abs().max() <= 30 * 2.0**-23


def test_a_chunk_that_is_not_finite_is_heard_and_forgotten() -> None:
    n, codec = 3 * 4096 + 5, make()
    x = gradient(n)
    before = gradient(n, 2) * 0.1
    for place in (4096, 8191, n - 1):
        residual, bad = before.clone(), x.clone()
        bad[place] = math.inf
        out = decoded(codec, encoded(codec, bad, residual=residual), n, torch.float32)
        chunk = slice(place // 4096 * 4096, min(n, place // 4096 * 4096 + 4096))
        assert out[chunk].isnan().all() and int(out.isnan().sum()) == chunk.stop - chunk.start
        assert torch.equal(residual[chunk], before[chunk])
