"""The CUDA kernels, compiled for the CPU (see cuda_on_host/), write the bytes that the CPU core writes."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fusionlayer import native
from fusionlayer.codecs.lossless.zip import Zip
from fusionlayer.native import libraries
from tests.loops import looped
from tests.native.abi import (
    BF16,
    F16,
    F32,
    FULL,
    GUARD,
    HADAMARD,
    LENGTHS,
    STOCHASTIC,
    Area,
    Case,
    Planes,
    Run,
    assert_same,
    block_case,
    block_cases,
    cast_case,
    chunked_case,
    dynamiq_case,
    hostile_cases,
    int_case,
    onebit_case,
    qsdp_case,
    results,
    tah_case,
    thc_case,
    zip_case,
)
from tests.synthetic import gradient
from tests.tiers import tiered

pytestmark = pytest.mark.short

Check = Callable[..., None]


@pytest.fixture
def check(kernels: ctypes.CDLL) -> Check:
    """Compares all verbs of the kernels and the CPU core."""

    def compare(case: Case, garbage: bool = False, exponent: int | None = None) -> None:
        libraries = kernels, native.cpu()
        got, want = (results(library, case, native.cpu(), garbage, exponent) for library in libraries)
        assert_same(got, want, case)

    return compare


def varied(cases: Iterable[Case]) -> Iterator[Case]:
    """Give neighbouring cases different dtypes, message counts and alignments."""
    for i, case in enumerate(cases):
        yield replace(case, dtype=i % 3, count=(1, 3, 0, 2, 5)[i % 5], misaligned=i % 7 == 3)


GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # a warp has part of a group, one, or several tiles of one


@looped(
    "group, bits, flags",
    tiered(
        [
            *itertools.product(GROUPS, (2, 3, 4, 8), (0, HADAMARD, STOCHASTIC, HADAMARD | STOCHASTIC)),
            *itertools.product((32, 512, 4096), (4, 8), (FULL,)),
        ],
        lambda group, bits, flags: (
            (bits == 4 and flags != FULL) or group in ((32, 128, 4096) if bits == 8 else (64, 2048))
        ),
    ),
)
def test_int_writes_the_bytes_of_the_cpu_core(check: Check, group: int, bits: int, flags: int) -> None:
    start = int_case(bits, group, flags, offset=group * 3)
    lengths = (*LENGTHS[(bits + bits // 8 + flags) % 2 :: 2], group - 1, group + 1, 2 * group + 5)
    for case in varied(replace(start, numel=numel) for numel in lengths):
        check(case)


def test_hostile_scales_are_decoded_as_by_the_cpu_core(check: Check) -> None:
    """Here a multiply-add is fused; the baseline of the CPU has none."""
    native.select_isa("baseline")
    try:
        for case, exponent in hostile_cases():
            check(case, garbage=True, exponent=exponent)
    finally:
        native.select_isa("auto")


@looped("flags", [0, STOCHASTIC, HADAMARD])
@looped("bits", [2, 3, 4, 8])
def test_fused_verbs_write_the_bytes_of_the_cpu_core(kernels: ctypes.CDLL, bits: int, flags: int) -> None:
    """Groups of source and target lie differently in a warp: smaller, larger, several tiles long."""
    groups = itertools.product((32, 128, 4096), (32, 512, 2048))
    for i, (group, source_group) in enumerate(groups):
        numel = (1, 1000, 4097, 9_001)[i % 4]
        widths = ((8, 4), (3, 2))[i % 2]
        sources = [(width, source_group, HADAMARD * ((i + j) % 2)) for j, width in enumerate(widths)]
        target = native.CodecParams(native.INT, (bits, group, flags)).spec(numel, torch.float32, 7, 3 * group)
        for source_bits, _, source_flags in sources:
            source = native.CodecParams(native.INT, (source_bits, source_group, source_flags)).spec(
                numel, torch.float32
            )
            given, results = int_planes(source, source_bits, source_group, 3), []
            x = torch.stack([gradient(numel, m) * 2.0 ** (5 * m) for m in range(3)])
            assert native.cpu().fl_encode(source, x.data_ptr(), None, given[1], None) == 0
            for library in (kernels, native.cpu()):
                for residual in (None, gradient(numel, 9)):
                    out, messages = int_planes(target, bits, group, 1)
                    pointer = None if residual is None else residual.data_ptr()
                    assert library.fl_recode_from(source, given[1], target, pointer, messages, None) == 0
                    results.append((out, residual))
            for got, want in zip(results[:2], results[2:], strict=True):
                assert torch.equal(got[0], want[0])
                assert got[1] is None or torch.equal(got[1].view(torch.int32), want[1].view(torch.int32))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            spec = native.CodecParams(native.INT, (bits, group, flags)).spec(numel, dtype, 7, 3 * group)
            x, base, two = gradient(2 * numel, 1), gradient(2 * numel, 2, dtype), []
            for library in (kernels, native.cpu()):
                out, messages = int_planes(spec, bits, group, 2)
                assert library.fl_encode_difference(spec, x.data_ptr(), base.data_ptr(), messages, None) == 0
                two.append(out)
            assert torch.equal(*two)


def int_planes(spec: native.Spec, bits: int, group: int, count: int) -> tuple[torch.Tensor, native.Messages]:
    """Return memory for messages of the int codec, and where their planes lie in it."""
    groups = -(-spec.numel // group)
    codes, nbytes = -(-4 * groups // 16) * 16, -(-groups * group * bits // 128) * 16
    rows = torch.full((count, codes + nbytes), GUARD, dtype=torch.uint8)
    planes = (ctypes.c_void_p * native.MAX_PLANES)(rows.data_ptr(), rows.data_ptr() + codes)
    return rows, native.Messages(planes, rows.stride(0), count)


@looped("wire", [F32, BF16, F16])
@looped("dtype", [F32, BF16, F16])
def test_cast_writes_the_bytes_of_the_cpu_core(check: Check, dtype: int, wire: int) -> None:
    start = cast_case(wire)
    for case in varied(replace(start, numel=numel) for numel in (*LENGTHS, 511, 512, 513, 3000)):
        check(replace(case, dtype=dtype))


@looped("number", native.FORMATS)
def test_block_writes_the_bytes_of_the_cpu_core(check: Check, number: str) -> None:
    starts = [case for case in block_cases() if case.param[0] == native.FORMATS[number]]
    lengths = itertools.cycle((*LENGTHS, 2000))
    for case in varied(replace(start, numel=next(lengths)) for start in starts for _ in range(3)):
        check(case)


def test_what_lies_between_two_numbers_of_4_bits_is_rounded_as_by_the_cpu_core(kernels: ctypes.CDLL) -> None:
    """Multiples of 1/16 up to the largest number, with all that lie in the middle, and their neighbours in f32."""
    exact = torch.arange(-96, 97) / 16
    x = torch.cat([exact, exact.nextafter(torch.tensor(9.0)), exact.nextafter(torch.tensor(-9.0))])
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=6.0)  # which makes the scale 1
    spec = block_case("e2m1", 32, native.SCALE_E8M0, numel=blocks.numel()).spec
    made = []
    for library in (kernels, native.cpu()):
        out = torch.full((1, 16 + blocks.numel()), GUARD, dtype=torch.uint8)
        planes = (ctypes.c_void_p * native.MAX_PLANES)(out.data_ptr(), out.data_ptr() + 32)
        messages = native.Messages(planes, out.stride(0), 1)
        assert library.fl_encode(ctypes.byref(spec), blocks.data_ptr(), None, ctypes.byref(messages), None) == 0
        made.append(out)
    assert torch.equal(*made)
    assert (made[0][0, : len(blocks)] == 127).all(), "the scale of a block is not 1"


@looped("flags", [0, native.DYNAMIQ_FLAT])
def test_dynamiq_writes_the_bytes_of_the_cpu_core(check: Check, flags: int) -> None:
    epsilons = itertools.cycle([(2700, 610), (0, 0), (3300, 700), (500, 200)])
    lengths = (*LENGTHS, 511, 2000, 64 * 256 + 1)
    starts = (dynamiq_case(flags, (i, i + 1), next(epsilons), numel, offset=256 * i) for i, numel in enumerate(lengths))
    for case in varied(starts):
        check(case)
    check(dynamiq_case(flags, (1, 3), numel=2999, count=2), garbage=True)
    check(dynamiq_case(flags, (1, 3), numel=5000, count=40))
    check(dynamiq_case(flags, (1, 3), numel=140_000, dtype=BF16))


def test_dynamiq_encodes_several_super_groups_in_turn_as_the_cpu_core_does(kernels: ctypes.CDLL) -> None:
    """So many that a warp takes one after another, while the next is on its way."""
    case = dynamiq_case(0, (1, 3), numel=((1 << 14) + 3) * 256 - 5, dtype=BF16)
    got, want = (Run(library, case, native.cpu()).encode(residual=False) for library in (kernels, native.cpu()))
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one, other)


def test_statistics_of_super_groups_are_those_of_the_cpu_core(kernels: ctypes.CDLL) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in (1, 255, 256, 1000, 70_001):
            x, residual = gradient(numel, 1, dtype), gradient(numel, 2)
            for kept in (None, residual):
                want = torch.stack(native.dynamiq_stats(x, kept))
                got = torch.empty_like(want)
                pointers = x.data_ptr(), None if kept is None else kept.data_ptr(), numel
                outputs = got[0].data_ptr(), got[1].data_ptr(), None
                assert kernels.fl_dynamiq_stats(native.DTYPES[dtype], *pointers, *outputs) == 0
                assert torch.equal(got, want)


@looped("bits", [2, 3, 4, 8, 32])
def test_chunked_topk_writes_the_bytes_of_the_cpu_core(check: Check, bits: int) -> None:
    shapes = itertools.cycle([(4096, 64), (4096, 1), (512, 100), (64, 64), (256, 3), (4096, 4096)])
    starts = (chunked_case(bits, *next(shapes), 0.5 * (i % 2)) for i, _ in enumerate(LENGTHS))
    lengths = (*LENGTHS[1:], 9001)
    for case in varied(replace(start, numel=numel) for start, numel in zip(starts, lengths, strict=True)):
        check(case)
    check(chunked_case(bits, numel=9001, count=2), garbage=True)
    check(chunked_case(bits, 64, 5, numel=20_000, count=3))


@looped("group", GROUPS)
def test_onebit_writes_the_bytes_of_the_cpu_core(check: Check, group: int) -> None:
    lengths = (*LENGTHS[group.bit_length() % 2 :: 2], group - 1, group + 1, 2 * group + 5)
    for case in varied(onebit_case(group, numel=numel) for numel in lengths):
        check(case)
    check(onebit_case(group, numel=4999, count=2), garbage=True)


@looped("flags", [0, native.QSDP_STOCHASTIC])
@looped("bits", [4, 8])
@looped("group", [32, 64, 256, 1024])
def test_qsdp_writes_the_bytes_of_the_cpu_core(check: Check, group: int, bits: int, flags: int) -> None:
    lengths = (*LENGTHS[group.bit_length() % 2 :: 2], group - 1, group + 1, 2 * group + 5)
    start = qsdp_case(bits, group, flags, offset=group * (1 << 31))
    for case in varied(replace(start, numel=numel) for numel in lengths):
        check(case)
    check(replace(start, numel=2999, count=2), garbage=True)


@looped("choice", [native.ZIP_AUTO, native.ZIP_WINDOW, native.ZIP_TABLE])
@looped("wire", [F32, BF16, F16])
def test_zip_writes_the_bytes_of_the_cpu_core(check: Check, wire: int, choice: int) -> None:
    lengths = (*LENGTHS, 1000, 2047, 3000, 5000)
    for i, numel in enumerate(lengths):
        case = zip_case(wire, choice, numel=numel, count=(1, 3, 0, 2)[i % 4], misaligned=i % 3 == 1)
        check(case)
        check(replace(case, dtype=(wire + 1 + i % 2) % 3))


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zip_codes_a_gaussian_as_the_cpu_core_does(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Messages that are coded, not raw: three regions, the last one ragged, and escapes in most tiles."""
    numel = 140_001
    x = gradient(numel, 3, dtype)
    x[::97] *= 2.0**-9
    for codec in (Zip(header=False), Zip(exponents="table", header=False), Zip(sigma=0.25, header=False)):
        want = torch.zeros(codec.wire(numel, dtype).capacity, dtype=torch.uint8)
        codec.encode(x, want)
        assert int(want[0]) == 1
        got = torch.zeros_like(want)
        spec = codec._params(dtype).spec(numel, dtype)
        messages = native._messages(got.unsqueeze(0), codec.wire(numel, dtype).offsets)
        assert kernels.fl_encode(ctypes.byref(spec), x.data_ptr(), None, ctypes.byref(messages), None) == 0
        assert torch.equal(got, want)
        back, total = torch.zeros_like(x), torch.ones_like(x)
        expected = total.clone()
        codec.decode_add(want, expected)
        assert kernels.fl_decode(ctypes.byref(spec), ctypes.byref(messages), back.data_ptr(), None) == 0
        assert kernels.fl_decode_sum(ctypes.byref(spec), ctypes.byref(messages), total.data_ptr(), 1, None) == 0
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)) and torch.equal(total, expected)


@looped("flags", range(8))
@looped("block", [32, 64, 128, 256, 512, 1024])
def test_thc_writes_the_bytes_of_the_cpu_core(check: Check, block: int, flags: int) -> None:
    lengths = itertools.cycle((*LENGTHS, 2000, 5000))
    start = thc_case(flags, block, offset=2**32 - 1024)
    for case in varied(replace(start, numel=next(lengths)) for _ in range(8)):
        check(replace(case, count=max(case.count, 1) + 3))
    for ranks in (1, 8, 9, 17, 18, 137, 2184):
        check(thc_case(flags, block, ranks, numel=next(lengths), count=2))
    check(replace(start, numel=1999, count=3), garbage=True)


@looped("dtype", native.DTYPES, ids=str)
def test_root_mean_squares_are_those_of_the_cpu_core(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    for numel in (1, 33, 1024, 1025, 70_001):
        case = thc_case(dtype=native.DTYPES[dtype], numel=numel)
        x, kept = gradient(numel, 3, dtype), gradient(numel, 4)
        x[2048:3072] = float("inf")
        x[4096:5120] = 0
        for residual in (None, kept):
            want = native.thc_rms(case.spec, x, residual, -(-numel // 1024))
            got = torch.empty_like(want)
            pointer = None if residual is None else residual.data_ptr()
            assert kernels.fl_thc_rms(ctypes.byref(case.spec), x.data_ptr(), pointer, got.data_ptr(), None) == 0
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@looped("flags", [0, native.THC_UNIFORM])
@looped("count", [1, 3, 8, 9, 140])
def test_sums_of_codes_are_those_of_the_cpu_core(kernels: ctypes.CDLL, flags: int, count: int) -> None:
    for numel in (1, 100, 1025, 5000):
        case = thc_case(flags, numel=numel, count=count)
        planes, made = Run(kernels, case, native.cpu(), garbage=True)._encoded(), []
        for library in (kernels, native.cpu()):
            out = Area(np.full(4 * numel + 4096, GUARD, np.uint8))
            spec, messages = ctypes.byref(case.spec), ctypes.byref(planes.messages)
            assert library.fl_add_codes(spec, messages, out.address, None) == 0
            made.append(out.data.copy())
        assert np.array_equal(*made) and (made[0] != GUARD).any()


FIFTH, THIRD, MOST = (math.ceil(share * 2**32) for share in (0.2, 1 / 3, 1 - 2**-31))
"""Shares of coarse tokens."""
TAH = tuple(
    tah_case(bits, channels, tile, share)
    for bits, channels, tile in itertools.product((4, 6), (128, 384, 1024), (32, 64, 128))
    for share in ((0, THIRD if tile == 64 else MOST) if bits == 4 else (0,))
)


@looped("start", tiered(TAH, lambda case: case.param[1] != 1024), ids=lambda case: str(case.param))
def test_tahquant_writes_the_bytes_of_the_cpu_core(check: Check, start: Case) -> None:
    channels = start.param[1]
    for case in varied(replace(start, numel=numel) for numel in (1, channels - 1, 3 * channels, 40 * channels + 7)):
        case = replace(case, count=max(case.count, 1))
        check(case)
    check(case, garbage=True)


@looped("dtype", native.DTYPES, ids=str)
def test_coarse_tokens_are_those_of_the_cpu_core(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Sections of 32 tokens, whole and partial, with ties and a token that is not finite, of several messages."""
    for channels, numel, count in ((128, 9000, 3), (1024, 40_000, 1), (32, 20_000, 2)):
        case = tah_case(4, channels, 32, FIFTH, dtype=native.DTYPES[dtype], numel=numel, count=count)
        given = gradient(numel * count, 3, dtype)
        given[7] = float("inf")
        given[4 * channels : 16 * channels] = given[:channels].clone().nan_to_num(1.0, 1.0).repeat(12)
        x, kept = Area(given.view(torch.uint8).numpy()), gradient(numel * count, 4).view(torch.uint8).numpy()
        for residual in (False, True):
            made = []
            for library in (kernels, native.cpu()):
                planes, lost = Planes(case, count), Area(kept)
                messages, pointer = ctypes.byref(planes.messages), lost.address if residual else None
                assert library.fl_encode(ctypes.byref(case.spec), x.address, pointer, messages, None) == 0
                assert planes.area.guards_hold() and lost.guards_hold()
                made.append((planes.area.data, lost.data))
            for got, want in zip(*made, strict=True):
                assert np.array_equal(got, want)
            marks = np.unpackbits(planes.area.data[: case.plane_bytes[0]])
            assert marks.sum() == -(-numel // channels) // 5


SOME = {
    "cast": cast_case(BF16),
    "int": int_case(4, 128, HADAMARD),
    "taco": block_case("e4m3", 256, native.SCALE_F32, native.BLOCK_HADAMARD),
    "fp8": block_case("e4m3", 32, native.SCALE_MESSAGE),
    "zip": zip_case(BF16),
    "thc": thc_case(native.THC_STOCHASTIC),
    "tahquant": tah_case(4, 128, 64, FIFTH),
    "chunked": chunked_case(3, 256, 9),
    "onebit": onebit_case(256),
    "qsdp": qsdp_case(4, 256),
}


@looped("case", SOME.values(), ids=SOME)
def test_more_work_than_the_grid_has_warps(check: Check, case: Case) -> None:
    check(replace(case, numel=5000, count=40))
    check(replace(case, dtype=BF16, numel=140_000))


@looped("offset", [2**32 - 256, 2**40 + 128, 2**62])
def test_element_numbers_have_64_bits(check: Check, offset: int) -> None:
    check(int_case(8, 128, STOCHASTIC, F32, 700, count=2, offset=offset))


@looped("group", [32, 128, 2048])
@looped("bits", [2, 3, 4, 8])
@looped("flags", [0, HADAMARD])
def test_any_bytes_decode_alike(check: Check, group: int, bits: int, flags: int) -> None:
    check(int_case(bits, group, flags, F32, 4999, count=2), garbage=True)


@looped("block", [32, 256])
def test_any_bytes_of_blocks_decode_alike(check: Check, block: int) -> None:
    for case in block_cases():
        if case.param[1] == block:
            check(replace(case, numel=1999, count=2), garbage=True)


WRONG: tuple[tuple[str, Case], ...] = (
    ("codec", Case(99, (0, 0, 0), F32, 64)),
    ("dtype", Case(native.CAST, (F32, 0, 0), 3, 64)),
    ("wire dtype", Case(native.CAST, (3, 0, 0), F32, 64)),
    ("unused parameter", Case(native.CAST, (F32, 1, 0), F32, 64)),
    ("bits", Case(native.INT, (5, 128, 0), F32, 64)),
    ("group not a power of two", Case(native.INT, (4, 96, 0), F32, 64)),
    ("group too small", Case(native.INT, (4, 16, 0), F32, 64)),
    ("group too large", Case(native.INT, (4, 8192, 0), F32, 64)),
    ("flag", Case(native.INT, (4, 128, 8), F32, 64)),
    ("full range of two bits", Case(native.INT, (2, 128, 4), F32, 64)),
    ("full range rotated", Case(native.INT, (4, 128, 5), F32, 64)),
    ("offset", Case(native.INT, (4, 128, 0), F32, 64, offset=64)),
    ("format", Case(native.BLOCK, (6, 32, 0, 0), F32, 64)),
    ("kind of scale", block_case("e4m3", 32, 5, 0, F32, 64)),
    ("block", block_case("e4m3", 1024, 0, 0, F32, 64)),
    ("rotated small floats", block_case("e2m1", 32, 0, 1, F32, 64)),
    ("dtype of zip", Case(native.ZIP, (3, 0, 0), F32, 64)),
    ("choice of exponents", Case(native.ZIP, (BF16, 3, 0), BF16, 64)),
    ("window beyond the exponents", Case(native.ZIP, (F16, 1, 27), F16, 64)),
    ("zip of 2^32 elements", Case(native.ZIP, (BF16, 0, 0), BF16, 1 << 32)),
    ("numel", Case(native.INT, (4, 128, 0), F32, -1)),
    ("block of thc", thc_case(block=2048, numel=64)),
    ("flag of thc", thc_case(flags=8, numel=64)),
    ("steps of thc", Case(native.THC, (0, 32, 0, 0), F32, 64)),
    ("sum of too many messages", thc_case(ranks=2185, numel=64)),
    ("offset of thc", thc_case(numel=64, offset=1)),
    ("bits of tahquant", tah_case(5, 128, 64, numel=128)),
    ("tile", tah_case(4, 128, 16, numel=128)),
    ("channels", tah_case(4, 96, 64, numel=128)),
    ("coarse ones of too many tokens", tah_case(4, 32, 32, FIFTH, numel=(1 << 37) + 1)),
    ("bits of chunks", chunked_case(5, numel=64)),
    ("a chunk of no power of two", chunked_case(2, 96, 3, numel=64)),
    ("a chunk that is too large", chunked_case(2, 8192, 64, numel=64)),
    ("nothing that goes", chunked_case(2, 64, 0, numel=64)),
    ("more than the chunk has", chunked_case(2, 64, 65, numel=64)),
    ("a factor that is not finite", chunked_case(2, 64, 3, float("inf"), numel=64)),
    ("a group of onebit that is too large", onebit_case(8192, numel=64)),
    ("a group of qsdp that is too large", qsdp_case(8, 2048, numel=64)),
    ("coarse tokens of 6 bits", tah_case(6, 128, 64, 1, numel=128)),
)


@looped("case", [case for _, case in WRONG], ids=[name for name, _ in WRONG])
def test_a_wrong_spec_is_refused_as_on_the_cpu(kernels: ctypes.CDLL, case: Case) -> None:
    area = Area(np.full(4096, GUARD, np.uint8))
    planes = (ctypes.c_void_p * native.MAX_PLANES)(*[area.address] * native.MAX_PLANES)
    messages, spec = ctypes.byref(native.Messages(planes, 4096, 1)), ctypes.byref(case.spec)
    verbs = {
        "fl_encode": (spec, area.address, None, messages, None),
        "fl_decode": (spec, messages, area.address, None),
        "fl_decode_sum": (spec, messages, area.address, 0, None),
        "fl_recode": (spec, messages, None, None, messages, None),
        "fl_recode_from": (spec, messages, spec, None, messages, None),
        "fl_encode_difference": (spec, area.address, area.address, messages, None),
    }
    for verb, arguments in verbs.items():
        status = getattr(kernels, verb)(*arguments)
        assert status in (1, 2), f"{verb} accepted it"
        assert status == getattr(native.cpu(), verb)(*arguments)
    assert (area.data == GUARD).all()


def test_a_misaligned_plane_and_a_missing_tensor_are_refused(kernels: ctypes.CDLL) -> None:
    case = int_case(4, 128, 0, F32, 64)
    area, spec = Area(np.full(4096, GUARD, np.uint8)), ctypes.byref(case.spec)
    good = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(area.address, area.address + 64), 0, 1)
    shifted = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(area.address, area.address + 72), 0, 1)
    assert kernels.fl_encode(spec, area.address, None, ctypes.byref(shifted), None) == 1
    assert kernels.fl_encode(spec, None, None, ctypes.byref(good), None) == 1
    assert kernels.fl_encode(None, area.address, None, ctypes.byref(good), None) == 1
    assert kernels.fl_decode(spec, ctypes.byref(good), None, None) == 1
    assert (area.data == GUARD).all()


def test_a_cuda_error_becomes_a_status_and_a_text(kernels: ctypes.CDLL, check: Check) -> None:
    case = cast_case(BF16, F32, 64)
    kernels.fail_next_cuda_call()
    with pytest.raises(AssertionError, match="gave status 3"):
        Run(kernels, case, native.cpu()).encode(residual=False)
    assert kernels.fl_last_error() == b"cudaErrorNoDevice: simulated"
    check(case)


def test_build_info_names_abi_and_kind(kernels: ctypes.CDLL) -> None:
    facts = dict(line.split("=", 1) for line in kernels.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION)
    assert facts["kind"] == "cuda"
    assert facts["archs"] == "host"
    assert facts["compiler"]
