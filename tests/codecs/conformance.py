"""What every codec must do. ``CHECKS`` holds one function for each demand; all take (codec, dtype, device).

A codec registered anywhere is held to all of them by ``test_conformance.py``; a codec under development can be held to
them directly: ``for check in CHECKS.values(): check(codec, torch.float32, torch.device("cpu"))``.
"""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import Codec, Sparsifier, VariableSizeCodec, ZippedCodec
from fusionlayer.codecs.quantized.integer import Int
from fusionlayer.codecs.research.omnireduce import OmniReduce
from fusionlayer.codecs.research.taco import Taco
from fusionlayer.native.wire import ALIGN
from tests.synthetic import bit_patterns, gradient, noise

from . import arithmetic, block_reference, int_reference

Check = Callable[[Codec, torch.dtype, torch.device], None]
CHECKS: dict[str, Check] = {}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 31, 33, 128, 129, 1000, 1025)
GUARD = 0xC3


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# ---- helpers --------------------------------------------------------------------------------------------------------


def lengths(codec: Codec) -> list[int]:
    """Return ragged lengths around everything that could be a boundary."""
    block = codec.block
    return sorted({*LENGTHS, block - 1, block, block + 1, 2 * block + 5})


def forms(codec: Codec) -> list[tuple[Codec, int]]:
    """Return the lengths, each with the codec without header or with one, which moves all planes, by turns."""
    return [(codec.checked if i % 2 else codec.bare, n) for i, n in enumerate(lengths(codec))]


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def vnmse(x: Tensor, decoded: Tensor) -> float:
    """Return the squared error relative to the squared norm."""
    norm = x.double().square().sum().item()
    return (x.double() - decoded.double()).square().sum().item() / norm if norm else 0.0


def coarsest(codec: Codec) -> float:
    """Return the squared error, relative to the squared norm, that the codec may not exceed."""
    if isinstance(codec, Int) and codec.bits < 4:  # test_int.py has the error of normal values
        return 4.0 if codec.unbiased else 1.0
    return 1.0 if codec.needs_feedback or isinstance(codec, OmniReduce) else 0.25


def blank(codec: Codec, numel: int, dtype: torch.dtype, device: torch.device, fill: int = 0) -> Tensor:
    return torch.full((codec.wire(numel, dtype).capacity,), fill, dtype=torch.uint8, device=device)


def encoded(
    codec: Codec, x: Tensor, *, seed: int = 0, offset: int = 0, residual: Tensor | None = None, fill: int = 0
) -> Tensor:
    """Return ``x`` as a message in a buffer that was full of ``fill``."""
    payload = blank(codec, x.numel(), x.dtype, x.device, fill)
    codec.encode(x, payload, seed=seed, offset=offset, residual=residual)
    return payload


def decoded(
    codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values of a message, in ``out_dtype`` (default: what was encoded)."""
    out = torch.full((numel,), 7.0, dtype=out_dtype or dtype, device=payload.device)
    codec.decode(payload, out, dtype=dtype)
    return out


def planes(codec: Codec, payload: Tensor, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the bytes that mean something, plane by plane; where data decides how many, all of them in one piece."""
    if isinstance(codec, ZippedCodec):
        return [codec.compact(payload, numel, dtype)[codec.wire(numel, dtype).body :]]
    return [view.view(torch.uint8) for view in codec.wire(numel, dtype).views(payload)]


def same_message(codec: Codec, a: Tensor, b: Tensor, numel: int, dtype: torch.dtype) -> bool:
    return all(map(torch.equal, planes(codec, a, numel, dtype), planes(codec, b, numel, dtype)))


def rows(codec: Codec, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (count, capacity) messages of tensors so different in size that the order of their sum shows."""
    tensors = [gradient(numel, i, dtype, device) * 2.0**exponent for i, exponent in enumerate((14, 0, -9, 3, -5))]
    return torch.stack([encoded(codec, x, seed=i) for i, x in enumerate(tensors[:count])])


def f32_sum(codec: Codec, messages: Tensor, numel: int, dtype: torch.dtype, first: Tensor | None = None) -> Tensor:
    """Return first + message 0 + message 1 + ..., added in this order in f32; rotated ones have a sum of their own."""
    total = torch.zeros(numel, device=messages.device) if first is None else first.float()
    if isinstance(codec, Int | Taco) and codec.hadamard and total.numel() and len(messages):
        return total + rotated_sum(codec, messages, numel, dtype).to(total.device)
    for message in messages:
        total = total + decoded(codec, message, numel, dtype, torch.float32)
    return total


def rotated_sum(codec: Int | Taco, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of messages that is made of rotated values, in numpy."""
    total = np.zeros(1, np.float32)
    with np.errstate(all="ignore"):
        for message in messages.cpu():
            scales, codes = (view.numpy() for view in codec.wire(numel, dtype).views(message))
            if isinstance(codec, Int):
                total = total + int_reference.summands(codec, scales, codes)
            else:
                total = total + block_reference.summands(codec, scales.view(np.uint8), codes)
        total = int_reference.hadamard32(total) if isinstance(codec, Int) else arithmetic.hadamard(total)
    return torch.from_numpy(total.reshape(-1)[:numel])


# ---- layout ---------------------------------------------------------------------------------------------------------


@check
def layout_is_aligned_and_complete(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each, n in forms(codec):
        form = each.wire(n, dtype)
        payload = each.compress(gradient(n, 0, dtype, device))
        assert payload.shape == (form.capacity,) and payload.dtype == torch.uint8
        assert form.capacity % codec.align == 0
        assert form.body == (ALIGN if each.header else 0)
        end = form.body
        for section, view in zip(form.sections, form.views(payload), strict=True):
            assert section.offset % codec.align == 0 and section.offset >= end
            assert (view.numel(), view.dtype) == (section.plane.count, section.plane.dtype)
            end = section.offset + section.plane.nbytes
        assert end <= form.capacity
        used = each.used_bytes(payload, n, dtype)
        assert used <= form.capacity if isinstance(each, VariableSizeCodec) else used == form.capacity


@check
def what_travels_is_enough(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each, n in forms(codec):
        if not isinstance(each, VariableSizeCodec):
            continue
        payload = each.compress(gradient(n, 53, dtype, device))
        data = each.compact(payload, n, dtype)
        assert data.numel() == each.used_bytes(payload, n, dtype)
        back = torch.full_like(payload, GUARD)
        each.expand(data.clone(), back, n, dtype)
        assert torch.equal(back, payload)
        for wrong in (data[:-1], data[:0], torch.cat([data, data[:1]])):
            if wrong.numel() != data.numel():
                with pytest.raises(WireError):
                    each.expand(wrong, back, n, dtype)


# ---- values ---------------------------------------------------------------------------------------------------------


@check
def round_trip_keeps_values(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each, n in forms(codec):
        x = gradient(n, 1, dtype, device)
        out = decoded(each, encoded(each, x), n, dtype)
        assert same_bits(out, x) if each.lossless else vnmse(x, out) <= coarsest(codec)


@check
def lossless_means_every_bit_pattern(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    if not codec.lossless:
        return
    x = bit_patterns(dtype, device)
    assert same_bits(decoded(codec, encoded(codec, x), x.numel(), dtype), x)


@check
def any_shape_comes_back(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    x = gradient(6 * 35, 2, dtype, device).view(6, 5, 7).transpose(0, 2)
    out = codec.decompress(codec.compress(x), x.shape, dtype)
    assert out.shape == x.shape and vnmse(x, out) <= coarsest(codec)
    scalar = torch.tensor(0.5, dtype=dtype, device=device)
    assert codec.decompress(codec.compress(scalar), (), dtype).shape == ()


@check
def zeros_stay_zeros(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for n in lengths(codec):
        zeros = torch.zeros(n, dtype=dtype, device=device)
        assert same_bits(decoded(codec, encoded(codec, zeros, seed=5), n, dtype), zeros)
        if not isinstance(codec, Sparsifier):  # the seed may decide which of the zeros are sent
            assert same_message(codec, encoded(codec, zeros, seed=5), encoded(codec, zeros, seed=6), n, dtype)


@check
def non_finite_values_surface_and_stay_in_their_block(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n = 3 * codec.block + 17
    x = gradient(n, 3, dtype, device)
    for position in (0, codec.block, n - 1):
        for value in (float("nan"), float("inf"), float("-inf")):
            bad = x.clone()
            bad[position] = value
            payload = encoded(codec, bad)
            out = decoded(codec, payload, n, dtype)
            assert not out[position].isfinite()
            total = torch.zeros_like(out)
            codec.decode_sum(torch.stack([encoded(codec, x), payload]), total)
            assert not total[position].isfinite()
            if isinstance(codec, Sparsifier):  # what is sent of the others changes
                out[position] = 0
                assert out.isfinite().all()
            if not codec.local:
                continue
            good = decoded(codec, encoded(codec, x), n, dtype)
            start = position - position % codec.block
            outside = [slice(0, start), slice(start + codec.block, n)]
            assert all(same_bits(out[part], good[part]) for part in outside)


@check
def tiny_values_stay_tiny(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    info = torch.finfo(dtype)
    for scale in (info.smallest_normal, info.smallest_normal * 2.0**-4):
        x = (gradient(1000, 4).double() * scale).to(dtype).to(device)
        out = decoded(codec, encoded(codec, x), 1000, dtype)
        assert same_bits(out, x) if codec.lossless else out.abs().max() <= 2 * x.abs().max()


# ---- bytes ----------------------------------------------------------------------------------------------------------


@check
def equal_input_makes_equal_bytes(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    twin = type(codec)(**codec.options, header=codec.header)
    assert twin == codec and str(twin) == str(codec)
    for n in lengths(codec):
        x = gradient(n, 5, dtype, device)
        first = encoded(codec, x, seed=9)
        assert torch.equal(first, encoded(codec, x, seed=9))
        assert torch.equal(first, encoded(twin, x.clone(), seed=9))


@check
def stale_buffers_leave_no_trace(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    codec = codec.bare
    for n in lengths(codec):
        x = gradient(n, 6, dtype, device)
        clean = encoded(codec, x, seed=3)
        for fill in (0xFF, 0xA5):
            payload = encoded(codec, x, seed=3, fill=fill)
            assert same_message(codec, payload, clean, n, dtype)
            for plane in codec.wire(n, dtype).views(payload):
                plane.view(torch.uint8).fill_(fill)
            assert (payload == fill).all(), "bytes between the planes were written"


@check
def nothing_is_written_outside(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each, n in forms(codec):
        x = gradient(n, 7, dtype, device)
        kept, residual = x.clone(), torch.zeros(n + 64, device=device)
        capacity = each.wire(n, dtype).capacity
        buffer = torch.full((capacity + 2 * ALIGN,), GUARD, dtype=torch.uint8, device=device)
        payload = buffer[ALIGN : ALIGN + capacity]
        each.encode(x, payload, residual=residual[32 : 32 + n])
        assert same_bits(x, kept)
        assert not residual[:32].any() and not residual[32 + n :].any()
        sent = payload.clone()
        out = torch.full((n + 64,), 3.0, dtype=dtype, device=device)
        each.decode(payload, out[32 : 32 + n])
        each.decode_add(payload, out[32 : 32 + n])
        each.decode_sum(payload.unsqueeze(0), out[32 : 32 + n])
        assert torch.equal(payload, sent)
        assert (out[:32] == 3).all() and (out[32 + n :] == 3).all()
        target = torch.full((capacity + 2 * ALIGN,), GUARD, dtype=torch.uint8, device=device)
        each.recode(payload.unsqueeze(0), target[ALIGN : ALIGN + capacity], n, dtype=dtype)
        for guarded in (buffer, target):
            assert (guarded[:ALIGN] == GUARD).all() and (guarded[ALIGN + capacity :] == GUARD).all()


@check
def the_callers_float_environment_changes_nothing(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    x = gradient(1000, 8, torch.float32) * 2.0**-126
    x[::3] = gradient(334, 9)
    x = x.to(device=device, dtype=dtype)
    expected = encoded(codec, x), decoded(codec, encoded(codec, x), 1000, dtype)
    torch.set_flush_denormal(True)
    try:
        payload = encoded(codec, x)
        out = decoded(codec, payload, 1000, dtype)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(payload, expected[0])
    assert same_bits(out, expected[1])


# ---- sums -----------------------------------------------------------------------------------------------------------


@check
def sums_run_in_row_order_in_f32(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each, n in forms(codec):
        every, start = rows(each, 5, n, dtype, device), gradient(n, 10, dtype, device)
        for messages in (every[:0], every[:1], every):
            out = torch.full((n,), 9.0, dtype=dtype, device=device)
            each.decode_sum(messages, out)
            assert same_bits(out, f32_sum(each, messages, n, dtype).to(dtype))
            out.copy_(start)
            each.decode_sum(messages, out, add=True)
            assert same_bits(out, f32_sum(each, messages, n, dtype, start).to(dtype))
        out.copy_(start)
        each.decode_add(every[0], out)
        assert same_bits(out, f32_sum(each, every[:1], n, dtype, start).to(dtype))


@check
def messages_decode_into_any_type(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n = 1000
    payload = encoded(codec, gradient(n, 11, dtype, device))
    wide = decoded(codec, payload, n, dtype, torch.float32)
    for other in DTYPES:
        assert same_bits(decoded(codec, payload, n, dtype, other), wide.to(other))
        total = torch.zeros(n, dtype=other, device=device)
        codec.decode_sum(payload.unsqueeze(0), total, dtype=dtype)
        assert torch.equal(total, wide.to(other))


@check
def recode_encodes_the_sum(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    """The sum that recode encodes stays in f32; so does x + residual in encode, which makes the reference."""
    for each, n in forms(codec):
        zeros = torch.zeros(n, dtype=dtype, device=device)
        every = rows(each, 3, n, dtype, device)
        for messages in (every[:1], every):
            for x in (None, gradient(n, 12, dtype, device)):
                total = f32_sum(each, messages, n, dtype, x)
                payload = blank(each, n, dtype, device)
                each.recode(messages, payload, n, dtype=dtype, x=x, seed=4, offset=2 * each.block)
                expected = encoded(each, zeros, seed=4, offset=2 * each.block, residual=total.clone())
                assert same_message(each, payload, expected, n, dtype)
                if dtype is torch.float32:
                    again = encoded(each, total, seed=4, offset=2 * each.block)
                    assert same_message(each, payload, again, n, dtype)


@check
def recode_keeps_what_it_loses(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n = 2 * codec.block + 41
    messages = rows(codec, 3, n, dtype, device)
    residual = gradient(n, 13).to(device) * 0.01
    wanted = f32_sum(codec, messages, n, dtype) + residual
    payload = blank(codec, n, dtype, device)
    codec.recode(messages, payload, n, dtype=dtype, residual=residual, seed=4)
    assert torch.equal(residual, wanted - decoded(codec, payload, n, dtype, torch.float32))


@check
def rows_are_recoded_one_by_one(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    """Four rows of three summands each, places in any order; a row between those that are recoded stays as it is."""
    n = codec.block + 41
    apart = -(-n // codec.block) * codec.block
    starts = [step * apart for step in (3, 0, 1)]
    for each in (codec.bare, codec.checked):
        summands = torch.stack([rows(each, 5, n, dtype, device).roll(row, 0)[:3] for row in range(4)], 1)
        for residual in (None, gradient(4 * apart, 13).to(device) * 0.01):
            got, wanted = (torch.full_like(summands[0], 0xA5) for _ in range(2))
            kept, left = (None if residual is None else residual.clone() for _ in range(2))
            each.recode_rows(summands[:, 1:], got[1:], n, starts, dtype=dtype, seed=4, residual=kept)
            for row, start in enumerate(starts, 1):
                part = None if left is None else left[start : start + n]
                each.recode(summands[:, row], wanted[row], n, dtype=dtype, seed=4, offset=start, residual=part)
            assert torch.equal(got, wanted)
            assert kept is None or left is None or same_bits(kept, left)
            if kept is not None:
                with pytest.raises(ConfigError, match="residual of .* elements; expected at least"):
                    each.recode_rows(
                        summands[:, 1:], got[1:], n, starts, dtype=dtype, residual=kept[: apart * 3 + n - 1]
                    )


# ---- pieces ---------------------------------------------------------------------------------------------------------


@check
def chunks_are_messages_of_their_own(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    for each in (codec.bare, codec.checked):
        for pieces, n in ((1, each.block), (3, 3 * each.block), (4, 3 * each.block + 1), (3, 2 * each.block + 7)):
            chunk = each.block * max(1, -(-n // (3 * each.block)))
            capacity = each.wire(chunk, dtype).capacity
            x, residual = gradient(n, 14, dtype, device), gradient(n, 15).to(device) * 0.01
            kept = residual.clone()
            payloads = torch.full((pieces + 1, capacity), GUARD, dtype=torch.uint8, device=device)
            each.encode_chunks(x, payloads, chunk, seed=6, offset=each.block, residual=residual)
            out = torch.empty_like(x)
            each.decode_chunks(payloads, out, chunk)
            count = -(-n // chunk)
            for i in range(count):
                part = slice(i * chunk, min((i + 1) * chunk, n))
                own = encoded(each, x[part], seed=6, offset=each.block + i * chunk, residual=kept[part])
                numel = part.stop - part.start
                assert same_message(each, payloads[i], own, numel, dtype)
                assert same_bits(out[part], decoded(each, own, numel, dtype))
            assert same_bits(residual, kept)
            assert (payloads[count:] == GUARD).all(), "a row without elements was written"


@check
def blocks_do_not_know_their_neighbours(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    """What an element becomes depends on its block and its number, not on the cut into messages."""
    if not codec.local:  # the elements of a message compete, or share a scale
        return
    n = 4 * codec.block + 9
    x = gradient(n, 16, dtype, device)
    whole = decoded(codec, encoded(codec, x, seed=8), n, dtype)
    for start in (codec.block, 3 * codec.block):
        tail = decoded(codec, encoded(codec, x[start:], seed=8, offset=start), n - start, dtype)
        assert same_bits(tail, whole[start:])


# ---- seeds ----------------------------------------------------------------------------------------------------------


@check
def noise_comes_from_seed_and_position(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    if codec.lossless or not codec.unbiased:
        return
    x = gradient(4 * codec.block, 17, dtype, device)
    messages = [encoded(codec, x, seed=seed) for seed in (0, 1, 1 << 40, (1 << 64) - 1)]
    messages.append(encoded(codec, x, offset=codec.block))
    assert len({bytes(message.tolist()) for message in messages}) == len(messages)


@check
def unbiased_means_errors_cancel(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    if codec.lossless or not codec.unbiased:
        return
    draws, x = 200, gradient(1 << 14, 18, dtype, device)
    total, single = torch.zeros(x.numel(), dtype=torch.float64, device=device), 0.0
    for draw in range(draws):
        payload = encoded(codec, x, seed=derive_seed(draw, 3))
        out = decoded(codec, payload, x.numel(), dtype, torch.float32)
        single += vnmse(x, out) / draws
        total += out
    assert vnmse(x, total / draws) < 1.3 * single / draws


# ---- error feedback -------------------------------------------------------------------------------------------------


@check
def error_feedback_telescopes(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n, steps = 2 * codec.block + 100, 20
    residual = torch.zeros(n, device=device)
    given, sent = torch.zeros(n, dtype=torch.float64, device=device), torch.zeros(n, dtype=torch.float64, device=device)
    for step in range(steps):
        x = gradient(n, 20 + step, dtype, device)
        wanted = x.float() + residual
        out = decoded(codec, encoded(codec, x, seed=step, residual=residual), n, dtype, torch.float32)
        assert torch.equal(residual, wanted - out)
        given += x
        sent += out
    assert (sent + residual - given).abs().max() <= steps * 2.0**-23


@check
def error_feedback_survives_non_finite_steps(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n = 2 * codec.block + 100
    for value in (float("nan"), float("inf"), torch.finfo(dtype).max):
        x = gradient(n, 41, dtype, device)
        x[codec.block + 1] = value
        before = gradient(n, 42).to(device) * 0.01
        residual = before.clone()
        out = decoded(codec, encoded(codec, x, residual=residual), n, dtype, torch.float32)
        assert residual.isfinite().all()
        kept = ~out.isfinite()
        left = torch.zeros_like(before) if isinstance(codec, Sparsifier) else before
        assert torch.equal(residual[kept], left[kept])


# ---- damage ---------------------------------------------------------------------------------------------------------


@check
def damage_is_noticed(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    codec = codec.checked
    n = codec.block + 5
    payload = encoded(codec, gradient(n, 50, dtype, device))
    body = range(ALIGN, payload.numel(), max(1, (payload.numel() - ALIGN) // 61))
    for position in (*range(ALIGN), *body, payload.numel() - 1):
        damaged = payload.clone()
        damaged[position] ^= 1 << position % 8
        with pytest.raises(WireError):
            decoded(codec, damaged, n, dtype)
    damaged = payload.clone()
    damaged[ALIGN] ^= 0x10
    out = torch.full((n,), 3.0, dtype=dtype, device=device)
    for verb in (
        lambda: codec.decode_add(damaged, out),
        lambda: codec.decode_sum(torch.stack([payload, damaged]), out),
        lambda: codec.decode_chunks(damaged.unsqueeze(0), out, n),
        lambda: codec.recode(damaged.unsqueeze(0), payload, n, dtype=dtype),
    ):
        with pytest.raises(WireError):
            verb()
    assert (out == 3).all(), "a damaged message was decoded"


@check
def messages_of_others_are_refused(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    codec = codec.checked
    n = codec.block + 5
    payload = encoded(codec, gradient(n, 51, dtype, device))
    for cut in (0, 1, ALIGN - 1, ALIGN, payload.numel() - ALIGN, payload.numel() - 1):
        with pytest.raises(WireError):
            decoded(codec, payload[:cut].clone(), n, dtype)
    for numel in (n - 1, n + 1, codec.block, 2 * n + ALIGN):
        with pytest.raises(WireError):
            decoded(codec, payload, numel, dtype)
    for other in DTYPES:
        if other is not dtype:
            with pytest.raises(WireError):
                decoded(codec, payload, n, other)
    with pytest.raises(WireError):
        decoded(codec, codec.bare.compress(gradient(n, 51, dtype, device)), n, dtype)


@check
def garbage_does_no_harm(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    codec = codec.bare
    n = 2 * codec.block + 5
    for stream in range(3):
        payload = noise(codec.wire(n, dtype).capacity, stream).to(device)
        guarded = torch.full((n + 64,), 3.0, dtype=dtype, device=device)
        out = guarded[32 : 32 + n]
        target = torch.full((payload.numel() + ALIGN,), GUARD, dtype=torch.uint8, device=device)
        with suppress(WireError):
            codec.decode(payload, out)
        with suppress(WireError):
            codec.decode_add(payload, out)
        with suppress(WireError):
            codec.decode_sum(torch.stack([payload, payload]), out)
        with suppress(WireError):
            codec.recode(payload.unsqueeze(0), target[:-ALIGN], n, dtype=dtype)
        assert (guarded[:32] == 3).all() and (guarded[32 + n :] == 3).all()
        assert (target[-ALIGN:] == GUARD).all()


@check
def wrong_arguments_are_refused(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    n = codec.block + 3
    x = gradient(n, 52, dtype, device)
    payload = encoded(codec, x)
    for refused in (x.double(), x.int(), x.view(1, -1), gradient(2 * n, 52, dtype, device)[::2]):
        with pytest.raises(ConfigError):
            codec.encode(refused, payload)
        with pytest.raises(ConfigError):
            codec.decode(payload, refused)
    for wrong in (payload[:-1], payload[: -2 * ALIGN], torch.cat([payload, payload]), payload.view(torch.int8)):
        with pytest.raises(WireError):
            codec.encode(x, wrong)
    with pytest.raises(ConfigError):
        codec.wire(-1, dtype)
    with pytest.raises(ConfigError):
        codec.wire(1, torch.float64)
