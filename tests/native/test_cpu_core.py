"""The CPU library, on every instruction set, writes the bytes of the scalar specification in ``csrc/core``."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusionlayer import native
from fusionlayer.base.errors import ConfigError, FusionLayerError, WireError
from fusionlayer.native import libraries
from tests.loops import looped
from tests.native.abi import (
    BAD_ARGUMENT,
    BF16,
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
    Bytes,
    Case,
    Planes,
    assert_same,
    block_case,
    block_cases,
    cast_case,
    chunked_case,
    dynamiq_case,
    hostile_cases,
    int_case,
    itemsize,
    onebit_case,
    qsdp_case,
    results,
    values,
)
from tests.tiers import tiered

pytestmark = pytest.mark.short

CSRC = Path(__file__).resolve().parents[2] / "fusionlayer/csrc"
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FLAGS = (0, HADAMARD, STOCHASTIC, HADAMARD | STOCHASTIC)
LARGE = 200_001  # elements: more than a call keeps on one thread


def usable_isas() -> list[str]:
    found = []
    for name in native.build_info("").isas:
        try:
            native.select_isa(name)
        except ConfigError:
            continue
        found.append(name)
    native.select_isa("auto")
    return found


ISAS = usable_isas()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the scalar specification, compiled."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: neither g++ nor c++ is on PATH"
    path = tmp_path_factory.mktemp("reference") / "libreference.so"
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    includes = (f"-I{CSRC / 'include'}", f"-I{CSRC / 'core'}")
    source = Path(__file__).with_name("reference.cpp")
    subprocess.run([compiler, *flags, *includes, str(source), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    for verb in ("fl_encode", "fl_decode", "fl_decode_sum", "fl_recode"):
        getattr(library, verb).argtypes = getattr(native.cpu(), verb).argtypes
    library.reference_noise.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p)
    return library


@pytest.fixture
def cpu() -> Iterator[ctypes.CDLL]:
    """Return the library; afterwards it is set as before."""
    yield native.cpu()
    native.select_isa("auto")
    native.set_threads(max(1, min(torch.get_num_threads(), 8)))


def check(
    cpu: ctypes.CDLL, reference: ctypes.CDLL, case: Case, garbage: bool = False, exponent: int | None = None
) -> None:
    """Assert that every verb writes the specified bytes on every instruction set."""
    want = list(results(reference, case, reference, garbage, exponent))
    for name in ISAS:
        native.select_isa(name)
        assert native.isa() == name
        try:
            assert_same(results(cpu, case, reference, garbage, exponent), want, case)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, cpu: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, using one instruction set after the other."""
    native.select_isa(request.param)
    assert native.isa() == request.param
    return cpu


def in_child(body: Callable[[], None]) -> int:
    """Return the exit status of a forked process that runs ``body``, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bits, dtype",
    tiered(
        itertools.product((2, 3, 4, 8), DTYPES.values()),
        lambda bits, dtype: (bits, dtype) in ((2, F32), (3, BF16), (4, F32), (8, F16)),
    ),
)
def test_int_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, bits: int, dtype: int) -> None:
    lengths = itertools.cycle(LENGTHS)
    counts = itertools.cycle((1, 2, 0, 3, 5))
    for i, (group, flags) in enumerate(itertools.product(GROUPS, FLAGS if bits < 4 else (*FLAGS, FULL))):
        for numel in (next(lengths), next(lengths), next(lengths), 2 * group + 5):
            case = int_case(bits, group, flags, dtype, numel, count=next(counts), offset=7 * group, seed=i << 30)
            check(cpu, reference, replace(case, misaligned=i % 2 == 1))


@looped("dtype", DTYPES.values(), ids=DTYPES)
@looped("wire", DTYPES.values(), ids=DTYPES)
def test_cast_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, wire: int, dtype: int) -> None:
    for i, numel in enumerate((*LENGTHS, 511, 512, 513, 5000)):
        check(cpu, reference, replace(cast_case(wire, dtype, numel, count=i % 4), misaligned=i % 2 == 1))


@looped("number", native.FORMATS)
def test_block_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, number: str) -> None:
    lengths, dtypes = itertools.cycle(LENGTHS), itertools.cycle(DTYPES.values())
    counts = itertools.cycle((1, 2, 0, 3, 5))
    for i, case in enumerate(case for case in block_cases() if case.param[0] == native.FORMATS[number]):
        for numel in (next(lengths), next(lengths), 2 * case.param[1] + 5):
            varied = replace(case, numel=numel, count=next(counts), dtype=next(dtypes))
            check(cpu, reference, replace(varied, misaligned=i % 2 == 1))


@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_onebit_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, dtype: int) -> None:
    lengths, counts = itertools.cycle(LENGTHS), itertools.cycle((1, 2, 0, 3, 5))
    for i, group in enumerate(GROUPS):
        for numel in (next(lengths), next(lengths), next(lengths), 2 * group + 5):
            case = onebit_case(group, dtype, numel, count=next(counts))
            check(cpu, reference, replace(case, misaligned=i % 2 == 1))
    check(cpu, reference, onebit_case(32, dtype, 999, count=2), garbage=True)


@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_qsdp_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, dtype: int) -> None:
    lengths, counts = itertools.cycle(LENGTHS), itertools.cycle((1, 2, 0, 3, 5))
    for i, (group, bits, flags) in enumerate(itertools.product((32, 64, 128, 256, 512, 1024), (4, 8), (0, 1))):
        for numel in (next(lengths), next(lengths), 2 * group + 5):
            case = qsdp_case(bits, group, flags, dtype, numel, count=next(counts), offset=(i << 36) + 7 * group)
            check(cpu, reference, replace(case, misaligned=i % 2 == 1))
    for bits, group in ((4, 32), (4, 64), (8, 32)):
        check(cpu, reference, qsdp_case(bits, group, 0, dtype, 999, count=2), garbage=True)


DYNAMIQ_LENGTHS = (*LENGTHS, 511, 512, 2000, 64 * 256, 64 * 256 + 1, 70 * 256 + 77)


@looped("flags", [0, native.DYNAMIQ_FLAT])
@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_dynamiq_is_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, dtype: int, flags: int) -> None:
    places = itertools.cycle([(0, 1), (1, 2), (2, 3), (0, 7), (16383, 16384)])
    epsilons = itertools.cycle([(2700, 610), (0, 0), (3300, 700), (500, 200)])
    for i, numel in enumerate(DYNAMIQ_LENGTHS):
        case = dynamiq_case(flags, next(places), next(epsilons), numel, dtype=dtype, offset=256 * i)
        check(cpu, reference, replace(case, count=(1, 2, 3)[i % 3] if numel < 3000 else 1, misaligned=i % 2 == 1))
    check(cpu, reference, dynamiq_case(flags, (1, 3), numel=2999, dtype=dtype, count=2), garbage=True)
    for offset in (2**39 - 512, 2**40 + 256, 2**55):
        check(cpu, reference, dynamiq_case(flags, (1, 3), numel=700, dtype=dtype, offset=offset))


def test_statistics_of_super_groups_are_as_specified(isa: ctypes.CDLL, reference: ctypes.CDLL) -> None:
    for name, dtype in ((torch.float32, F32), (torch.bfloat16, BF16), (torch.float16, F16)):
        x = torch.from_numpy(values(3, dtype, 5 * 256 + 31).copy()).view(name)
        for residual in (None, torch.from_numpy(values(4, F32, x.numel()).copy()).view(torch.float32)):
            means, squares = native.dynamiq_stats(x, residual)
            given = x.float() if residual is None else x.float() + residual
            for i, part in enumerate(given.split(256)):
                want = torch.empty(2)
                reference.reference_stats(
                    ctypes.c_void_p(part.contiguous().data_ptr()),
                    ctypes.c_int64(part.numel()),
                    ctypes.c_void_p(want[:1].data_ptr()),
                    ctypes.c_void_p(want[1:].data_ptr()),
                )
                torch.testing.assert_close(torch.stack([means[i], squares[i]]), want, rtol=0, atol=0, equal_nan=True)
    assert all(t.numel() == 0 for t in native.dynamiq_stats(torch.empty(0)))


def levels(reference: ctypes.CDLL, bits: int, epsilons: tuple[int, int]) -> torch.Tensor:
    found = torch.empty(1 << (bits - 1))
    reference.reference_levels(
        bits, ctypes.c_uint32(epsilons[0] | epsilons[1] << 16), ctypes.c_void_p(found.data_ptr())
    )
    return found


def test_levels_of_dynamiq_are_the_known_ones(reference: ctypes.CDLL) -> None:
    """The paper's f(epsilon, r), computed apart from the code."""
    known = torch.tensor([0, 0.091539, 0.196425, 0.316604, 0.454304, 0.612081, 0.792861, 1])
    assert float((levels(reference, 4, (2700, 610)) - known).abs().max()) < 1e-6
    eight = levels(reference, 8, (2700, 610))
    for r, value in ((1, 0.004758), (63, 0.380635), (64, 0.388225), (126, 0.987890)):
        assert abs(float(eight[r]) - value) < 1e-6
    for bits in (4, 8):
        even = levels(reference, bits, (0, 0))
        assert torch.equal(even, (torch.arange(len(even), dtype=torch.float64) / (len(even) - 1)).float())
    assert levels(reference, 2, (2700, 610)).tolist() == [0, 1]


@looped("epsilons", [(2700, 610), (0, 0), (3300, 700), (500, 200)])
def test_dynamiq_rounds_to_the_neighbours_without_bias(reference: ctypes.CDLL, epsilons: tuple[int, int]) -> None:
    reference.reference_bias.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_float, ctypes.c_int)
    reference.reference_bias.restype = ctypes.c_double
    units = epsilons[0] | epsilons[1] << 16
    for bits, most in (
        (2, 0.001),
        (4, 0.004 if epsilons[0] <= 2700 else 0.02),
        (8, 0.006 if epsilons[1] <= 610 else 0.02),
    ):
        biases = [reference.reference_bias(bits, units, float(v), 1000) for v in np.linspace(0, 1, 2001)]
        assert max(map(abs, biases)) < most


@looped("ranks", [1, 2, 3, 4, 6, 8])
def test_each_rank_rounds_anywhere_and_one_in_each_cell(reference: ctypes.CDLL, ranks: int) -> None:
    """Places are uniform for every rank, no two ranks share a cell, and where in it they lie is not common."""
    reference.reference_places.argtypes = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p)
    pairs, cell = 1 << 15, 65536 >> (ranks - 1).bit_length()
    words = np.zeros((ranks, pairs), np.uint32)
    for rank in range(ranks):
        reference.reference_places(99, rank | ranks << 16, pairs, words[rank].ctypes.data)
    places = words.view(np.uint16).reshape(ranks, -1).astype(int)  # of elements
    for of_rank in places:
        counts = np.bincount(of_rank // 1024, minlength=64)  # 1024 each, give or take 32
        assert abs(of_rank.mean() - 32767.5) < 6 * 65536 / 12**0.5 / len(of_rank) ** 0.5
        assert ((counts - 1024) ** 2 / 1024).sum() < 64 + 6 * 128**0.5
    cells = np.sort(places // cell, axis=0)
    # A carry between the halves of a word moves one place in thousands on.
    assert (np.diff(cells, axis=0) > 0).all(0).mean() > 0.999
    within = np.corrcoef(places % cell)
    assert ranks == 1 or np.abs(within - np.eye(ranks)).max() < 0.2


def test_widths_that_contradict_themselves_are_refused(cpu: ctypes.CDLL) -> None:
    bits = torch.tensor([8, 4, 2, 2], dtype=torch.uint8)
    spec = native.CodecParams(native.DYNAMIQ, (0, 8, 1 << 16, 0)).spec(1024, torch.float32)
    for place, value in ((0, 2), (4, 0), (8, 3), (8, 16), (16, 1)):
        body = torch.zeros(128 + 128 + 128 + 512, dtype=torch.uint8)
        native.dynamiq_widths(bits, body[:24])
        native.decode(spec, [0, 128, 256, 384], body.unsqueeze(0), torch.empty(1024))
        body[place] = value
        with pytest.raises(WireError, match="contradicts itself"):
            native.decode(spec, [0, 128, 256, 384], body.unsqueeze(0), torch.empty(1024))
    full = torch.full((4,), 8, dtype=torch.uint8)
    native.dynamiq_widths(full, body[:24])
    with pytest.raises(WireError, match="contradicts itself"):
        native.encode(spec, [0, 128, 256, 384], torch.ones(1024), None, body.unsqueeze(0))
    with pytest.raises(FusionLayerError, match="neither"):
        native.dynamiq_widths(full + 1, body[:24])


@looped("offset", [2**32 - 256, 2**40 + 128, 2**62])
def test_element_numbers_have_64_bits(cpu: ctypes.CDLL, reference: ctypes.CDLL, offset: int) -> None:
    check(cpu, reference, int_case(8, 128, STOCHASTIC, F32, 700, count=2, offset=offset))


@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_any_message_is_decoded_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL, dtype: int) -> None:
    for group, flags, bits in itertools.product((32, 128, 2048), (0, HADAMARD), (2, 3, 4, 8)):
        check(cpu, reference, int_case(bits, group, flags, dtype, 4999, count=2), garbage=True)
    for wire in DTYPES.values():
        check(cpu, reference, cast_case(wire, dtype, 4999, count=2), garbage=True)
    for case in block_cases():
        if case.param[1] in (32, 256):
            check(cpu, reference, replace(case, dtype=dtype, numel=2999, count=2), garbage=True)


def test_hostile_scales_are_decoded_as_specified(cpu: ctypes.CDLL, reference: ctypes.CDLL) -> None:
    """Whatever low bits a scale has: sums are the same with a fused multiply-add and without."""
    for case, exponent in hostile_cases():
        check(cpu, reference, case, garbage=True, exponent=exponent)


def test_products_of_codes_and_scales_are_exact(reference: ctypes.CDLL) -> None:
    """Of every code and format whose products are added fused, with scales of all exponents and whatever low bits."""
    reference.reference_inexact_levels.restype = reference.reference_inexact_codes.restype = ctypes.c_int64
    for bits, hadamard in itertools.product((2, 3, 4, 8), (0, 1)):
        assert reference.reference_inexact_levels(bits, hadamard) == 0
    for case in block_cases():
        assert reference.reference_inexact_codes(*case.param) == 0, case


@looped("name", ["bf16", "f16"])
def test_every_16_bit_pattern(isa: ctypes.CDLL, reference: ctypes.CDLL, name: str) -> None:
    dtype = DTYPES[name]
    patterns = Area(np.arange(2**16, dtype=np.uint16).view(np.uint8))
    cases = [cast_case(wire, dtype, 2**16) for wire in DTYPES.values()]
    cases += [int_case(bits, 32, HADAMARD * (bits == 4), dtype, 2**16) for bits in (2, 3, 4, 8)]
    cases += [replace(case, dtype=dtype, numel=2**16) for case in block_cases() if case.param[1] == 32]
    for case in cases:
        encoded = []
        for library in (isa, reference):
            out, spec = Planes(case, 1), case.spec
            assert library.fl_encode(ctypes.byref(spec), patterns.address, None, ctypes.byref(out.messages), None) == OK
            encoded.append(out.area.data)
        assert np.array_equal(*encoded), case


@looped("wire, torch_dtype", [(BF16, torch.bfloat16), (F16, torch.float16)], ids=["bf16", "f16"])
def test_casts_round_as_torch_does(isa: ctypes.CDLL, wire: int, torch_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 300_000, np.uint32)
    bits[::3] = bits[::3] & 0x8FFFFFFF | 0x30000000  # in f16's range more often
    bits[1::3] &= 0xFFFF8000 if wire == BF16 else 0xFFFFF000  # halfway between two values more often
    x = torch.from_numpy(bits.view(np.float32))
    case = cast_case(wire, F32, x.numel())
    out, spec = Planes(case, 1), case.spec
    assert isa.fl_encode(ctypes.byref(spec), x.data_ptr(), None, ctypes.byref(out.messages), None) == OK
    got = torch.from_numpy(out.area.data[: 2 * x.numel()].view(np.int16)).view(torch_dtype)
    want = x.to(torch_dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0, 1.0, -1.0), want.nan_to_num(0.0, 1.0, -1.0))
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.view(torch.int16)[~got.isnan()], want.view(torch.int16)[~want.isnan()])


def decode_into(library: ctypes.CDLL, case: Case, planes: Planes, first: int, out: int) -> None:
    """Decode messages ``first`` to ``first + case.count - 1`` of ``planes`` to the address ``out``."""
    spec, source = case.spec, planes.messages
    shifted = (ctypes.c_void_p * native.MAX_PLANES)(*(p and p + first * source.stride for p in source.plane))
    messages = native.Messages(shifted, source.stride, case.count)
    assert library.fl_decode(ctypes.byref(spec), ctypes.byref(messages), out, None) == OK


@looped("numel", tiered([1 << 20, (1 << 20) + 1], lambda numel: numel % 2 == 1))
@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_large_results_are_like_small_ones(isa: ctypes.CDLL, dtype: int, numel: int) -> None:
    """From 32 MiB on results go past the caches: those of one call with many messages and of many calls are equal."""
    count = (33 << 20) // (numel * itemsize(dtype)) + 1
    small, x = int_case(8, 128, HADAMARD, dtype, numel), np.frombuffer(values(1, dtype, numel), np.uint8)
    large, spec = replace(small, count=count), small.spec
    planes = Planes(large, count)
    one = native.Messages(planes.messages.plane, planes.messages.stride, 1)
    assert isa.fl_encode(ctypes.byref(spec), x.ctypes.data, None, ctypes.byref(one), None) == OK
    rows = planes.area.data.reshape(count, -1)
    rows[1:] = rows[0]
    nbytes = numel * itemsize(dtype)
    whole, part = Area(np.zeros(count * nbytes, np.uint8)), Area(np.zeros(nbytes, np.uint8))
    decode_into(isa, large, planes, 0, whole.address)
    decode_into(isa, small, planes, count - 1, part.address)
    assert (whole.data.reshape(count, -1) == part.data).all()
    assert whole.guards_hold()


@looped("wire", DTYPES.values(), ids=DTYPES)
def test_large_casts_are_like_small_ones(isa: ctypes.CDLL, wire: int) -> None:
    numel = (1 << 20) + 3
    count = (33 << 20) // (numel * itemsize(wire)) + 1
    dtype = F16 if wire == F32 else F32
    x = np.tile(values(1, dtype, numel), count)
    planes = [Planes(cast_case(wire, dtype, numel), n) for n in (count, 1)]
    spec = cast_case(wire, dtype, numel).spec
    for each in planes:
        assert isa.fl_encode(ctypes.byref(spec), x.ctypes.data, None, ctypes.byref(each.messages), None) == OK
        assert each.area.guards_hold()
    assert (planes[0].area.data.reshape(count, -1) == planes[1].area.data).all()


# ---- what must change nothing ---------------------------------------------------------------------------------------

MIXED = (
    int_case(4, 128, HADAMARD | STOCHASTIC, F32, LARGE),
    int_case(8, 4096, 0, BF16, LARGE // 3, count=3),
    cast_case(BF16, F32, LARGE // 2, count=2),
    cast_case(F32, F32, LARGE),
    block_case("e4m3", 256, native.SCALE_F32, native.BLOCK_HADAMARD, F32, LARGE),
    block_case("e3m2", 32, native.SCALE_E8M0, 0, BF16, LARGE // 3, count=3),
    block_case("e5m2", 32, native.SCALE_MESSAGE, 0, F16, LARGE // 2, count=2),
    onebit_case(1024, F32, LARGE),
)
Wanted = dict[Case, list[list[Bytes]]]


@pytest.fixture(scope="module")
def wanted(reference: ctypes.CDLL) -> Wanted:
    return {case: list(results(reference, case, reference)) for case in MIXED}


@looped("threads", [1, 2, 3])
def test_the_number_of_threads(cpu: ctypes.CDLL, wanted: Wanted, threads: int) -> None:
    native.set_threads(threads)
    for case, want in wanted.items():
        assert_same(results(cpu, case, cpu), want, case)


def test_calls_from_several_threads_at_once(cpu: ctypes.CDLL, wanted: Wanted) -> None:
    native.set_threads(3)
    errors: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(10):
                assert_same(results(cpu, case, cpu), wanted[case], case)
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=work, args=(case,)) for case in MIXED[:3]]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not errors


def test_a_forked_child_has_its_own_threads(cpu: ctypes.CDLL, wanted: Wanted) -> None:
    def use_threads() -> None:
        assert_same(results(cpu, MIXED[0], cpu), wanted[MIXED[0]], MIXED[0])

    def child() -> None:
        assert len(os.listdir("/proc/self/task")) == 1
        use_threads()
        assert len(os.listdir("/proc/self/task")) == 3

    native.set_threads(3)
    use_threads()
    assert in_child(child) == 0
    use_threads()


def subnormals_survive() -> bool:
    return float(torch.tensor([1e-40]) * 0.5) != 0.0


def test_the_callers_flushing_of_subnormals(isa: ctypes.CDLL, reference: ctypes.CDLL) -> None:
    cases = [int_case(8, 32, HADAMARD, F16, 3000), cast_case(F16, F32, 3000), cast_case(F32, F16, 3000), MIXED[2]]
    cases += [replace(case, dtype=F16, numel=1000) for case in block_cases() if case.param[1] == 64]
    wanted = [list(results(reference, case, reference)) for case in cases]
    native.set_threads(2)
    try:
        flushing = torch.set_flush_denormal(True)
        got = [list(results(isa, case, isa)) for case in cases]
        assert subnormals_survive() != flushing, "a call changed the caller's mode"
    finally:
        torch.set_flush_denormal(False)
    for case, g, w in zip(cases, got, wanted, strict=True):
        assert_same(g, w, case)


def test_threads_started_while_subnormals_are_flushed(cpu: ctypes.CDLL, reference: ctypes.CDLL) -> None:
    copied, cast = cast_case(F32, F32, LARGE), cast_case(F16, F32, LARGE)
    wanted = [list(results(reference, case, reference)) for case in (copied, cast)]

    def child() -> None:  # a forked process starts its own threads, here for the plain copy
        torch.set_flush_denormal(True)
        for case, want in zip((copied, cast), wanted, strict=True):
            assert_same(results(cpu, case, cpu), want, case)

    native.set_threads(3)
    assert in_child(child) == 0


def test_the_callers_rounding_mode(isa: ctypes.CDLL) -> None:
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
    libm = ctypes.CDLL("libm.so.6")
    case = int_case(4, 128, HADAMARD, F32, LARGE)
    spec, x = case.spec, Area(values(0, F32, LARGE))
    plain, upwards = Planes(case, 1), Planes(case, 1)
    native.set_threads(2)
    assert isa.fl_encode(ctypes.byref(spec), x.address, None, ctypes.byref(plain.messages), None) == OK
    before = libm.fegetround()
    try:
        libm.fesetround(upward)
        assert isa.fl_encode(ctypes.byref(spec), x.address, None, ctypes.byref(upwards.messages), None) == OK
        assert libm.fegetround() == upward, "a call changed the caller's mode"
    finally:
        libm.fesetround(before)
    assert np.array_equal(plain.area.data, upwards.area.data)


def test_nothing_beyond_the_input_is_read(isa: ctypes.CDLL) -> None:
    """The last element of x, and then of a message, ends where memory ends."""
    page, pages = 4096, 8
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base = libc.mmap(None, (pages + 1) * page, 3, 0x22, -1, 0)
    end = base + pages * page
    assert libc.mprotect(end, page, 0) == 0

    def body() -> None:
        for numel, dtype in itertools.product((1, 33, 255, 1025), DTYPES.values()):
            for case in (
                int_case(4, 32, HADAMARD, dtype, numel),
                cast_case(BF16, dtype, numel),
                block_case("e2m3", 32, native.SCALE_BF16, 0, dtype, numel),
                block_case("e4m3", 64, native.SCALE_DUAL, native.BLOCK_HADAMARD, dtype, numel),
                chunked_case(3, 64, 9, 0.5, dtype, numel),
                onebit_case(64, dtype, numel),
                qsdp_case(4, 32, 0, dtype, numel),
            ):
                spec, out = case.spec, Planes(case, 1)
                x = end - numel * itemsize(dtype)
                assert isa.fl_encode(ctypes.byref(spec), x, None, ctypes.byref(out.messages), None) == OK
                message, nbytes = Planes(case, 1).messages, case.plane_bytes[-1]
                last = len(case.plane_bytes) - 1
                message.plane[last] = (end - nbytes) // 16 * 16
                assert isa.fl_decode_sum(ctypes.byref(spec), ctypes.byref(message), x, 1, None) == OK

    assert in_child(body) == 0


# ---- refusals -------------------------------------------------------------------------------------------------------

GOOD = int_case(4, 128, 0, F32, 64)
WRONG_SPECS = {
    "dtype": (replace(GOOD, dtype=3), BAD_ARGUMENT),
    "wire dtype": (cast_case(3, F32, 64), BAD_ARGUMENT),
    "unused parameter": (Case(native.CAST, (F32, 1), F32, 64), BAD_ARGUMENT),
    "bits": (int_case(5, 128, 0, F32, 64), BAD_ARGUMENT),
    "group not a power of two": (int_case(4, 96, 0, F32, 64), BAD_ARGUMENT),
    "group too small": (int_case(4, 16, 0, F32, 64), BAD_ARGUMENT),
    "group too large": (int_case(4, 8192, 0, F32, 64), BAD_ARGUMENT),
    "offset inside a group": (replace(GOOD, offset=64), BAD_ARGUMENT),
    "negative offset": (replace(GOOD, offset=-128), BAD_ARGUMENT),
    "negative numel": (replace(GOOD, numel=-1), BAD_ARGUMENT),
    "absurd numel": (replace(GOOD, numel=2**62), BAD_ARGUMENT),
    "flag": (int_case(4, 128, 8, F32, 64), UNSUPPORTED),
    "full range of two bits": (int_case(2, 128, 4, F32, 64), UNSUPPORTED),
    "full range rotated": (int_case(4, 128, 5, F32, 64), UNSUPPORTED),
    "codec": (Case(99, (0,), F32, 64), UNSUPPORTED),
    "format": (Case(native.BLOCK, (6, 32, 0, 0), F32, 64), BAD_ARGUMENT),
    "kind of scale": (block_case("e4m3", 32, 5, 0, F32, 64), BAD_ARGUMENT),
    "block too large": (block_case("e4m3", 1024, 0, 0, F32, 64), BAD_ARGUMENT),
    "block not a power of two": (block_case("e4m3", 48, 0, 0, F32, 64), BAD_ARGUMENT),
    "unknown flag": (block_case("e4m3", 32, 0, 2, F32, 64), UNSUPPORTED),
    "rotated small floats": (block_case("e2m1", 32, 0, 1, F32, 64), UNSUPPORTED),
    "rotated with E8M0": (block_case("e4m3", 32, native.SCALE_E8M0, 1, F32, 64), UNSUPPORTED),
    "bits of qsdp": (qsdp_case(2, 64, 0, F32, 64), BAD_ARGUMENT),
    "a group of qsdp that is too large": (qsdp_case(8, 2048, 0, F32, 64), BAD_ARGUMENT),
    "offset inside a group of qsdp": (qsdp_case(8, 128, 0, F32, 64, offset=64), BAD_ARGUMENT),
    "flag of qsdp": (qsdp_case(8, 128, 2, F32, 64), UNSUPPORTED),
    "integers with E8M0": (block_case("int8", 32, native.SCALE_E8M0, 0, F32, 64), UNSUPPORTED),
}


def messages(address: int, stride: int = 4096, count: int = 1) -> native.Messages:
    return native.Messages((ctypes.c_void_p * native.MAX_PLANES)(*[address] * native.MAX_PLANES), stride, count)


@looped("name", WRONG_SPECS)
def test_a_wrong_spec_is_refused(cpu: ctypes.CDLL, name: str) -> None:
    case, status = WRONG_SPECS[name]
    area, spec = Area(np.full(16384, GUARD, np.uint8)), case.spec
    planes, data = ctypes.byref(messages(area.address)), area.address + 8192
    assert cpu.fl_encode(ctypes.byref(spec), data, None, planes, None) == status
    assert cpu.fl_decode(ctypes.byref(spec), planes, data, None) == status
    assert cpu.fl_decode_sum(ctypes.byref(spec), planes, data, 0, None) == status
    assert cpu.fl_recode(ctypes.byref(spec), planes, None, None, planes, None) == status
    assert (area.data == GUARD).all()


def test_wrong_pointers_are_refused(cpu: ctypes.CDLL) -> None:
    area, spec = Area(np.full(65536, GUARD, np.uint8)), ctypes.byref(GOOD.spec)
    at, data = area.address, area.address + 32768
    good = messages(at)
    bad = {
        "no plane": messages(0),
        "misaligned plane": messages(at + 8),
        "misaligned stride": messages(at, 4100, 2),
        "overlapping messages": messages(at, 16, 2),
        "negative count": messages(at, count=-1),
    }
    for planes in bad.values():
        assert cpu.fl_encode(spec, data, None, ctypes.byref(planes), None) == BAD_ARGUMENT
        assert cpu.fl_decode(spec, ctypes.byref(planes), data, None) == BAD_ARGUMENT
        assert cpu.fl_decode_sum(spec, ctypes.byref(planes), data, 0, None) == BAD_ARGUMENT
        assert cpu.fl_recode(spec, ctypes.byref(planes), None, None, ctypes.byref(good), None) == BAD_ARGUMENT
        assert cpu.fl_recode(spec, ctypes.byref(good), None, None, ctypes.byref(planes), None) == BAD_ARGUMENT
    planes = ctypes.byref(good)
    two = ctypes.byref(messages(at, count=2))
    for wrong in (None, data + 2):
        assert cpu.fl_encode(spec, wrong, None, planes, None) == BAD_ARGUMENT
        assert cpu.fl_decode(spec, planes, wrong, None) == BAD_ARGUMENT
        assert cpu.fl_decode_sum(spec, planes, wrong, 0, None) == BAD_ARGUMENT
    assert cpu.fl_encode(spec, data, data + 2, planes, None) == BAD_ARGUMENT
    assert cpu.fl_recode(spec, planes, data + 2, None, planes, None) == BAD_ARGUMENT
    assert cpu.fl_recode(spec, planes, None, data + 2, planes, None) == BAD_ARGUMENT
    assert cpu.fl_recode(spec, planes, None, None, two, None) == BAD_ARGUMENT
    longer = ctypes.byref(replace(GOOD, numel=GOOD.numel + 1).spec)
    assert cpu.fl_recode_from(longer, planes, spec, None, planes, None) == BAD_ARGUMENT
    assert cpu.fl_recode_from(spec, planes, spec, None, two, None) == BAD_ARGUMENT
    assert cpu.fl_recode_from(spec, planes, spec, data + 2, planes, None) == BAD_ARGUMENT
    assert cpu.fl_encode_difference(spec, data + 2, data, planes, None) == BAD_ARGUMENT
    assert cpu.fl_encode_difference(spec, data, None, planes, None) == BAD_ARGUMENT
    assert cpu.fl_encode(None, data, None, planes, None) == BAD_ARGUMENT
    assert cpu.fl_encode(spec, data, None, None, None) == BAD_ARGUMENT
    assert (area.data == GUARD).all()


def test_nothing_needs_no_pointers(cpu: ctypes.CDLL) -> None:
    none, empty = ctypes.byref(messages(0)), ctypes.byref(replace(GOOD, numel=0).spec)
    assert cpu.fl_encode(empty, None, None, none, None) == OK
    assert cpu.fl_decode(empty, none, None, None) == OK
    assert cpu.fl_decode_sum(empty, none, None, 0, None) == OK
    assert cpu.fl_recode(empty, none, None, None, none, None) == OK


def test_settings(cpu: ctypes.CDLL) -> None:
    assert "baseline" in ISAS
    assert cpu.fl_select_isa(b"avx1024") == UNSUPPORTED
    assert cpu.fl_select_isa(b"") == UNSUPPORTED
    assert cpu.fl_select_isa(None) == BAD_ARGUMENT
    assert native.isa() == ISAS[0], "the first one built that the CPU has is the best"
    assert cpu.fl_set_threads(0) == BAD_ARGUMENT
    facts = dict(line.split("=", 1) for line in cpu.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION) and facts["kind"] == "cpu" and facts["compiler"]
    assert set(ISAS) <= set(facts["isas"].split(","))
    assert cpu.fl_last_error() == b""


# ---- checksum -------------------------------------------------------------------------------------------------------


def crc32c_by_bits(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_of_known_messages(isa: ctypes.CDLL) -> None:
    # RFC 3720, appendix B.4, and the check value of the CRC catalogue.
    assert native.crc32c(b"123456789") == 0xE3069283
    assert native.crc32c(bytes(32)) == 0x8A9136AA
    assert native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert native.crc32c(bytes(range(32))) == 0x46DD794E
    assert native.crc32c(b"") == 0


def test_crc32c_of_any_length_and_alignment(isa: ctypes.CDLL) -> None:
    data = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()
    for begin, end in ((0, 7), (1, 8), (3, 100), (0, 6143), (1, 6145), (0, 6144), (5, 20_000)):
        assert native.crc32c(data[begin:end]) == crc32c_by_bits(data[begin:end])
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for cut in (1, 8, 6144, 13_001):
        assert native.crc32c(tensor[cut:], native.crc32c(tensor[:cut])) == native.crc32c(data)


# ---- stochastic rounding --------------------------------------------------------------------------------------------

N = 1 << 20
SEEDS = (0, 1, 2, 3, 1 << 32, (1 << 32) + 1, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF)
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def noise(reference: ctypes.CDLL) -> Callable[[int, int], Floats]:
    @lru_cache(maxsize=32)
    def draw(seed: int, first: int) -> Floats:
        out = np.empty(N, np.float32)
        reference.reference_noise(seed, first, N, out.ctypes.data)
        return out.astype(np.float64)

    return draw


def excess(cells: npt.NDArray[np.int64], count: int) -> float:
    """Return how far ``cells`` are from hitting each of ``count`` numbers equally often, in standard deviations."""
    expected = len(cells) / count
    chi2 = float(((np.bincount(cells, minlength=count) - expected) ** 2).sum() / expected)
    return abs(chi2 - (count - 1)) / math.sqrt(2 * (count - 1))


def cells(v: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return in which of ``count`` equal parts of [-0.5, 0.5) each value is."""
    return ((v + 0.5) * count).astype(np.int64)


def dependence(a: Floats, b: Floats) -> float:
    """Return how far pairs of ``a`` and ``b`` are from uniform on the square, in standard deviations."""
    return excess(cells(a, 32) * 32 + cells(b, 32), 1024)


def test_noise_is_uniform(noise: Callable[[int, int], Floats]) -> None:
    for seed, first in itertools.product(SEEDS, (0, 1 << 40)):
        v = noise(seed, first)
        assert v.min() >= -0.5 and v.max() < 0.5
        assert abs(v.mean()) < 5 * math.sqrt(1 / 12 / N), f"seed {seed}"
        assert excess(cells(v, 1024), 1024) < 5, f"seed {seed}, high bits"
        assert excess(cells(v, 1 << 16) & 255, 256) < 5, f"seed {seed}, low bits"
        assert abs(v.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / N), f"seed {seed}"


def test_the_two_elements_of_a_hash_are_independent(noise: Callable[[int, int], Floats]) -> None:
    for seed, first in itertools.product(SEEDS, (0, 1 << 40)):
        pairs = noise(seed, first).reshape(-1, 2, 16)
        a, b = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
        assert abs(12 * float(a @ b) / math.sqrt(N / 2)) < 5, f"seed {seed}"
        assert abs(180 * float((a * a - 1 / 12) @ (b * b - 1 / 12)) / math.sqrt(N / 2)) < 5, f"seed {seed}"
        assert dependence(a, b) < 5, f"seed {seed}"
        for shift in (1, 3, 6):  # low bits of one, high bits of the other
            low = (a + 0.5) * (1 << shift + 5) % 1 - 0.5
            assert dependence(low, b) < 5, f"seed {seed}"
            assert dependence(b, low) < 5 and dependence((b + 0.5) * (1 << shift + 5) % 1 - 0.5, a) < 5, f"seed {seed}"


def test_of_all_random_bits_rounding_has_no_bias(reference: ctypes.CDLL) -> None:
    """Over the 65,536 numbers that an element may draw the mean is the value, but for the units they count."""
    reference.reference_mean.argtypes = (ctypes.c_int, ctypes.c_float)
    reference.reference_mean.restype = ctypes.c_double
    for bits, top in ((2, 1.5), (3, 3.5), (4, 7), (8, 127)):
        for value in (*np.linspace(-top, top, 101), -0.3, 2.0**-16, 2.0**-17, 0.1, top * (1 - 2.0**-23)):
            exact = float(np.float32(value))
            assert abs(reference.reference_mean(bits, exact) - exact) <= 2.0**-17, f"{bits} bits, {value}"


@looped("lag", [1, 2, 16, 31, 32, 64, 128, 4096, 65536])
def test_noise_of_different_elements_is_independent(noise: Callable[[int, int], Floats], lag: int) -> None:
    for seed in SEEDS:
        v = noise(seed, 0)
        assert dependence(v[:-lag], v[lag:]) < 5, f"seed {seed}"


def test_noise_of_different_seeds_is_independent(noise: Callable[[int, int], Floats]) -> None:
    streams = {(seed, 0): noise(seed, 0) for seed in SEEDS}
    streams |= {(5, high << 32): noise(5, high << 32) for high in (0, 1, 2, 1000)}
    for (a, x), (b, y) in itertools.combinations(streams.items(), 2):
        assert abs(12 * float(x @ y) / math.sqrt(N)) < 5, f"streams {a} and {b} are correlated"
        assert dependence(x, y) < 5, f"streams {a} and {b} depend on each other"


def test_noise_never_leaves_the_range(isa: ctypes.CDLL, noise: Callable[[int, int], Floats]) -> None:
    """No magnitude goes beyond the outermost level, with the least and the largest noise, whatever its scale became."""
    places = []
    for extreme in (0.5, 65535.5):
        draws = ((first, np.flatnonzero(noise(7, first) == extreme / 65536 - 0.5)) for first in range(0, 128 * N, N))
        places.append(next(first + int(found[0]) for first, found in draws if found.size))
    rng = np.random.default_rng(2)
    short = 7 * rng.integers(1 << 15, 1 << 16, 40)
    largest = np.array([1.0, 1 - 2.0**-23, 2.0**-100, *(rng.random(40) + 1), *short])
    for (bits, top), place in itertools.product(((2, 1.5), (3, 3.5), (4, 7), (8, 127)), places):
        x = np.resize(np.array([1, -1], np.float32), 128) * largest.astype(np.float32)[:, None]
        for row in x:
            case = int_case(bits, 128, STOCHASTIC, F32, 128, seed=7, offset=place // 128 * 128)
            planes, spec, out = Planes(case, 1), case.spec, np.empty(128, np.float32)
            assert isa.fl_encode(ctypes.byref(spec), row.ctypes.data, None, ctypes.byref(planes.messages), None) == OK
            assert isa.fl_decode(ctypes.byref(spec), ctypes.byref(planes.messages), out.ctypes.data, None) == OK
            steps = out / planes.area.data[:4].view(np.float32)[0] / (1 if bits >= 4 else 2)
            assert np.abs(steps).max() <= top
            assert (np.abs(steps - np.sign(row) * top) <= 1).all()


@looped("bits", [2, 3, 4, 8])
def test_stochastic_rounding_is_unbiased(cpu: ctypes.CDLL, bits: int) -> None:
    qmax, below = {2: (1.5, 0.5), 3: (3.5, 0.5), 4: (7, 0), 8: (127, 0)}[bits]
    for value in (0.1, 0.25, 0.5, 0.9, -0.3, min(2.7, qmax - 0.2), qmax - 0.4):
        x = np.full(N, value, np.float32)
        x[::128] = qmax  # the scale of every group is 1
        case = int_case(bits, 128, STOCHASTIC, F32, N, seed=11)
        planes, spec, out = Planes(case, 1), case.spec, np.empty(N, np.float32)
        assert cpu.fl_encode(ctypes.byref(spec), x.ctypes.data, None, ctypes.byref(planes.messages), None) == OK
        assert cpu.fl_decode(ctypes.byref(spec), ctypes.byref(planes.messages), out.ctypes.data, None) == OK
        rounded = out.reshape(-1, 128)[:, 1:].astype(np.float64)
        lower = math.floor(value - below) + below
        fraction = value - lower
        assert set(np.unique(rounded)) == ({lower, lower + 1} if fraction else {lower})
        sigma = math.sqrt(fraction * (1 - fraction) / rounded.size)
        assert abs(rounded.mean() - value) <= 5 * sigma, f"{value} becomes {rounded.mean()} on average"
