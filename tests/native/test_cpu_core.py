"""What must change nothing in the CPU library: threads, forks, the caller's float environment, where memory ends."""

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.base.errors import FusionLayerError, WireError
from tests.loops import looped
from tests.native.abi import (
    BAD_ARGUMENT,
    BF16,
    DTYPES,
    F16,
    F32,
    HADAMARD,
    ISAS,
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
    each_isa,
    fenced,
    in_child,
    int_case,
    itemsize,
    onebit_case,
    qsdp_case,
    results,
    threads,
    values,
)

LARGE = 200_001  # elements: more than a call keeps on one thread
MIXED = (
    int_case(4, 128, HADAMARD | STOCHASTIC, F32, LARGE),
    int_case(8, 4096, 0, BF16, LARGE // 3, count=3),
    cast_case(BF16, F32, LARGE // 2, count=2),
    cast_case(F32, F32, LARGE),
    cast_case(F16, F32, LARGE),
    block_case("e4m3", 256, native.SCALE_F32, native.BLOCK_HADAMARD, F32, LARGE),
    block_case("e3m2", 32, native.SCALE_E8M0, 0, BF16, LARGE // 3, count=3),
    block_case("e5m2", 32, native.SCALE_MESSAGE, 0, F16, LARGE // 2, count=2),
    onebit_case(1024, F32, LARGE),
)
Wanted = dict[Case, list[list[Bytes]]]


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    """Return what one thread makes of some cases."""
    cases = [*MIXED, int_case(8, 32, HADAMARD, F16, 3000)]
    cases += [replace(case, dtype=F16, numel=1000) for case in block_cases() if case.param[1] == 64]
    with threads(1):
        return {case: list(results(native.cpu(), case, native.cpu())) for case in cases}


def assert_all_same(wanted: Wanted, cases: Sequence[Case] = MIXED) -> None:
    for case in cases:
        assert_same(results(native.cpu(), case, native.cpu()), wanted[case], case)


def test_the_number_of_threads_and_of_callers(wanted: Wanted) -> None:
    errors: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(10):
                assert_all_same(wanted, [case])
        except BaseException as error:
            errors.append(error)

    with threads(2):
        assert_all_same(wanted)
    with threads(3):
        assert_all_same(wanted)
        callers = [threading.Thread(target=work, args=(case,)) for case in MIXED[:3]]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not errors


def test_a_forked_child_has_its_own_threads(wanted: Wanted) -> None:
    def child() -> None:
        assert len(os.listdir("/proc/self/task")) == 1
        assert_all_same(wanted, MIXED[:1])
        assert len(os.listdir("/proc/self/task")) == 3

    with threads(3):
        assert_all_same(wanted, MIXED[:1])
        assert in_child(child) == 0
        assert_all_same(wanted, MIXED[:1])


@looped("rounds_up", [False, True])
def test_the_callers_float_environment_changes_nothing_and_stays(wanted: Wanted, rounds_up: bool) -> None:
    """Of the caller, whose subnormals are flushed, and of threads that are started meanwhile, in a forked process."""
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()] if rounds_up else 0
    libm = ctypes.CDLL("libm.so.6")

    def child() -> None:
        flushes = torch.set_flush_denormal(True)
        libm.fesetround(upward)
        # Of nothing that numpy rounds here: its values were made before.
        assert_all_same(wanted, MIXED if rounds_up else list(wanted))
        assert libm.fegetround() == upward and (float(torch.tensor([1e-40]) * 0.5) == 0.0) == flushes

    for _ in each_isa():
        with threads(2):
            assert in_child(child) == 0


def test_nothing_beyond_the_input_is_read() -> None:
    """The last element of x, and then of a message, ends where memory ends."""

    def child(end: int) -> None:
        cpu = native.cpu()
        for numel, dtype in product((1, 33, 255, 1025), DTYPES.values()):
            for case in (
                int_case(4, 32, HADAMARD, dtype, numel),
                cast_case(BF16, dtype, numel),
                block_case("e2m3", 32, native.SCALE_BF16, 0, dtype, numel),
                block_case("e4m3", 64, native.SCALE_DUAL, native.BLOCK_HADAMARD, dtype, numel),
                chunked_case(3, 64, 9, 0.5, dtype, numel),
                onebit_case(64, dtype, numel),
                qsdp_case(4, 32, 0, dtype, numel),
            ):
                spec, out, x = ctypes.byref(case.spec), Planes(case, 1), end - numel * itemsize(dtype)
                assert cpu.fl_encode(spec, x, None, ctypes.byref(out.messages), None) == OK
                message, last = Planes(case, 1).messages, len(case.plane_bytes) - 1
                message.plane[last] = (end - case.plane_bytes[last]) // 16 * 16
                assert cpu.fl_decode_sum(spec, ctypes.byref(message), x, 1, None) == OK

    for _ in each_isa():
        with fenced() as end:
            assert in_child(lambda end=end: child(end)) == 0  # type: ignore[misc]


@looped("dtype", DTYPES.values())
def test_large_results_are_like_small_ones(dtype: int) -> None:
    """From 32 MiB on results go past the caches: those of one call with many messages and of many calls are equal."""
    numel, cpu = (1 << 20) + 3, native.cpu()
    count = (33 << 20) // (numel * itemsize(dtype)) + 1
    x = values(1, F16 if dtype == F32 else F32, numel)
    every = np.tile(x, count)
    for _ in each_isa():
        for case in (int_case(8, 128, HADAMARD, dtype, numel), cast_case(dtype, F16 if dtype == F32 else F32, numel)):
            given = x if case.codec == native.CAST else values(1, dtype, numel)
            one, many, spec = Planes(case, 1), Planes(case, count), ctypes.byref(case.spec)
            assert cpu.fl_encode(spec, given.ctypes.data, None, ctypes.byref(one.messages), None) == OK
            if case.codec == native.CAST:
                assert cpu.fl_encode(spec, every.ctypes.data, None, ctypes.byref(many.messages), None) == OK
                assert (many.area.data.reshape(count, -1) == one.area.data).all() and many.area.guards_hold()
            many.area.data.reshape(count, -1)[:] = one.area.data
            size = given.nbytes
            whole, part = Area(np.zeros(count * size, np.uint8)), Area(np.zeros(size, np.uint8))
            assert cpu.fl_decode(spec, ctypes.byref(many.messages), whole.address, None) == OK
            assert cpu.fl_decode(spec, ctypes.byref(one.messages), part.address, None) == OK
            assert (whole.data.reshape(count, -1) == part.data).all() and whole.guards_hold()


def test_widths_that_contradict_themselves_are_refused() -> None:
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


def test_settings() -> None:
    cpu = native.cpu()
    assert cpu.fl_select_isa(b"avx1024") == cpu.fl_select_isa(b"") == UNSUPPORTED
    assert cpu.fl_select_isa(None) == cpu.fl_set_threads(0) == BAD_ARGUMENT
    assert libraries.isa() == ISAS[0], "the first one built that the CPU has is the best"
    facts = dict(line.split("=", 1) for line in cpu.fl_build_info().decode().splitlines())
    assert facts["abi"] == str(libraries.ABI_VERSION) and facts["kind"] == "cpu" and facts["compiler"]
    assert set(ISAS) <= set(facts["isas"].split(",")) and cpu.fl_last_error() == b""


# ---- checksum -------------------------------------------------------------------------------------------------------


def crc32c_by_bits(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c() -> None:
    """RFC 3720, appendix B.4, and the check value of the CRC catalogue; then any length and alignment."""
    known = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}
    data = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()
    for begin, end in ((0, 7), (1, 8), (3, 100), (0, 6143), (1, 6145), (0, 6144), (5, 20_000)):
        known[data[begin:end]] = crc32c_by_bits(data[begin:end])
    tensor, whole = torch.frombuffer(bytearray(data), dtype=torch.uint8), crc32c_by_bits(data)
    for isa in each_isa():
        assert native.crc32c(b"") == 0
        assert all(native.crc32c(message) == crc for message, crc in known.items()), isa
        for cut in (1, 8, 6144, 13_001):
            assert native.crc32c(tensor[cut:], native.crc32c(tensor[:cut])) == whole, isa
