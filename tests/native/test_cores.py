"""All libraries write the same bytes: the CPU's on each instruction set, and the CUDA kernels, compiled for the CPU.

What bytes these should be, ``tests/codecs`` says by references in Python, and ``tests/golden``.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, cycle, product

import numpy as np
import pytest
import torch

from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.codecs.lossless.zip import Zip
from tests.loops import looped
from tests.native.abi import (
    BAD_ARGUMENT,
    BF16,
    DTYPES,
    F16,
    F32,
    FULL,
    GUARD,
    HADAMARD,
    LENGTHS,
    OK,
    STOCHASTIC,
    UNSUPPORTED,
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
    each_isa,
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

GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # a warp has part of a group, one, or several tiles of one
FIFTH, THIRD, MOST = (math.ceil(share * 2**32) for share in (0.2, 1 / 3, 1 - 2**-31))
"""Shares of coarse tokens."""
EPSILONS = ((2700, 610), (0, 0), (3300, 700), (500, 200))


def same(kernels: ctypes.CDLL, case: Case, garbage: bool = False, exponent: int | None = None) -> None:
    """Assert that every verb of every library makes the same of a case."""
    made: dict[str, list[list[np.ndarray]]] = {}
    for isa in each_isa():
        made[isa] = list(results(native.cpu(), case, native.cpu(), garbage, exponent))
    want = made.pop("baseline")
    made["cuda"] = list(results(kernels, case, native.cpu(), garbage, exponent))
    for name, got in made.items():
        try:
            assert_same(got, want, case)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def varied(starts: Iterable[Case], each: int = 4, least: int = 0) -> Iterator[Case]:
    """Give cases lengths, types, numbers of messages and alignments by turns, whose periods have no common factor."""
    for i, start in enumerate(start for start in starts for _ in range(each)):
        group = start.param[1] if len(start.param) > 1 else 512
        lengths = (*LENGTHS, group - 1, group + 1, 2 * group + 5)
        count = max(least, (1, 3, 0, 2, 5)[i % 5])
        yield replace(start, numel=lengths[i % 17], dtype=i % 3, count=count, misaligned=i % 7 == 3)


def integers() -> Iterator[Case]:
    for bits, group, flags in product((2, 3, 4, 8), GROUPS, (0, HADAMARD, STOCHASTIC, HADAMARD | STOCHASTIC, FULL)):
        if bits >= 4 or flags != FULL:
            yield int_case(bits, group, flags, offset=7 * group, seed=bits << 30)


def dynamiqs() -> Iterator[Case]:
    places = cycle([(0, 1), (1, 2), (2, 3), (0, 7), (16383, 16384)])
    for flags in (0, native.DYNAMIQ_FLAT):
        for i, numel in enumerate((*LENGTHS, 511, 2000, 64 * 256 + 1)):
            how = {"count": i % 3, "misaligned": i % 2 == 1, "dtype": i % 3}
            yield dynamiq_case(flags, next(places), EPSILONS[i % 4], numel, offset=256 * i, **how)
        for i, offset in enumerate((2**39 - 512, 2**40 + 256, 2**55)):
            yield dynamiq_case(flags, (1, 3), numel=700, dtype=i, offset=offset)
        yield dynamiq_case(flags, (1, 3), numel=5000, count=40)


def zips() -> Iterator[Case]:
    for wire, choice in product((F32, BF16, F16), (native.ZIP_AUTO, native.ZIP_WINDOW, native.ZIP_TABLE)):
        for i, numel in enumerate((*LENGTHS, 1000, 2047, 3000, 5000)):
            case = zip_case(wire, choice, numel=numel, count=(1, 3, 0, 2)[i % 4], misaligned=i % 3 == 1)
            yield replace(case, dtype=(wire + i % 3) % 3)


def thcs() -> Iterator[Case]:
    for block, flags in product((32, 64, 128, 256, 512, 1024), range(8)):
        start = thc_case(flags, block, offset=2**32 - 1024)
        yield from varied([start], 3, least=3)
        ranks = (1, 8, 9, 17, 18, 137, 2184)[(block.bit_length() + flags) % 7]
        yield thc_case(flags, block, ranks, numel=(999, 2000, 5000)[flags % 3], count=2)


def tahquants() -> Iterator[Case]:
    for i, (channels, tile, (bits, share)) in enumerate(
        product((128, 384, 1024), (32, 64, 128), ((4, 0), (4, THIRD), (4, MOST), (6, 0)))
    ):
        for j, numel in enumerate((1, channels - 1, 3 * channels, 40 * channels + 7)):
            how = {"dtype": (i + j) % 3, "count": 1 + (i + j) % 3, "misaligned": (i + j) % 7 == 3}
            yield tah_case(bits, channels, tile, share, numel=numel, **how)


def long_ones() -> Iterator[Case]:
    """More work than the kernels' grid has warps for, and than the CPU keeps on one thread; elements beyond 2^32."""
    for case in (
        cast_case(BF16),
        int_case(4, 128, HADAMARD),
        block_case("e4m3", 256, native.SCALE_F32, native.BLOCK_HADAMARD),
        block_case("e4m3", 32, native.SCALE_MESSAGE),
        zip_case(BF16),
        thc_case(native.THC_STOCHASTIC),
        tah_case(4, 128, 64, FIFTH),
        chunked_case(3, 256, 9),
        onebit_case(256),
        qsdp_case(4, 256),
    ):
        yield replace(case, numel=5000, count=40)
        yield replace(case, dtype=BF16, numel=140_000)
    yield dynamiq_case(0, (1, 3), numel=140_000, dtype=BF16)
    yield from (int_case(8, 128, STOCHASTIC, F32, 700, count=2, offset=at) for at in (2**32 - 256, 2**40 + 128, 2**62))


CHUNKS = ((4096, 64), (4096, 1), (512, 100), (64, 64), (256, 3), (4096, 4096))
QSDP = [
    qsdp_case(bits, group, flags, offset=group << 31)
    for bits, group, flags in product((4, 8), (32, 64, 128, 256, 512, 1024), (0, native.QSDP_STOCHASTIC))
]
CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "int": lambda: varied(integers()),
    "cast": lambda: varied(map(cast_case, (F32, BF16, F16)), 51),
    "block": lambda: varied(block_cases()),
    "onebit": lambda: varied(map(onebit_case, GROUPS), 7),
    "qsdp": lambda: varied(QSDP),
    "chunked": lambda: varied(chunked_case(bits, *kept, 0.5) for bits in (2, 3, 4, 8, 32) for kept in CHUNKS),
    "dynamiq": dynamiqs,
    "zip": zips,
    "thc": thcs,
    "tahquant": tahquants,
    "long": long_ones,
}


@pytest.mark.parametrize("name", CASES)
def test_all_libraries_write_the_same_bytes(kernels: ctypes.CDLL, name: str) -> None:
    for case in CASES[name]():
        same(kernels, case)


def any_bytes() -> Iterator[Case]:
    """Yield cases whose messages are noise."""
    starts = chain(
        (int_case(*each, numel=4999) for each in product((2, 3, 4, 8), (32, 128, 2048), (0, HADAMARD))),
        (cast_case(wire, numel=4999) for wire in DTYPES.values()),
        (replace(case, numel=1999) for case in block_cases() if case.param[1] in (32, 256)),
        (onebit_case(group, numel=4999) for group in GROUPS),
        (replace(case, numel=2999) for case in QSDP),
        (thc_case(flags, block, numel=1999) for flags, block in product(range(8), (32, 1024))),
        (tah_case(bits, 128, 64, share, numel=5127) for bits, share in ((4, 0), (4, THIRD), (6, 0))),
        [chunked_case(2, numel=9001)],
    )
    yield from (replace(case, dtype=i % 3, count=2) for i, case in enumerate(starts))
    yield from (dynamiq_case(flags, (1, 3), numel=2999, count=2) for flags in (0, native.DYNAMIQ_FLAT))


def test_any_bytes_decode_alike(kernels: ctypes.CDLL) -> None:
    for case in any_bytes():
        same(kernels, case, garbage=True)


def test_hostile_scales_decode_alike(kernels: ctypes.CDLL) -> None:
    """Whatever low bits a scale has: sums are the same with a fused multiply-add and without, as on the baseline."""
    for case, exponent in hostile_cases():
        same(kernels, case, garbage=True, exponent=exponent)


def test_every_16_bit_pattern_is_encoded_alike(kernels: ctypes.CDLL) -> None:
    cases = [int_case(bits, 32, HADAMARD * (bits == 4)) for bits in (2, 3, 4, 8)]
    cases += [case for case in block_cases() if case.param[1] == 32]
    patterns = Area(np.arange(2**16, dtype=np.uint16).view(np.uint8))
    for i, start in enumerate(cases):
        case, made = replace(start, dtype=(BF16, F16)[i % 2], numel=2**16), []

        def encode(library: ctypes.CDLL, case: Case = case) -> np.ndarray:
            out, spec = Planes(case, 1), case.spec
            assert library.fl_encode(ctypes.byref(spec), patterns.address, None, ctypes.byref(out.messages), None) == OK
            return out.area.data

        made = [encode(native.cpu()) for _ in each_isa()] + [encode(kernels)]
        assert all(np.array_equal(each, made[0]) for each in made), case


# ---- verbs that only some codecs have -------------------------------------------------------------------------------


@looped("bits, flags", product((2, 3, 4, 8), (0, STOCHASTIC, HADAMARD)))
def test_fused_verbs_write_the_same_bytes(kernels: ctypes.CDLL, bits: int, flags: int) -> None:
    """Groups of source and target lie differently in a warp: smaller, larger, several tiles long."""
    for i, (group, source_group) in enumerate(product((32, 128, 4096), (32, 512, 2048))):
        numel = (1, 1000, 4097, 9_001)[i % 4]
        target = int_case(bits, group, flags, numel=numel, offset=3 * group)
        for j, source_bits in enumerate(((8, 4), (3, 2))[i % 2]):
            source = int_case(source_bits, source_group, HADAMARD * ((i + j) % 2), numel=numel, count=3)
            given = Run(kernels, source, native.cpu())._encoded()
            for residual in (None, gradient(numel, 9)):
                made = []
                for library in (kernels, native.cpu()):
                    out, lost = Planes(target, 1), None if residual is None else residual.clone()
                    pointers = None if lost is None else lost.data_ptr(), ctypes.byref(out.messages), None
                    sources = ctypes.byref(given.messages)
                    assert library.fl_recode_from(source.spec, sources, target.spec, *pointers) == OK
                    made.append((out.area.data, np.empty(0) if lost is None else lost.view(torch.int32).numpy()))
                assert all(map(np.array_equal, *made))
        for dtype, torch_dtype in ((F32, torch.float32), (BF16, torch.bfloat16), (F16, torch.float16)):
            case, x, base = replace(target, dtype=dtype), gradient(2 * numel, 1), gradient(2 * numel, 2, torch_dtype)
            two = [Planes(case, 2) for _ in range(2)]
            for library, out in zip((kernels, native.cpu()), two, strict=True):
                pointers = x.data_ptr(), base.data_ptr(), ctypes.byref(out.messages), None
                assert library.fl_encode_difference(case.spec, *pointers) == OK
            assert np.array_equal(two[0].area.data, two[1].area.data)


def test_rows_are_recoded_alike(kernels: ctypes.CDLL) -> None:
    """Two rows of three summands, the second row first in memory, of the same codec and of another one."""
    numel, starts = 1000, (ctypes.c_int64 * 2)(2048, 0)
    target = int_case(4, 128, STOCHASTIC, numel=numel)
    for source in (target, int_case(8, 512, 0, numel=numel)):
        given = Run(kernels, replace(source, count=6), native.cpu())._encoded()
        step = given.messages.stride
        summands = native.Messages(given.messages.plane, 2 * step, 3)
        made = []
        for library in (kernels, native.cpu()):
            out, lost = Planes(target, 2), gradient(4000, 9)
            other = None if source is target else source.spec
            pointers = lost.data_ptr(), ctypes.byref(out.messages), None
            assert library.fl_recode_rows(other, ctypes.byref(summands), step, target.spec, starts, *pointers) == OK
            made.append((out.area.data, lost.view(torch.int32).numpy()))
        assert all(map(np.array_equal, *made))
    for library in (kernels, native.cpu()):
        planes = ctypes.byref(out.messages)
        assert library.fl_recode_rows(None, None, step, target.spec, starts, None, planes, None) == BAD_ARGUMENT
        assert library.fl_recode_rows(None, planes, step, target.spec, None, None, planes, None) == BAD_ARGUMENT


def test_what_lies_between_two_numbers_of_4_bits_is_rounded_alike(kernels: ctypes.CDLL) -> None:
    """Multiples of 1/16 up to the largest number, with all that lie in the middle, and their neighbours in f32."""
    exact = torch.arange(-96, 97) / 16
    x = torch.cat([exact, exact.nextafter(torch.tensor(9.0)), exact.nextafter(torch.tensor(-9.0))])
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=6.0)  # which makes the scale 1
    case, made = block_case("e2m1", 32, native.SCALE_E8M0, numel=blocks.numel()), []
    for library in (kernels, native.cpu()):
        out = Planes(case, 1)
        assert library.fl_encode(case.spec, blocks.data_ptr(), None, ctypes.byref(out.messages), None) == OK
        made.append(out.area.data)
    assert np.array_equal(*made)
    assert (made[0][: len(blocks)] == 127).all(), "the scale of a block is not 1"


def test_dynamiq_encodes_several_super_groups_in_turn(kernels: ctypes.CDLL) -> None:
    """So many that a warp takes one after another, while the next is on its way."""
    case = dynamiq_case(0, (1, 3), numel=((1 << 14) + 3) * 256 - 5, dtype=BF16)
    got, want = (Run(library, case, native.cpu()).encode(residual=False) for library in (kernels, native.cpu()))
    assert all(map(np.array_equal, got, want))


def test_statistics_are_alike_and_right(kernels: ctypes.CDLL) -> None:
    """Means and energies of super-groups, and root mean squares of sections, the last one short."""
    for dtype, numel in product(native.DTYPES, (1, 255, 256, 1000, 1025, 70_001)):
        x, kept = gradient(numel, 1, dtype), gradient(numel, 2)
        for residual in (None, kept):
            given = x.float() if residual is None else x.float() + residual
            pointer = None if residual is None else residual.data_ptr()
            got = torch.empty(2, -(-numel // 256))
            status = kernels.fl_dynamiq_stats(
                native.DTYPES[dtype], x.data_ptr(), pointer, numel, got[0].data_ptr(), got[1].data_ptr(), None
            )
            exact = [(part.double().mean(), part.double().square().sum()) for part in given.split(256)]
            torch.testing.assert_close(got, torch.tensor(exact).t().float(), rtol=1e-5, atol=1e-6)
            for _ in each_isa():
                assert status == OK and torch.equal(got, torch.stack(native.dynamiq_stats(x, residual)))
            odd = x.clone()
            odd[2048:3072], odd[4096:5120] = float("inf"), 0
            case, roots = thc_case(dtype=native.DTYPES[dtype], numel=numel), torch.empty(-(-numel // 1024))
            assert kernels.fl_thc_rms(case.spec, odd.data_ptr(), pointer, roots.data_ptr(), None) == OK
            for _ in each_isa():
                want = native.thc_rms(case.spec, odd, residual, len(roots))
                assert torch.equal(roots.view(torch.int32), want.view(torch.int32))
    assert all(t.numel() == 0 for t in native.dynamiq_stats(torch.empty(0)))


@looped("flags", [0, native.THC_UNIFORM])
@looped("count", [1, 3, 8, 9, 140])
def test_sums_of_codes_are_alike(kernels: ctypes.CDLL, flags: int, count: int) -> None:
    for numel in (1, 100, 1025, 5000):
        case = thc_case(flags, numel=numel, count=count)
        planes, made = Run(kernels, case, native.cpu(), garbage=True)._encoded(), []
        for library in (kernels, native.cpu()):
            out = Area(np.full(4 * numel + 4096, GUARD, np.uint8))
            assert library.fl_add_codes(case.spec, ctypes.byref(planes.messages), out.address, None) == OK
            made.append(out.data.copy())
        assert np.array_equal(*made) and (made[0] != GUARD).any()


@looped("dtype", native.DTYPES, ids=str)
def test_coarse_tokens_are_alike(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
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
                pointers = lost.address if residual else None, ctypes.byref(planes.messages), None
                assert library.fl_encode(case.spec, x.address, *pointers) == OK
                assert planes.area.guards_hold() and lost.guards_hold()
                made.append((planes.area.data, lost.data))
            assert all(map(np.array_equal, *made))
            marks = np.unpackbits(made[0][0][: case.plane_bytes[0]])
            assert marks.sum() == -(-numel // channels) // 5


@looped("dtype", native.DTYPES, ids=str)
def test_zip_codes_a_gaussian_alike(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Messages that are coded, not raw: three regions, the last one ragged, and escapes in most tiles."""
    numel = 140_001
    x = gradient(numel, 3, dtype)
    x[::97] *= 2.0**-9
    for codec in (Zip(header=False), Zip(exponents="table", header=False), Zip(sigma=0.25, header=False)):
        want = torch.zeros(codec.wire(numel, dtype).capacity, dtype=torch.uint8)
        codec.encode(x, want)
        assert int(want[0]) == 1
        got, spec = torch.zeros_like(want), codec._params(dtype).spec(numel, dtype)
        messages = native.messages(got.unsqueeze(0), codec.wire(numel, dtype).offsets)
        assert kernels.fl_encode(spec, x.data_ptr(), None, messages, None) == OK
        assert torch.equal(got, want)
        back, total = torch.zeros_like(x), torch.ones_like(x)
        expected = total.clone()
        codec.decode_add(want, expected)
        assert kernels.fl_decode(spec, messages, back.data_ptr(), None) == OK
        assert kernels.fl_decode_sum(spec, messages, total.data_ptr(), 1, None) == OK
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)) and torch.equal(total, expected)


# ---- refusals -------------------------------------------------------------------------------------------------------

GOOD = int_case(4, 128, 0, F32, 64)
MEANINGLESS = {
    "dtype": replace(GOOD, dtype=3),
    "wire dtype": cast_case(3, F32, 64),
    "unused parameter": Case(native.CAST, (F32, 1), F32, 64),
    "bits": int_case(5, 128, 0, F32, 64),
    "group not a power of two": int_case(4, 96, 0, F32, 64),
    "group too small": int_case(4, 16, 0, F32, 64),
    "group too large": int_case(4, 8192, 0, F32, 64),
    "offset inside a group": replace(GOOD, offset=64),
    "negative offset": replace(GOOD, offset=-128),
    "negative numel": replace(GOOD, numel=-1),
    "absurd numel": replace(GOOD, numel=2**62),
    "format": Case(native.BLOCK, (6, 32, 0, 0), F32, 64),
    "kind of scale": block_case("e4m3", 32, 5, 0, F32, 64),
    "block too large": block_case("e4m3", 1024, 0, 0, F32, 64),
    "block not a power of two": block_case("e4m3", 48, 0, 0, F32, 64),
    "dtype of zip": Case(native.ZIP, (3, 0, 0), F32, 64),
    "choice of exponents": Case(native.ZIP, (BF16, 3, 0), BF16, 64),
    "window beyond the exponents": Case(native.ZIP, (F16, 1, 27), F16, 64),
    "block of thc": thc_case(block=2048, numel=64),
    "steps of thc": Case(native.THC, (0, 32, 0, 0), F32, 64),
    "sum of too many messages": thc_case(ranks=2185, numel=64),
    "offset of thc": thc_case(numel=64, offset=1),
    "bits of tahquant": tah_case(5, 128, 64, numel=128),
    "tile": tah_case(4, 128, 16, numel=128),
    "channels": tah_case(4, 96, 64, numel=128),
    "coarse tokens of 6 bits": tah_case(6, 128, 64, 1, numel=128),
    "bits of chunks": chunked_case(5, numel=64),
    "a chunk of no power of two": chunked_case(2, 96, 3, numel=64),
    "a chunk that is too large": chunked_case(2, 8192, 64, numel=64),
    "nothing that goes": chunked_case(2, 64, 0, numel=64),
    "more than the chunk has": chunked_case(2, 64, 65, numel=64),
    "a factor that is not finite": chunked_case(2, 64, 3, float("inf"), numel=64),
    "a group of onebit that is too large": onebit_case(8192, numel=64),
    "bits of qsdp": qsdp_case(2, 64, 0, F32, 64),
    "a group of qsdp that is too large": qsdp_case(8, 2048, 0, F32, 64),
    "offset inside a group of qsdp": qsdp_case(8, 128, 0, F32, 64, offset=64),
}
UNKNOWN = {
    "codec": Case(99, (0,), F32, 64),
    "flag": int_case(4, 128, 8, F32, 64),
    "full range of two bits": int_case(2, 128, 4, F32, 64),
    "full range rotated": int_case(4, 128, 5, F32, 64),
    "unknown flag": block_case("e4m3", 32, 0, 2, F32, 64),
    "rotated small floats": block_case("e2m1", 32, 0, 1, F32, 64),
    "rotated with E8M0": block_case("e4m3", 32, native.SCALE_E8M0, 1, F32, 64),
    "integers with E8M0": block_case("int8", 32, native.SCALE_E8M0, 0, F32, 64),
    "flag of thc": thc_case(flags=8, numel=64),
    "zip of 2^32 elements": Case(native.ZIP, (BF16, 0, 0), BF16, 1 << 32),
    "coarse ones of too many tokens": tah_case(4, 32, 32, FIFTH, numel=(1 << 37) + 1),
    "flag of qsdp": qsdp_case(8, 128, 2, F32, 64),
}


def messages(address: int, stride: int = 4096, count: int = 1) -> native.Messages:
    return native.Messages((ctypes.c_void_p * native.MAX_PLANES)(*[address] * native.MAX_PLANES), stride, count)


@looped("name, status", [*((name, BAD_ARGUMENT) for name in MEANINGLESS), *((name, UNSUPPORTED) for name in UNKNOWN)])
def test_a_wrong_spec_is_refused(kernels: ctypes.CDLL, name: str, status: int) -> None:
    area, spec = Area(np.full(16384, GUARD, np.uint8)), ctypes.byref((MEANINGLESS | UNKNOWN)[name].spec)
    planes, data = ctypes.byref(messages(area.address)), area.address + 8192
    for library in (native.cpu(), kernels):
        assert library.fl_encode(spec, data, None, planes, None) == status
        assert library.fl_decode(spec, planes, data, None) == status
        assert library.fl_decode_sum(spec, planes, data, 0, None) == status
        assert library.fl_recode(spec, planes, None, None, planes, None) == status
        assert library.fl_recode_from(spec, planes, spec, None, planes, None) in (BAD_ARGUMENT, UNSUPPORTED)
        assert library.fl_encode_difference(spec, data, data, planes, None) in (BAD_ARGUMENT, UNSUPPORTED)
    assert (area.data == GUARD).all()


def test_wrong_pointers_are_refused(kernels: ctypes.CDLL) -> None:
    area, spec = Area(np.full(65536, GUARD, np.uint8)), ctypes.byref(GOOD.spec)
    at, data = area.address, area.address + 32768
    planes, two = ctypes.byref(good := messages(at)), ctypes.byref(messages(at, count=2))
    bad = {
        "no plane": messages(0),
        "misaligned plane": messages(at + 8),
        "misaligned stride": messages(at, 4100, 2),
        "overlapping messages": messages(at, 16, 2),
        "negative count": messages(at, count=-1),
    }
    longer = ctypes.byref(replace(GOOD, numel=GOOD.numel + 1).spec)
    for library in (native.cpu(), kernels):
        calls = []
        for wrong in map(ctypes.byref, bad.values()):
            calls += [
                library.fl_encode(spec, data, None, wrong, None),
                library.fl_decode(spec, wrong, data, None),
                library.fl_decode_sum(spec, wrong, data, 0, None),
                library.fl_recode(spec, wrong, None, None, planes, None),
                library.fl_recode(spec, planes, None, None, wrong, None),
            ]
        for address in (None, data + 2):
            calls += [
                library.fl_encode(spec, address, None, planes, None),
                library.fl_decode(spec, planes, address, None),
                library.fl_decode_sum(spec, planes, address, 0, None),
            ]
        calls += [
            library.fl_encode(spec, data, data + 2, planes, None),
            library.fl_recode(spec, planes, data + 2, None, planes, None),
            library.fl_recode(spec, planes, None, data + 2, planes, None),
            library.fl_recode(spec, planes, None, None, two, None),
            library.fl_recode_from(longer, planes, spec, None, planes, None),
            library.fl_recode_from(spec, planes, spec, None, two, None),
            library.fl_recode_from(spec, planes, spec, data + 2, planes, None),
            library.fl_encode_difference(spec, data + 2, data, planes, None),
            library.fl_encode_difference(spec, data, None, planes, None),
            library.fl_encode(None, data, None, planes, None),
            library.fl_encode(spec, data, None, None, None),
        ]
        assert set(calls) == {BAD_ARGUMENT}, calls
    assert (area.data == GUARD).all() and good.count == 1


def test_nothing_needs_no_pointers(kernels: ctypes.CDLL) -> None:
    none, empty = ctypes.byref(messages(0)), ctypes.byref(replace(GOOD, numel=0).spec)
    for library in (native.cpu(), kernels):
        assert library.fl_encode(empty, None, None, none, None) == OK
        assert library.fl_decode(empty, none, None, None) == OK
        assert library.fl_decode_sum(empty, none, None, 0, None) == OK
        assert library.fl_recode(empty, none, None, None, none, None) == OK


def test_a_cuda_error_becomes_a_status_and_a_text(kernels: ctypes.CDLL) -> None:
    case = cast_case(BF16, F32, 64)
    kernels.fail_next_cuda_call()
    with pytest.raises(AssertionError, match="gave status 3"):
        Run(kernels, case, native.cpu()).encode(residual=False)
    assert kernels.fl_last_error() == b"cudaErrorNoDevice: simulated"
    same(kernels, case)


def test_build_info_names_abi_and_kind(kernels: ctypes.CDLL) -> None:
    facts = dict(line.split("=", 1) for line in kernels.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION) and facts["kind"] == "cuda" and facts["archs"] == "host"
    assert facts["compiler"]
