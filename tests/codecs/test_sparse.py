"""What all sparsifiers share: the message, what is sent, what stays, when a threshold is kept."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import WireError
from fusionlayer.codecs import Sparsifier, TensorState
from fusionlayer.codecs.sparse.sparsifier import Choice, ThresholdSparsifier, _layout
from tests.loops import looped
from tests.synthetic import gradient

from .conformance import DTYPES, decoded
from .variants import defaults, every

NAMES = ["topk", "randomk", "dgc", "gaussiank", "redsync", "redsync_trim", "sidco"]
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def make(name: str, **options: Any) -> Sparsifier:
    codec = codecs.get(name, **options, header=False)
    assert isinstance(codec, Sparsifier)
    return codec


def fresh(n: int) -> TensorState:
    return TensorState(torch.zeros(n))


def send(codec: Sparsifier, x: Tensor, state: TensorState, **options: Any) -> Tensor:
    payload = torch.zeros(codec.wire(x.numel(), x.dtype).capacity, dtype=torch.uint8)
    codec.encode_tensor(x, payload, state, **options)
    return payload


def positions(codec: Sparsifier, payload: Tensor, n: int) -> list[int]:
    """Return which elements are sent, those of value 0 too."""
    marked = payload.clone()
    codec.bare.wire(n).views(marked)[-1].fill_(1)
    found: list[int] = decoded(codec.bare, marked, n, torch.float32).nonzero().view(-1).tolist()
    return found


def test_these_are_all() -> None:
    # Alone, ``oktopk`` is ``topk`` with other defaults; its collective has tests of its own.
    assert [codec.name for codec in defaults() if isinstance(codec, Sparsifier)] == sorted([*NAMES, "oktopk"])


# ---- the message ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 22), st.floats(1e-5, 1.0), st.sampled_from(["f32", "bf16"]), st.floats(1.0, 3.0))
def test_the_layout_is_the_smallest(n: int, density: float, values: str, slack: float) -> None:
    codec = make("dgc", density=density, values=values, slack=slack)
    k, capacity = codec.target(n), codec.capacity(n)
    assert k == min(n, max(1, int(density * n))) and k <= capacity <= n
    assert capacity == n or k * slack <= capacity < k * slack + 1
    sizes = [
        (-(-n // 65536) * 4, counts, where, capacity * (4 if values == "f32" else 2))
        for counts, where in ((0, -(-n // 8)), (-(-n // 256), capacity), (0, 2 * capacity))
    ]
    totals = [sum(-(-plane // 16) * 16 for plane in planes) for planes in sizes]
    assert codec.wire(n).capacity == min(totals)
    form = _layout(codec, n)[0]
    assert form == totals.index(min(totals))
    assert [section.plane.nbytes for section in codec.wire(n).sections] == list(sizes[form])


def test_a_message_tells_how_much_of_it_is_used() -> None:
    n = 100_000
    codec = make("dgc", slack=2.0)
    payload = send(codec, gradient(n, 1), fresh(n))
    pairs = codec.pairs(payload, n)
    assert 800 <= pairs < codec.capacity(n) == 2000
    assert codec.used_bytes(payload, n) == 8 + 391 + pairs + 4 * pairs
    payload[4:8] = 0x7F  # the last of `ends`
    for refused in (codec.pairs, codec.used_bytes, codec.compact):
        with pytest.raises(WireError, match="damaged"):
            refused(payload, n)
    with pytest.raises(WireError, match="cut short"):
        codec.expand(payload[:7], torch.zeros_like(payload), n)


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(WireError, match="has 48 bytes, this one 16"):
        make("topk").encode_tensor(torch.zeros(10), torch.zeros(16, dtype=torch.uint8), fresh(10))


@looped("codec", [c for c in every() if isinstance(c, Sparsifier) and c.density == 1], ids=str)
def test_density_one_sends_everything(codec: Sparsifier) -> None:
    for dtype in DTYPES:
        for n in (1, 300, 70_000):
            x = gradient(n, 3, dtype)
            state = fresh(n)
            assert torch.equal(decoded(codec.bare, send(codec.bare, x, state), n, dtype), x)
            assert not state.residual.any()


# ---- nothing is lost ------------------------------------------------------------------------------------------------

SPARSIFIERS = [make(name) for name in NAMES]
SPARSIFIERS += [make(name, density=0.05, values="bf16", slack=1.5, reuse=4) for name in NAMES if name != "randomk"]


@settings(max_examples=250)
@given(
    codec=st.sampled_from(SPARSIFIERS),
    n=st.sampled_from([1, 2, 255, 256, 257, 3000, 65_537]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.25, -3.0, 1 / 3]),
    factors=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 40.0]), min_size=2, max_size=4),
)
def test_sent_plus_residual_is_what_was_given(
    codec: Sparsifier, n: int, dtype: torch.dtype, scale: float, factors: list[float]
) -> None:
    state = fresh(n)
    for step, factor in enumerate(factors):
        x = (gradient(n, step) * factor).to(dtype)
        wanted = x.float() * torch.tensor(scale) + state.residual
        payload = send(codec, x, state, scale=scale, seed=step)
        sent = decoded(codec, payload, n, dtype, torch.float32)
        assert torch.equal(sent + state.residual, wanted)
        assert 1 <= codec.pairs(payload, n) <= codec.capacity(n)


@looped("name", NAMES)
def test_without_a_residual_nothing_is_kept(name: str) -> None:
    x, state = gradient(5000, 5), TensorState()
    codec = make(name)
    payload = send(codec, x, state)
    sent = decoded(codec, payload, 5000, x.dtype)
    assert state.residual is None and set(state.tensors) <= {"threshold"}
    assert torch.equal(sent, torch.where(sent != 0, x, torch.zeros(())))
    assert torch.equal(payload, codec.compress(x))


GUARDED = {name: {"guarded": True} for name in ("gaussiank", "redsync")}
"""Their published rules send whatever a threshold lets through: see ``test_thresholds.py``."""


@looped("name", [name for name in NAMES if name != "randomk"])
def test_zeros_do_not_displace_anything(name: str) -> None:
    """Where fewer than k elements are not 0 exactly those are sent, and zeros never."""
    codec, n = make(name, **GUARDED.get(name, {})), 100_000
    for kept, least in ((300, 300), (1500, 800)):
        x = torch.zeros(n)
        x[:: n // kept][:kept] = gradient(kept, 8) + 2
        payload = send(codec, x, fresh(n))
        assert least <= codec.pairs(payload, n) <= min(kept, codec.capacity(n))
        assert (x[positions(codec, payload, n)] != 0).all()


# ---- how many are sent ----------------------------------------------------------------------------------------------


def laplace(n: int) -> Tensor:
    return _exponential(n, 2) * (2 * torch.randint(2, (n,), generator=torch.Generator().manual_seed(3)) - 1)


def student(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(n, generator=generator) / torch.randn(3, n, generator=generator).square().mean(0).sqrt()


def _exponential(n: int, seed: int) -> Tensor:
    return -torch.rand(n, generator=torch.Generator().manual_seed(seed)).clamp_min(1e-12).log()


@looped("shape", [torch.randn, laplace, student, lambda n: torch.randn(n).round(), torch.ones])
@looped("density", [0.5, 0.01, 0.002])
@looped("name", [name for name in NAMES if name != "randomk"])
def test_the_message_is_nearly_full_and_nothing_is_cut_off(name: str, density: float, shape: Any) -> None:
    torch.manual_seed(9)
    n = 1 << 15
    codec, x = make(name, density=density, **GUARDED.get(name, {})), shape(n)
    state, k = fresh(n), codec.target(n)
    payload = send(codec, x, state)
    assert 0.8 * k <= codec.pairs(payload, n) <= codec.capacity(n)
    sent = torch.zeros(n, dtype=torch.bool)
    sent[positions(codec, payload, n)] = True
    # Of equal values all go where there is room for all.
    assert sent.all() or x[sent].abs().min() >= x[~sent].abs().max()


def test_topk_sends_the_k_largest_and_of_equal_ones_the_first() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 2.0, 0.5, 3.0, 0.0, 0.0])
    for k, expected in ((1, [1]), (2, [1, 3]), (3, [1, 3, 7]), (4, [1, 2, 3, 7]), (6, [1, 2, 3, 4, 5, 7])):
        codec = make("topk", density=k / 10 + 0.01)
        assert positions(codec, send(codec, x, fresh(10)), 10) == expected


def test_randomk_draws_by_seed_and_number_alone() -> None:
    codec, n = make("randomk", density=0.02), 100_000
    drawn = [positions(codec, send(codec, gradient(n, i), fresh(n), seed=5), n) for i in range(2)]
    assert drawn[0] == drawn[1]
    other = positions(codec, send(codec, gradient(n, 0), fresh(n), seed=6), n)
    assert len({*drawn[0]} & {*other}) < 0.1 * len(other)
    # A message of a part draws by the numbers of its elements, and so other ones than the part before it.
    payload = torch.zeros(codec.wire(25_000).capacity, dtype=torch.uint8)
    parts = []
    for offset in (0, 25_000):
        codec.encode(gradient(25_000, 0), payload, seed=5, offset=offset)
        parts.append({*positions(codec, payload, 25_000)})
    assert len(parts[0] & parts[1]) < 0.1 * len(parts[0])
    assert len(parts[0] & {*drawn[0]}) > 0.8 * len([p for p in drawn[0] if p < 25_000]), "the least numbers of both"


def test_randomk_sends_exactly_k_and_each_element_as_often() -> None:
    draws = 200
    for n, density in ((50, 0.01), (400, 0.05), (9000, 0.3)):
        codec, often = make("randomk", density=density), torch.zeros(n)
        k = codec.target(n)
        for seed in range(draws):
            drawn = positions(codec, send(codec, gradient(n, 0), fresh(n), seed=seed), n)
            assert len(drawn) == k == codec.capacity(n)
            often[drawn] += 1
        spread = (draws * k / n * (1 - k / n)) ** 0.5
        assert float((often - draws * k / n).abs().max()) < max(5.5 * spread, 8)


# ---- what is not finite ---------------------------------------------------------------------------------------------


@looped("name", NAMES)
def test_only_what_is_not_finite_goes_and_the_rest_is_kept(name: str) -> None:
    n = 70_000
    codec, state = make(name), TensorState(gradient(n, 30) * 0.1)
    wanted = gradient(n, 31) + state.residual
    x = gradient(n, 31)
    for place, value in zip((0, 66_000, n - 1), NOT_FINITE, strict=True):
        x[place], wanted[place] = value, 0.0
    payload = send(codec, x, state)
    assert positions(codec, payload, n) == [0, 66_000, n - 1]
    assert torch.equal(state.residual, wanted)
    after = decoded(codec, send(codec, gradient(n, 32), state), n, torch.float32)
    assert after.isfinite().all() and state.residual.isfinite().all()


@looped("value", NOT_FINITE)
@looped("factor", [1.0, 1e3])
def test_it_is_seen_although_a_stale_threshold_fills_the_message(value: float, factor: float) -> None:
    n = 20_000
    codec, state = make("topk", slack=1.5, reuse=10), fresh(n)
    send(codec, gradient(n, 33), state)
    before = state.residual.clone()
    x = gradient(n, 34) * factor
    x[n - 1] = value
    out = decoded(codec, send(codec, x, state), n, torch.float32)
    assert not out[n - 1].isfinite() and out[:-1].isfinite().all()
    assert torch.equal((state.residual + out)[:-1], (x + before)[:-1])


# ---- thresholds that are used again ---------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the step's number whenever a threshold is looked for."""
    noted: list[int] = []
    select = ThresholdSparsifier._select

    def noting(self: ThresholdSparsifier, wanted: Tensor, state: TensorState, seed: int) -> Choice:
        noted.append(len(noted))
        return select(self, wanted, state, seed)

    monkeypatch.setattr(ThresholdSparsifier, "_select", noting)
    return noted


@pytest.mark.parametrize("name", [name for name in NAMES if name != "randomk"])
def test_a_threshold_serves_as_many_steps_as_it_should(name: str, searches: list[int]) -> None:
    n = 20_000
    codec, state = make(name, reuse=5, slack=3.0), fresh(n)
    for step in range(20):
        state.residual.zero_()  # gradients alike in every step
        send(codec, gradient(n, step), state, seed=step)
        assert len(searches) == 1 + step // 5


def test_a_threshold_that_does_not_fit_is_found_anew(searches: list[int]) -> None:
    n = 20_000
    codec, state = make("topk", reuse=100, slack=1.5), fresh(n)
    for step, (factor, searched) in enumerate(((1.0, 1), (1.0, 1), (30.0, 2), (30.0, 2), (0.01, 3), (0.0, 4))):
        state.residual.zero_()
        x = gradient(n, step % 2) * factor
        payload = send(codec, x, state)
        assert len(searches) == searched
        if factor:
            assert codec.target(n) / 4 <= codec.pairs(payload, n) < codec.capacity(n)
        assert torch.equal(decoded(codec, payload, n, x.dtype) + state.residual, x)


def test_a_state_goes_on_where_it_was_saved() -> None:
    n = 5000
    for name in NAMES:
        codec = make(name, **({} if name == "randomk" else {"reuse": 3, "slack": 1.5}))
        state = fresh(n)
        for step in range(10):
            if step == 5:
                tensors = {key: kept.clone() for key, kept in state.tensors.items()}
                copy = TensorState(state.residual.clone(), tensors, dict(state.numbers))
            payload = send(codec, gradient(n, step), state, seed=step)
            if step >= 5:
                assert torch.equal(payload, send(codec, gradient(n, step), copy, seed=step))
