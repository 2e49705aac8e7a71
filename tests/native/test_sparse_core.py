"""Sparse messages of the CPU core, on every instruction set, and of the CUDA kernels on the host, are as specified."""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusionlayer import native
from fusionlayer.base import libraries
from fusionlayer.base.errors import FusionLayerError, WireError
from fusionlayer.native import selection
from tests.codecs import threshold_oracle as formulas
from tests.codecs.arithmetic import random_bits
from tests.loops import looped
from tests.native import sparse_oracle as oracle
from tests.native.abi import (
    BAD_ARGUMENT,
    BF16,
    DTYPES,
    F16,
    F32,
    ISAS,
    OK,
    UNSUPPORTED,
    Area,
    Bytes,
    fenced,
    in_child,
    itemsize,
    threads,
    values,
)
from tests.native.sparse_oracle import BITMAP, BYTE, INF, SHORT, Encoded, Floats, Shape
from tests.tiers import long, tiered

BAD_MESSAGE = native.BAD_MESSAGE
FORMS = {"bitmap": BITMAP, "byte": BYTE, "short": SHORT}
LENGTHS = (0, 1, 2, 31, 33, 64, 255, 256, 257, 4095, 4097, 65535, 65536, 65537)
LARGE = 140_001
SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 2**32 - 1000

every_form = looped("form", FORMS.values())


HOST_KERNELS = {"cuda on host": "plain", "cuda on host, sanitized": "sanitized"}


@pytest.fixture(
    params=[
        *tiered(ISAS, lambda name: name in (ISAS[0], ISAS[-1])),
        "cuda on host",
        pytest.param("cuda on host, sanitized", marks=long),
    ]
)
def library(request: pytest.FixtureRequest, host_kernels: Callable[[str], ctypes.CDLL]) -> Iterator[ctypes.CDLL]:
    """Return one library after the other, the CPU's once for each instruction set."""
    if request.param in HOST_KERNELS:
        yield host_kernels(HOST_KERNELS[request.param])
        return
    libraries.select_isa(request.param)
    yield native.cpu()
    libraries.select_isa("auto")


@dataclass(frozen=True)
class Case:
    """One call of ``fl_sparse_encode``."""

    shape: Shape
    threshold: int
    ties: int = -1
    x: int | None = None
    """dtype of what is added first."""
    scale: float = 0.3
    random: bool = False
    misaligned: bool = False
    chosen: bool = False
    """Threshold and ties lie in memory."""

    @property
    def spec(self) -> native.Spec:
        shape, flags = self.shape, selection.SPARSE_RANDOM if self.random else 0
        param = (ctypes.c_uint32 * 4)(shape.form, shape.values, shape.capacity, flags)
        return native.Spec(native.SPARSE, self.x or F32, param, SEED, OFFSET, shape.numel)

    def area(self, raw: Bytes, size: int = 4) -> Area:
        return Area(raw, size if self.misaligned else 0)


class Message:
    """The planes of ``count`` messages, guarded, with gaps between them."""

    def __init__(self, shape: Shape, count: int = 1) -> None:
        self.shape = shape
        self.offsets = [0, *itertools.accumulate(-(-nbytes // 16) * 16 + 16 for nbytes in shape.plane_bytes)]
        self.stride = self.offsets[-1]
        self.area = Area(np.full(self.stride * count, 0xA5, np.uint8))
        pointers = (ctypes.c_void_p * native.MAX_PLANES)(*(self.area.address + at for at in self.offsets[:4]))
        self.messages = native.Messages(pointers, self.stride, count)

    def planes(self, i: int = 0) -> list[Bytes]:
        start = i * self.stride
        return [
            self.area.data[start + at : start + at + nbytes]
            for at, nbytes in zip(self.offsets, self.shape.plane_bytes, strict=False)
        ]

    def gaps_hold(self) -> bool:
        data = self.area.data.reshape(-1, self.stride) if self.stride else self.area.data.reshape(1, -1)
        gaps = np.ones(self.stride, bool)
        for at, nbytes in zip(self.offsets, self.shape.plane_bytes, strict=False):
            gaps[at : at + nbytes] = False
        return bool((data[:, gaps] == 0xA5).all()) and self.area.guards_hold()


def choice_of(case: Case) -> tuple[int, int, ctypes.Array[ctypes.c_int64] | None]:
    """Return threshold, ties and choice as ``fl_sparse_encode`` takes them."""
    if not case.chosen:
        return case.threshold, case.ties, None
    return 0, 0, (ctypes.c_int64 * 2)(case.threshold, case.ties)


def workspace(library: ctypes.CDLL, verb: int, numel: int) -> Area:
    nbytes = library.fl_workspace_bytes(verb, numel)
    assert 0 <= nbytes <= numel // 2 + 65536
    return Area(np.full(max(16, nbytes), 0xC3, np.uint8))


def encode(library: ctypes.CDLL, case: Case, acc: Floats, x: Bytes | None, clear: Floats | None) -> Encoded:
    shape, out = case.shape, Message(case.shape)
    areas = {
        "acc": case.area(acc.view(np.uint8)),
        "x": None if x is None or case.x is None else case.area(x, itemsize(case.x)),
        "clear": None if clear is None else case.area(clear.view(np.uint8)),
    }
    at = {name: area and area.address for name, area in areas.items()}
    room = workspace(library, 2, shape.numel)
    status = library.fl_sparse_encode(
        ctypes.byref(case.spec),
        *(at["x"], case.scale, at["acc"], at["clear"], *choice_of(case), room.address),
        *(ctypes.byref(out.messages), None),
    )
    assert status == OK, case
    assert out.gaps_hold() and room.guards_hold(), case
    assert all(area.guards_hold() for area in areas.values() if area), case
    after, cleared = areas["acc"], areas["clear"]
    assert after is not None
    none = np.zeros(0, np.float32)
    return Encoded(
        out.planes(), after.data.view(np.float32), cleared.data.view(np.float32) if cleared else none, np.zeros(0, int)
    )


def random_numbers(numel: int) -> npt.NDArray[np.uint64]:
    """Return numbers ``OFFSET`` ... of the seed's sequence, as docs/wire_format.md makes them."""
    return random_bits(SEED, np.uint64(OFFSET) + np.arange(numel, dtype=np.uint64)).astype(np.uint64)


def expected(case: Case, acc: Floats, x: Bytes | None, clear: Floats) -> Encoded:
    if x is not None and case.x is not None:
        acc = oracle.accumulated(acc, oracle.widen(x, case.x), case.scale)
    if case.random:
        wanted = (random_numbers(acc.size) < case.threshold) | ~np.isfinite(acc)
    else:
        wanted = oracle.by_magnitude(acc, case.threshold, case.ties)
    return oracle.encode(case.shape, acc, clear, wanted)


def check(library: ctypes.CDLL, case: Case, acc: Floats, clear: bool = True) -> Encoded:
    """Assert that a call writes what the oracle does, and return the oracle's."""
    x = None if case.x is None else values(5, case.x, acc.size)
    masked = values(6, F32, acc.size).view(np.float32)
    want = expected(case, acc, x, masked)
    got = encode(library, case, acc, x, masked if clear else None)
    for name, plane, wanted in zip(("ends", "counts", "positions", "values"), got.planes, want.planes, strict=True):
        assert np.array_equal(plane, wanted), f"{name} of {case}"
    assert np.array_equal(got.acc.view(np.uint32), want.acc.view(np.uint32)), f"acc of {case}"
    if clear:
        assert np.array_equal(got.clear.view(np.uint32), want.clear.view(np.uint32)), f"clear of {case}"
    return want


def gaussian(numel: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, numel]).standard_normal(numel).astype(np.float32)


def threshold_for(acc: Floats, density: float) -> int:
    if acc.size == 0:
        return 0
    k = min(acc.size, max(1, int(acc.size * density)))
    return int(np.sort(oracle.magnitudes(acc))[acc.size - k])


# ---- encoding -------------------------------------------------------------------------------------------------------


@every_form
def test_every_length_and_density(library: ctypes.CDLL, form: int) -> None:
    kinds = itertools.cycle(itertools.product((F32, BF16), (None, F32, BF16, F16)))
    for numel, density in itertools.product(LENGTHS, (1e-9, 0.01, 0.2, 1.0)):
        kind, x = next(kinds)
        acc = values(7, F32, numel).view(np.float32)
        room = min(numel, int(numel * density * 1.2) + 1)
        case = Case(Shape(numel, form, kind, room), min(INF, threshold_for(acc, density)), x=x)
        check(library, replace(case, misaligned=numel % 2 == 1), acc, clear=numel % 3 != 0)


@every_form
def test_more_than_one_superblock_with_ties_across_them(library: ctypes.CDLL, form: int) -> None:
    acc = np.round(gaussian(LARGE), 1)
    threshold = int(oracle.bits_of(np.array([0.5], np.float32))[0])
    above = int((oracle.magnitudes(acc) > threshold).sum())
    equal = int((oracle.magnitudes(acc) == threshold).sum())
    for ties in (0, 1, equal // 2, equal - 1, -1):
        check(library, Case(Shape(LARGE, form, F32, above + equal), threshold, ties, chosen=ties != 1), acc)


@every_form
def test_what_has_no_room_stays(library: ctypes.CDLL, form: int) -> None:
    acc = gaussian(LARGE, 1)
    threshold = threshold_for(acc, 0.1)
    for room in (0, 1, 6553, 14_000):
        want = check(library, Case(Shape(LARGE, form, BF16, room), threshold), acc)
        assert want.sent.size == min(room, 14_000)


def test_a_full_block_of_bytes_keeps_its_last_element(library: ctypes.CDLL) -> None:
    acc = np.full(1000, 0.5, np.float32)
    want = check(library, Case(Shape(1000, BYTE, F32, 1000), 0), acc)
    assert want.sent.size == 3 * 255 + 232
    assert set(np.flatnonzero(want.acc)) == {255, 511, 767}
    check(library, Case(Shape(1000, BYTE, F32, 1000), int(oracle.bits_of(acc)[0]), ties=600), acc)


@every_form
@looped("threshold", [0, INF - 1, INF, 0x7FFFFFFF])
def test_what_is_not_finite_goes_first_and_never_stays(library: ctypes.CDLL, form: int, threshold: int) -> None:
    acc = gaussian(3000, 2)
    acc.view(np.uint32)[[3, 255, 256, 700, 2999]] = (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001)
    acc.view(np.uint32)[[9, 10, 11]] = (0x80000000, 1, 0x80000001)
    for kind, room in itertools.product((F32, BF16), (2, 3000)):
        want = check(library, Case(Shape(3000, form, kind, room), threshold), acc)
        assert np.isfinite(want.acc).all()


def test_bf16_overflow_is_sent_and_not_kept(library: ctypes.CDLL) -> None:
    acc = np.array([3.4e38, 1.0 + 2**-12, -3.4e38, 1e-42], np.float32)
    want = check(library, Case(Shape(4, SHORT, BF16, 4), 0), acc)
    assert oracle.widen(want.planes[3], BF16)[0] == np.inf
    assert want.acc.tolist() == [0.0, 2**-12, 0.0, float(acc[3] - oracle.widen(want.planes[3], BF16)[3])]


@every_form
def test_random_selection_depends_on_the_number_alone(library: ctypes.CDLL, form: int) -> None:
    acc = values(8, F32, 70_001).view(np.float32)
    for threshold, x in ((0, None), (2**32 // 50, F32), (2**32, None)):
        room = min(acc.size, acc.size * threshold // 2**32 + 3000)
        check(library, Case(Shape(acc.size, form, F32, room), threshold, x=x, random=True, chosen=x is None), acc)
    finite = gaussian(70_001)
    case = Case(Shape(finite.size, form, F32, finite.size), 2**32 // 10, random=True)
    sent = [check(library, case, v).sent for v in (finite, 2 * finite)]
    assert np.array_equal(*sent) and abs(sent[0].size - 7000) < 400


@every_form
def test_the_number_of_threads(form: int) -> None:
    acc = (values(7, F32, 600_001).view(np.uint32) & np.uint32(0xFFFC0000)).view(np.float32)  # many are equal
    for count, (ties, room, x) in itertools.product(
        (1, 2, 3), ((-1, 600_001, F32), (700, 300_000, None), (10, 10_000, BF16))
    ):
        with threads(count):
            check(native.cpu(), Case(Shape(600_001, form, BF16, room), 0x3FC00000, ties, x), acc)


# ---- decoding -------------------------------------------------------------------------------------------------------


def decode(
    library: ctypes.CDLL, shape: Shape, planes: Sequence[list[Bytes]], start: Bytes, dtype: int, *, add: bool
) -> Bytes:
    source = Message(shape, len(planes))
    for i, message in enumerate(planes):
        for plane, content in zip(source.planes(i), message, strict=True):
            plane[:] = content
    out = Area(start, itemsize(dtype))
    spec = replace(Case(shape, 0), x=dtype).spec
    status = library.fl_decode_sum(ctypes.byref(spec), ctypes.byref(source.messages), out.address, int(add), None)
    assert out.guards_hold()
    if status == BAD_MESSAGE:
        assert np.array_equal(out.data, start), "something was written"
        raise WireError("bad message")
    assert status == OK
    return out.data


@every_form
@looped("dtype", tiered(DTYPES.values(), lambda dtype: dtype == F32), ids=DTYPES)
def test_sums_are_in_order_and_rounded_once(library: ctypes.CDLL, form: int, dtype: int) -> None:
    rng = np.random.default_rng(form)
    for numel, density, kind in itertools.product((1, 256, 300, 65_537, 140_000), (1e-9, 0.02, 0.9), (F32, BF16)):
        shape = Shape(numel, form, kind, min(numel, int(numel * density * 1.2) + 1))
        messages = []
        for i in range(3):
            acc = values(10 + i, F32, numel).view(np.float32)
            messages.append(oracle.encode(shape, acc, acc, rng.random(numel) < density))
        start = values(4, dtype, numel)
        for count, add in ((3, False), (3, True), (1, False), (0, True), (0, False)):
            begin = oracle.widen(start, dtype) if add else np.zeros(numel, np.float32)
            want = oracle.decode_sum(shape, messages[:count], begin, dtype)
            got = decode(library, shape, [m.planes for m in messages[:count]], start, dtype, add=add)
            assert np.array_equal(got, want), (shape, count, add)


def valid_message(form: int, numel: int = 70_000) -> tuple[Shape, list[Bytes]]:
    acc = gaussian(numel)
    shape = Shape(numel, form, F32, numel // 5)
    return shape, oracle.encode(shape, acc, acc, oracle.by_magnitude(acc, threshold_for(acc, 0.1), -1)).planes


def spoiled(form: int) -> Iterator[tuple[str, Shape, list[Bytes]]]:
    """Yield messages that contradict themselves."""
    shape, good = valid_message(form)

    def changed(plane: int, kind: type[np.uint8 | np.uint32], change: dict[int, int]) -> list[Bytes]:
        planes = [content.copy() for content in good]
        view = planes[plane].view(kind)
        for at, by in change.items():
            view[at] = int(view[at]) + by & np.iinfo(kind).max
        return planes

    ends = good[0].view(np.uint32)
    yield "ends descend", shape, changed(0, np.uint32, {0: int(ends[1] - ends[0]) + 1})
    yield "ends beyond the capacity", shape, changed(0, np.uint32, {1: shape.capacity})
    yield "one pair too many", shape, changed(0, np.uint32, {1: 1})
    yield "a pair of the other superblock", shape, changed(0, np.uint32, {0: 1})
    if form == BITMAP:
        odd, planes = valid_message(form, 70_003)
        planes[2][-1] |= 0x80
        yield "a bit behind the last element", odd, planes
        planes = [content.copy() for content in good]
        planes[2][17] ^= 4
        yield "a bit too many or too few", shape, planes
        return
    kind = np.uint8 if form == BYTE else np.uint16
    twice = [content.copy() for content in good]
    positions = twice[2].view(kind)
    first = int(good[1][:3].sum()) if form == BYTE else 0
    positions[first + 1] = positions[first]
    yield "the same position twice", shape, twice
    far = [content.copy() for content in good]
    far[2].view(kind)[int(ends[1]) - 1] = 255 if form == BYTE else 65_535
    yield "a position behind the last element", shape, far
    if form == BYTE:
        yield "counts beyond the ends", shape, changed(1, np.uint8, {-1: 1})
        yield "counts short of the ends", shape, changed(1, np.uint8, {0: -1})


@every_form
def test_messages_that_contradict_themselves_are_refused(form: int) -> None:
    shape, good = valid_message(form)
    start = values(3, F32, shape.numel)
    decode(native.cpu(), shape, [good, good], start, F32, add=True)
    for name, bad_shape, planes in spoiled(form):
        start = values(3, F32, bad_shape.numel)
        others = [good, planes] if bad_shape == shape else [planes]
        with pytest.raises(WireError):
            decode(native.cpu(), bad_shape, others, start, F32, add=True)
            raise AssertionError(f"accepted: {name}")


@every_form
def test_spoiled_messages_stay_inside_the_tensor(kernels: ctypes.CDLL, form: int) -> None:
    for _, shape, planes in spoiled(form):
        decode(kernels, shape, [planes], values(3, F32, shape.numel), F32, add=False)


@every_form
def test_garbage_is_refused_or_harmless(library: ctypes.CDLL, form: int) -> None:
    rng = np.random.default_rng(form)
    refused = 0
    for _ in range(40):
        numel = int(rng.integers(1, 70_000))
        shape = Shape(numel, form, BF16, int(rng.integers(0, numel + 1)))
        planes = [rng.integers(0, 256, nbytes, np.uint8) for nbytes in shape.plane_bytes]
        if rng.random() < 0.7:
            planes[0].view(np.uint32)[:] = np.sort(rng.integers(0, shape.capacity + 1, shape.superblocks))
        try:
            decode(library, shape, [planes], values(1, BF16, numel), BF16, add=True)
        except WireError:
            refused += 1
    assert refused >= 35 or library is not native.cpu()


# ---- thresholds -----------------------------------------------------------------------------------------------------


def look(library: ctypes.CDLL, verb: str, acc: Floats, results: int, *given: object, room: int | None = None) -> Area:
    area, out = Area(acc.view(np.uint8), 4), Area(np.zeros(8 * results, np.uint8))
    extra = () if room is None else (workspace(library, room, acc.size),)
    addresses = [space.address for space in extra]
    assert getattr(library, verb)(area.address, acc.size, *given, *addresses, out.address, None) == OK
    assert out.guards_hold() and all(space.guards_hold() for space in extra)
    return out


@looped("numel", [*LENGTHS[1:], LARGE])
def test_kth_magnitude(library: ctypes.CDLL, numel: int) -> None:
    for acc in (gaussian(numel), values(7, F32, numel).view(np.float32), np.round(gaussian(numel), 1)):
        order = np.sort(oracle.magnitudes(acc))[::-1]
        for k in sorted({1, 2, numel // 100, numel // 2, numel - 1, numel} & set(range(1, numel + 1))):
            found = look(library, "fl_kth_magnitude", acc, 2, k, room=1).data.view(np.int64)
            assert found.tolist() == [order[k - 1], int((order > order[k - 1]).sum())], k


def test_kth_magnitude_where_a_sample_misleads() -> None:
    """The sample of the CPU has none of the largest, so it expects the k-th too low, by one, for some k, exactly."""
    spikes, hidden = np.zeros(LARGE, np.float32), gaussian(LARGE)
    spikes[:300] = gaussian(300)
    count, stride = 8192, LARGE // 8192
    shift = random_bits(LARGE, np.arange(count, dtype=np.uint64)).astype(np.int64) * stride >> 32
    unseen = np.setdiff1d(np.arange(LARGE), np.arange(count) * stride + shift)
    hidden[unseen[::200]] = 9 + np.arange(len(unseen[::200])) / 1e4
    for acc, every_k in ((spikes, (1, 299, 300, 301, LARGE)), (hidden, range(800, 1200))):
        order = np.sort(oracle.magnitudes(acc))[::-1]
        above = np.searchsorted(-order, -order)
        for k in every_k:
            found = look(native.cpu(), "fl_kth_magnitude", acc, 2, k, room=1).data.view(np.int64)
            assert found.tolist() == [order[k - 1], above[k - 1]], k


def test_the_largest_are_chosen(library: ctypes.CDLL) -> None:
    few = np.zeros(9000, np.float32)
    few[::1000] = gaussian(9)
    broken = gaussian(9000)
    broken[[7, 8999]] = np.nan, -np.inf
    for acc in (gaussian(1), gaussian(9000), np.round(gaussian(LARGE), 1), few, few[:1] * 0, few * 0):
        order = np.sort(oracle.magnitudes(acc))[::-1]
        for k in sorted({1, 9, 10, acc.size // 100, acc.size} & set(range(1, acc.size + 1))):
            kth = int(order[k - 1])
            above = int((order > kth).sum())
            want = [kth, k - above if kth else int(not above)]
            assert look(library, "fl_choose_largest", acc, 2, k, room=1).data.view(np.int64).tolist() == want
    for k in (1, 5, 9000):
        found = look(library, "fl_choose_largest", broken, 2, k, room=1).data.view(np.int64)
        assert found.tolist() == [INF, -1]


@looped("numel", [1, 50, 3000, 8192, LARGE])
def test_the_least_numbers_are_drawn(library: ctypes.CDLL, numel: int) -> None:
    """Halved, as the message takes no more than k; what is not finite goes alone."""
    out, room = Area(np.zeros(16, np.uint8)), workspace(library, 1, numel)
    halves = np.sort(random_numbers(numel) >> 1)
    spec = Case(Shape(numel, SHORT, F32, numel), 0, random=True).spec
    for broken in (False, True):
        acc = gaussian(numel)
        acc[numel // 2] = np.inf if broken else acc[numel // 2]
        area = Area(acc.view(np.uint8), 4)
        for k in sorted({1, 2, numel // 100, numel // 2, numel - 1, numel} & set(range(1, numel + 1))):
            assert library.fl_choose_drawn(spec, area.address, k, room.address, out.address, None) == OK
            want = 0 if broken else 2 * (int(halves[k - 1]) + 1)
            assert out.data.view(np.int64).tolist() == [want, -1], k
            assert out.guards_hold() and room.guards_hold()
        for k in (0, numel + 1):
            assert library.fl_choose_drawn(spec, area.address, k, room.address, out.address, None) == BAD_ARGUMENT
    by_magnitude = Case(Shape(50, SHORT, F32, 50), 0).spec
    assert library.fl_choose_drawn(by_magnitude, area.address, 1, room.address, out.address, None) == UNSUPPORTED


CHOOSERS = {  # estimator: what else it needs
    "given": (selection.GIVEN, {"count": 2, "given": (2.5, 2.0)}),
    "kth": (selection.GIVEN, {}),
    "sampled": (selection.SAMPLED, {}),
    "normal": (selection.NORMAL, {}),
    "normal, as published": (selection.NORMAL, {"published": 1}),
    "bisected": (selection.BISECTED, {}),
    "bisected, as published": (selection.BISECTED, {"published": 1}),
    "trimmed": (selection.TRIMMED, {}),
    "trimmed, as published": (selection.TRIMMED, {"published": 1}),
    "exponential": (selection.EXPONENTIAL, {"stages": 2, "most_stages": 7}),
    "pareto": (selection.PARETO, {"stages": 3, "most_stages": 4}),
    "pareto, first given": (selection.PARETO, {"stages": 2, "most_stages": 2, "count": 1, "given": (1.2,)}),
}


def chooser(name: str, numel: int, k: int, reuse: int = 1) -> libraries.Chooser:
    estimator, more = CHOOSERS[name]
    sampled = numel // 3 + 1
    given = {"estimator": estimator, "reuse": reuse, "k": k, "capacity": min(numel, k + k // 2), "stages": 1}
    sample = {"sampled": sampled, "sample_k": max(1, k * sampled // numel)} if estimator == selection.SAMPLED else {}
    return libraries.Chooser(**{**given, "most_stages": 1, **sample, **more})


@looped("name", tiered(CHOOSERS, lambda name: name in ("sampled", "normal, as published", "bisected", "pareto")))
def test_a_threshold_is_chosen(library: ctypes.CDLL, name: str) -> None:
    """Call after call: choices, ages and stages are those of the formulas, whatever the values are."""
    for numel, k, reuse in ((1, 1, 1), (600, 7, 1), (600, 7, 3), (9000, 2900, 3)):
        broken, few = gaussian(numel), np.zeros(numel, np.float32)
        broken[numel // 2] = np.nan
        few[::50] = gaussian(numel)[::50]
        steps = [gaussian(numel, seed) * np.float32(2.0 ** (seed // 4)) for seed in range(7)]
        steps += [np.round(gaussian(numel), 1), gaussian(numel) ** 3, few, few * 0, broken, gaussian(numel, 9)]
        how = chooser(name, numel, k, reuse)
        memory, expected = Area(np.zeros(20, np.uint8)), torch.zeros(5)
        for step, acc in enumerate(steps if numel < 9000 else steps[4:]):
            area, out = Area(acc.view(np.uint8), 4), Area(np.zeros(16, np.uint8))
            sample = np.ascontiguousarray(acc[: how.sampled])
            room = workspace(library, 3, numel)
            given = area.address, numel, sample.ctypes.data, memory.address, room.address, out.address, None
            assert library.fl_choose_threshold(ctypes.byref(how), *given) == OK
            assert all(space.guards_hold() for space in (area, memory, room, out))
            want = formulas.choose(how, torch.from_numpy(acc), expected, torch.from_numpy(sample))
            assert out.data.view(np.int64).tolist() == want.tolist(), (numel, reuse, step)
            assert memory.data.view(np.float32).tolist() == expected.tolist(), (numel, reuse, step)


def test_choosers_that_make_no_sense_are_refused(library: ctypes.CDLL) -> None:
    at = Area(np.zeros(65536, np.uint8)).address

    def status(acc: int | None = at, sample: int | None = at, memory: int | None = at + 4096, **wrong: int) -> int:
        how = chooser("sampled", 64, 8)
        for field, value in wrong.items():
            setattr(how, field, value)
        return int(library.fl_choose_threshold(ctypes.byref(how), acc, 64, sample, memory, at + 8192, at + 8160, None))

    assert status() == status(estimator=selection.NORMAL, sample=None) == OK
    assert status(acc=None) == status(sample=None) == status(memory=None) == status(memory=at + 2) == BAD_ARGUMENT
    for field, values_ in {
        "estimator": (7,),
        "reuse": (0,),
        "k": (0, 65),
        "capacity": (7, 65),
        "sampled": (0, 65),
        "sample_k": (0, 23),
        "stages": (0, 65),
        "most_stages": (0, 65),
        "count": (15,),
        "published": (2,),
    }.items():
        assert {status(**{field: value}) for value in values_} == {BAD_ARGUMENT}, field


@looped("numel", [*LENGTHS, LARGE])
def test_count_above(library: ctypes.CDLL, numel: int) -> None:
    acc = values(7, F32, numel).view(np.float32)
    ladder = [0, 1, 0x3F000000, 0x3F800000, 0x40000000, INF, INF + 1, 0x7FFFFFFF] * 2
    for count in (1, 7, 16):
        given = (ctypes.c_uint32 * count)(*ladder[:count])
        found = look(library, "fl_count_above", acc, count, ctypes.cast(given, ctypes.c_void_p), count)
        want = [int((oracle.magnitudes(acc) >= threshold).sum()) for threshold in ladder[:count]]
        assert found.data.view(np.int64).tolist() == want


@looped("numel", [*LENGTHS, LARGE, 32 * 4096 * 2 + 17])
def test_magnitude_stats(library: ctypes.CDLL, numel: int) -> None:
    for acc, above in itertools.product((gaussian(numel), values(7, F32, numel).view(np.float32)), (0, 0x3F000000)):
        found = look(library, "fl_magnitude_stats", acc, 4, above, room=0).data
        bits = oracle.magnitudes(acc)
        counted = bits >= above
        terms = np.where(counted & (bits < INF), np.abs(acc), np.float32(0)).astype(np.float64)
        assert found.view(np.int64)[[0, 3]].tolist() == [counted.sum(), bits[counted].max(initial=0)]
        assert found.view(np.float64)[1] == oracle.run_sums(terms)
        assert found.view(np.float64)[2] == oracle.run_sums(terms * terms)
        assert found.view(np.float64)[1] == pytest.approx(terms.sum(), rel=1e-12)


@looped("dtype", DTYPES.values(), ids=DTYPES)
def test_accumulate(library: ctypes.CDLL, dtype: int) -> None:
    for numel in (0, 1, 33, 511, 513, 70_001):
        x, old, u = (values(seed, kind, numel) for seed, kind in ((1, dtype), (2, F32), (3, F32)))
        acc, velocity = Area(old, 4), Area(u, 4)
        given = Area(x, itemsize(dtype))
        assert library.fl_accumulate(dtype, given.address, 0.7, numel, acc.address, None) == OK
        want = oracle.accumulated(old.view(np.float32), oracle.widen(x, dtype), 0.7)
        assert np.array_equal(acc.data.view(np.uint32), want.view(np.uint32))
        for nesterov in (0, 1):
            acc.data[:], velocity.data[:] = old, u
            status = library.fl_accumulate_momentum(
                dtype, given.address, 0.7, 0.9, nesterov, numel, velocity.address, acc.address, None
            )
            assert status == OK
            with np.errstate(over="ignore", invalid="ignore"):
                s, m = np.float32(0.7) * oracle.widen(x, dtype), np.float32(0.9)
                v = u.view(np.float32)
                v = oracle.canonical((v + s) * m if nesterov else m * v + s)
                want = oracle.canonical(old.view(np.float32) + (v + s if nesterov else v))
            assert np.array_equal(velocity.data.view(np.uint32), v.view(np.uint32))
            assert np.array_equal(acc.data.view(np.uint32), want.view(np.uint32))
        assert acc.guards_hold() and velocity.guards_hold()


def test_the_callers_flushing_of_subnormals() -> None:
    tiny = np.full(70_001, 1e-40, np.float32)
    want = oracle.run_sums(np.full(70_001, np.float64(tiny[0])))
    total = oracle.accumulated(tiny, tiny, 0.5)
    try:
        torch.set_flush_denormal(True)
        found = look(native.cpu(), "fl_magnitude_stats", tiny, 4, 0, room=0).data.view(np.float64)[1]
        acc, x = Area(tiny.view(np.uint8)), Area(tiny.view(np.uint8))
        native.cpu().fl_accumulate(F32, x.address, 0.5, tiny.size, acc.address, None)
    finally:
        torch.set_flush_denormal(False)
    assert found == want
    assert np.array_equal(acc.data.view(np.uint32), total.view(np.uint32))


def test_nothing_beyond_the_input_is_read(library: ctypes.CDLL) -> None:
    """x and acc end where memory ends."""
    scratch, results = Area(np.zeros(1 << 18, np.uint8)), Area(np.zeros(64, np.uint8))

    def child(ends: tuple[int, int]) -> None:
        for numel, form in itertools.product((1, 33, 255, 1025), FORMS.values()):
            acc, x, shape = ends[0] - 4 * numel, ends[1] - 2 * numel, Shape(numel, form, F32, numel)
            spec, out, room = ctypes.byref(Case(shape, 0, x=BF16).spec), Message(shape), scratch.address
            planes, found = ctypes.byref(out.messages), results.address
            assert library.fl_sparse_encode(spec, x, 1.0, acc, None, 0, -1, None, room, planes, None) == OK
            assert library.fl_decode_sum(spec, planes, x, 0, None) == OK
            assert library.fl_magnitude_stats(acc, numel, 0, room, found, None) == OK
            assert library.fl_kth_magnitude(acc, numel, 1, room, found, None) == OK

    with fenced() as one, fenced() as other:
        assert in_child(lambda: child((one, other))) == 0


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused(library: ctypes.CDLL) -> None:
    area, good = Area(np.zeros(65536, np.uint8)), Case(Shape(64, SHORT, F32, 8), 5)
    at = area.address
    planes = native.Messages((ctypes.c_void_p * native.MAX_PLANES)(at, at + 1024, at + 2048, at + 4096), 8192, 1)

    def status(case: Case = good, acc: int | None = at + 16384, room: int | None = at + 32768) -> int:
        given = None, 1.0, acc, None, *choice_of(case), room
        return int(library.fl_sparse_encode(ctypes.byref(case.spec), *given, ctypes.byref(planes), None))

    assert status() == OK
    assert status(acc=None) == status(acc=at + 2) == status(room=None) == status(room=at + 8) == BAD_ARGUMENT
    for wrong in (
        replace(good, shape=Shape(64, 3, F32, 8)),
        replace(good, shape=Shape(64, SHORT, 3, 8)),
        replace(good, shape=Shape(64, SHORT, F32, 65)),
        replace(good, threshold=-1),
        replace(good, threshold=1 << 31),
        replace(good, threshold=(1 << 32) + 1, random=True),
        replace(good, ties=-2),
    ):
        assert status(wrong) == BAD_ARGUMENT, wrong
    assert status(replace(good, shape=Shape(64, SHORT, F16, 8))) == UNSUPPORTED
    planes.plane[3] = at + 8
    assert status() == BAD_ARGUMENT
    planes.plane[3] = at + 4096
    planes.plane[1] = 0  # a plane without bytes needs no place
    assert status() == OK
    spec, message = ctypes.byref(good.spec), ctypes.byref(planes)
    assert library.fl_encode(spec, at, None, message, None) == UNSUPPORTED
    assert library.fl_decode(spec, message, at, None) == UNSUPPORTED
    assert library.fl_recode(spec, message, None, None, message, None) == UNSUPPORTED
    one = (ctypes.c_uint32 * 1)(1 << 31)
    pointer = ctypes.cast(one, ctypes.c_void_p)
    assert library.fl_count_above(at, 64, pointer, 1, at + 1024, None) == BAD_ARGUMENT
    assert library.fl_count_above(at, 64, pointer, 17, at + 1024, None) == BAD_ARGUMENT
    for k in (0, 65):
        assert library.fl_kth_magnitude(at, 64, k, at + 1024, at + 2048, None) == BAD_ARGUMENT
    assert library.fl_accumulate(3, at, 1.0, 64, at + 1024, None) == BAD_ARGUMENT
    assert library.fl_workspace_bytes(6, 64) == library.fl_workspace_bytes(0, -1) == -1


def test_errors_in_python_say_what_is_wrong() -> None:
    shape, offsets = Shape(1000, SHORT, F32, 70), [0, 16, 16, 160]
    spec = native.CodecParams(native.SPARSE, (SHORT, F32, 70)).spec(1000, torch.float32)
    body, acc = torch.zeros(160 + shape.plane_bytes[3], dtype=torch.uint8), torch.from_numpy(gaussian(1000))
    selection.sparse_encode(spec, offsets, acc, threshold_for(acc.numpy(), 0.05), -1, body)
    native.decode_sum(spec, offsets, body.unsqueeze(0), out := torch.empty(1000), add=False)
    assert int((out != 0).sum()) == 50
    body[:4] = 255
    with pytest.raises(WireError, match="contradicts itself"):
        native.decode_sum(spec, offsets, body.unsqueeze(0), out, add=False)
    with pytest.raises(FusionLayerError, match="refused an argument"):
        selection.kth_magnitude(acc, 0)
