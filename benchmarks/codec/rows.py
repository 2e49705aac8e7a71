"""What is measured of the codecs: a row for each call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import truediv

import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.codecs import Codec
from fusionlayer.codecs.lossless.delta import Delta
from fusionlayer.codecs.research.dynamiq import DynamiQ
from fusionlayer.collectives.two_shot import summing
from fusionlayer.native import selection
from fusionlayer.native.wire import aligned
from fusionlayer.training.weights import Weights

FAN_IN = 8


@dataclass
class Row:
    """One thing that is measured: a call, the bytes it reads and writes, and of lossless ones bytes by bytes sent."""

    name: str
    verb: str
    dtype: str
    nbytes: int
    call: Callable[[], object] = field(repr=False)
    ratio: float | None = None
    waits: bool = False  # for the device, so that a graph cannot hold it
    seconds: list[float] = field(default_factory=list)

    def result(self, copy: Row, topk: Row | None = None) -> dict[str, object]:
        """Return rate, share of ``copy`` and how often faster than ``topk``, as numbers for a report."""
        rates = [self.nbytes / s / 1e9 for s in self.seconds]
        shares = [rate / (copy.nbytes / s / 1e9) for rate, s in zip(rates, copy.seconds, strict=True)]
        low, high = statistics.quantiles(shares, n=10)[0], statistics.quantiles(shares, n=10)[-1]
        return {
            "codec": self.name,
            "verb": self.verb,
            "dtype": self.dtype,
            "GB/s": round(statistics.median(rates), 2),
            "of memcpy": round(statistics.median(shares), 3),
            "p10": round(low, 3),
            "p90": round(high, 3),
            "ratio": "" if self.ratio is None else round(self.ratio, 3),
            "of topk": "" if topk is None else round(statistics.median(map(truediv, topk.seconds, self.seconds)), 1),
        }


def codec_rows(name: str, codec: Codec, x: Tensor) -> Iterator[Row]:
    """Yield a row for each verb; ``decode_sum`` and ``recode`` take FAN_IN messages of a FAN_IN-th of the elements."""
    numel, dtype = x.numel(), str(x.dtype).removeprefix("torch.")
    payload = torch.zeros(codec.wire(numel, x.dtype).capacity, dtype=torch.uint8, device=x.device)
    out = torch.zeros_like(x)
    codec.encode(x, payload)
    used = codec.used_bytes(payload, numel, x.dtype)
    ratio = x.nbytes / used if codec.zips else None
    waits = isinstance(codec, DynamiQ)  # the bits that it chooses by itself
    yield Row(name, "encode", dtype, x.nbytes + used, partial(codec.encode, x, payload), ratio, waits)
    yield Row(name, "decode", dtype, used + out.nbytes, partial(codec.decode, payload, out))
    yield Row(name, "decode_add", dtype, used + 2 * out.nbytes, partial(codec.decode_add, payload, out))
    part = numel // FAN_IN
    capacity = codec.wire(part, x.dtype).capacity
    payloads = torch.zeros(FAN_IN, capacity, dtype=torch.uint8, device=x.device)
    codec.encode_chunks(x, payloads, part)
    stride = codec.used_bytes(payloads[0], part, x.dtype)
    total = torch.zeros(part, device=x.device)
    sums = partial(codec.decode_sum, payloads, total, dtype=x.dtype)
    yield Row(name, f"decode_sum x{FAN_IN}", dtype, FAN_IN * stride + total.nbytes, sums)
    again = torch.zeros(capacity, dtype=torch.uint8, device=x.device)
    recode = partial(codec.recode, payloads, again, part, dtype=x.dtype)
    yield Row(name, f"recode x{FAN_IN}", dtype, (FAN_IN + 1) * stride, recode, waits=waits)
    rotated, _ = summing(codec)
    if rotated is not codec:  # what two_shot calls without error feedback
        recode = partial(rotated.recode, payloads, again, part, dtype=x.dtype)
        yield Row(name, f"recode x{FAN_IN}, rotated", dtype, (FAN_IN + 1) * stride, recode)
    if not codec.lossless:
        residual = torch.zeros(numel, device=x.device)
        fed = partial(codec.encode, x, payload, residual=residual)
        yield Row(name, "encode + feedback", dtype, x.nbytes + 2 * residual.nbytes + used, fed, waits=waits)


def dynamiq_rows(x: Tensor) -> Iterator[Row]:
    """Yield a row for each call that ``ring`` and ``butterfly`` make of ``dynamiq``, one of 4 ranks; bits are known."""
    numel, dtype = x.numel(), str(x.dtype).removeprefix("torch.")
    codec = fl.codecs.get("dynamiq").bare
    assert isinstance(codec, DynamiQ)
    given = codec._allocated(native.dynamiq_stats(x)[1], [-(-numel // codec.block)])
    codec = replace(codec, given=given, shared=1, place=(1, 4))
    first, second = torch.zeros(2, codec.wire(numel, x.dtype).capacity, dtype=torch.uint8, device=x.device)
    out, used = torch.zeros_like(x), first.nbytes
    codec.encode(x, first)
    yield Row("dynamiq, agreed", "stats", dtype, x.nbytes, partial(native.dynamiq_stats, x))
    yield Row("dynamiq, agreed", "encode", dtype, x.nbytes + used, partial(codec.encode, x, first))
    add = partial(codec.recode, first.unsqueeze(0), second, numel, dtype=x.dtype, x=x)
    yield Row("dynamiq, agreed", "add + recode", dtype, x.nbytes + 2 * used, add)
    yield Row("dynamiq, agreed", "decode", dtype, used + out.nbytes, partial(codec.decode, first, out))
    yield Row("dynamiq, agreed", "decode_add", dtype, used + 2 * out.nbytes, partial(codec.decode_add, first, out))


def two_level_rows(x: Tensor) -> Iterator[Row]:
    """Yield a row for each fused call of SDP4Bit: sums inside a node as messages between them, weight differences.

    Sums stay rotated, or are rotated back and again, as error feedback asks for.
    """
    numel, dtype = x.numel(), str(x.dtype).removeprefix("torch.")
    codec, part = fl.codecs.get("tlq_hs").bare, numel // FAN_IN
    payloads = torch.zeros(FAN_IN, codec.within.wire(part).capacity, dtype=torch.uint8, device=x.device)
    codec.within.encode_chunks(x, payloads, part)
    again = torch.zeros(codec.wire(part).capacity, dtype=torch.uint8, device=x.device)
    nbytes = payloads.nbytes + again.nbytes
    for name, source, target in (
        ("tlq_hs, within to between", codec.within.untransformed, codec.untransformed),
        ("the same, rotated back", codec.within, codec),
    ):
        recode = partial(target.recode, payloads, again, part, dtype=x.dtype, source=source)
        yield Row(name, f"recode x{FAN_IN}", dtype, nbytes, recode)
    differences, main = Weights.of("qwd").codec, x.float() + 1e-3
    payload, weights = torch.zeros(differences.wire(numel).capacity, dtype=torch.uint8, device=x.device), x.clone()
    read = main.nbytes + x.nbytes + payload.nbytes
    yield Row("qwd", "encode_difference", dtype, read, partial(differences.encode_difference, main, x, payload))
    apply = partial(differences.decode_add, payload, weights, dtype=torch.float32)
    yield Row("qwd", "decode_add", dtype, payload.nbytes + 2 * x.nbytes, apply)


def change_rows(x: Tensor) -> Iterator[Row]:
    """Yield rows of ``delta`` with a base: weights of standard deviation 0.02, and those a step of AdamW before.

    A step moves each weight in f32 by at most the learning rate, all amounts alike. Both tensors are read, or one is
    read and one written.
    """
    numel, dtype = x.numel(), str(x.dtype).removeprefix("torch.")
    codec, main = fl.codecs.get("delta").bare, 0.02 * x.float()
    assert isinstance(codec, Delta)
    draw = torch.rand(numel, generator=torch.Generator().manual_seed(1)).to(x.device)
    for lr in CHANGES:
        base, new = main.to(x.dtype), (main + lr * (2 * draw - 1)).to(x.dtype)
        payload = torch.zeros(codec.wire(numel, x.dtype).capacity, dtype=torch.uint8, device=x.device)
        codec.encode_change(new, base, payload)
        used, out = codec.used_bytes(payload, numel, x.dtype), torch.empty_like(x)
        name, nbytes, ratio = f"delta, lr {lr:g}", 2 * x.nbytes + used, x.nbytes / used
        yield Row(name, "encode_change", dtype, nbytes, partial(codec.encode_change, new, base, payload), ratio, True)
        yield Row(name, "apply_change", dtype, nbytes, partial(codec.apply_change, payload, base, out), waits=True)


CHANGES = (1e-3, 1e-4, 1e-5, 1e-6)


SPARSE_DENSITY = 0.01
SPARSE_MESSAGES = 8


def sparse_rows(x: Tensor) -> Iterator[Row]:
    """Yield a row for each sparse verb, and one for ``torch.topk`` of the magnitudes; they all read ``x`` (n,) f32.

    A message has the largest hundredth, its threshold is known. Encoding empties what there is to send, so a copy of
    that comes first, and its bytes count.
    """
    numel, name = x.numel(), "sparse"
    k = int(numel * SPARSE_DENSITY)
    acc, residual, out = x.clone(), torch.empty_like(x), torch.empty_like(x)
    magnitude, above = selection.kth_magnitude(x, k)
    ladder = [magnitude + (step << 18) for step in range(selection.MAX_THRESHOLDS)]

    def row(verb: str, nbytes: int, call: Callable[[], object], waits: bool = False) -> Row:
        return Row(name, verb, "float32", nbytes, call, waits=waits)

    largest = partial(_largest, x, k)
    yield Row("torch.topk", "abs, topk", "float32", x.nbytes, largest, waits=True)
    yield row("accumulate", 3 * x.nbytes, partial(selection.accumulate, x, 0.0, acc))
    yield row("magnitude_stats", x.nbytes, partial(selection.magnitude_stats, x), waits=True)
    yield row("count_above x1", x.nbytes, partial(selection.count_above, x, ladder[:1]), waits=True)
    yield row("count_above x16", x.nbytes, partial(selection.count_above, x, ladder), waits=True)
    yield row("kth_magnitude", x.nbytes, partial(selection.kth_magnitude, x, k), waits=True)
    yield row("choose_largest", x.nbytes, partial(selection.choose_largest, x, k))
    for form, kind in (
        ("bitmap", selection.SPARSE_BITMAP),
        ("byte", selection.SPARSE_BYTE),
        ("short", selection.SPARSE_SHORT),
    ):
        params = native.CodecParams(native.SPARSE, (kind, native.DTYPES[torch.float32], k))
        spec = params.spec(numel, torch.float32)
        counts, positions = numel // 256 * (kind == selection.SPARSE_BYTE), {0: numel // 8, 1: k, 2: 2 * k}[kind]
        offsets = [0, *accumulate(aligned(n) for n in (numel // 65536 * 4, counts, positions, 4 * k))]
        bodies = torch.zeros(SPARSE_MESSAGES, offsets[-1], dtype=torch.uint8, device=x.device)

        def encode(spec: libraries.Spec, offsets: list[int], body: Tensor, added: Tensor | None) -> None:
            residual.copy_(x)
            selection.sparse_encode(spec, offsets[:4], residual, magnitude, k - above, body, x=added, scale=0.0)

        encode(spec, offsets, bodies[0], None)
        bodies[1:] = bodies[0]
        read = offsets[-1] + 4 * x.nbytes
        yield row(f"encode, {form}", read, partial(encode, spec, offsets, bodies[0], None))
        yield row(f"add + encode, {form}", read + x.nbytes, partial(encode, spec, offsets, bodies[0], x))
        for count in (1, SPARSE_MESSAGES):
            sums = partial(native.decode_sum, spec, offsets[:4], bodies[:count], out, add=False)
            yield row(f"decode_sum x{count}, {form}", count * offsets[-1] + out.nbytes, sums)


def _largest(x: Tensor, k: int) -> object:
    return torch.topk(x.abs(), k, sorted=False)
