"""What every collective must do with every codec, over any transport.

The functions run on all ranks at once. Each rank knows the inputs of all, so each checks the result by itself; what
only a comparison can show (equal bits, residuals) travels over the transport under test.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fusionlayer import collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import AgreeingCodec, Codec, HomomorphicCodec, TwoLevelCodec
from fusionlayer.transport import Transport
from tests.ranks import over_threads
from tests.synthetic import gradient

WORLDS = (1, 2, 3, 4, 5, 8)
LENGTHS = (0, 1, 2, 7, 127, 128, 129, 1000, 4097)
FEW_LENGTHS = (0, 1, 129, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = 2

Pair = tuple[str, Codec]
Made = TypeVar("Made")
_making = threading.RLock()  # guards what ranks make for all of them


def made_once(function: Callable[..., Made]) -> Callable[..., Made]:
    """Return ``function`` with its results kept; one rank makes each, and the others wait for it."""
    cached = cache(function)

    @wraps(function)
    def locked(*arguments: Any) -> Made:
        with _making:
            return cached(*arguments)

    return locked


def pairs(codecs: Iterable[Codec]) -> list[Pair]:
    """Return every collective with every one of ``codecs`` that it takes, codecs without header."""
    return [(name, codec.bare) for codec in codecs for name in collectives.names() if takes(name, codec)]


@cache
def takes(name: str, codec: Codec) -> bool:
    def body(transport: Transport) -> bool:
        try:
            collectives.get(name)(torch.zeros(1), codec, transport)
        except ConfigError:
            return False
        return True

    return over_threads(1, body)[0]


@made_once
def given(rank: int, step: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank brings into a step; not to be written to."""
    return gradient(numel, 1000 * rank + step, dtype)


@made_once
def coarseness(codec: Codec, numel: int, dtype: torch.dtype) -> float:
    """Return the largest relative error, in the Euclidean norm, that the codec made on some tensors of this length.

    Inside nodes or between them, whichever is larger.
    """
    errors = [0.0]
    for level in {codec, codec.within} if isinstance(codec, TwoLevelCodec) else {codec}:
        for stream in range(16):
            x = gradient(numel, (1 << 21) + stream, dtype)
            out = level.decompress(level.compress(x, seed=stream), numel, dtype)
            errors.append(float((out.double() - x.double()).norm() / x.double().norm().clamp_min(1e-300)))
    return max(errors)


@made_once
def agreed_coarseness(codec: Codec, numel: int, dtype: torch.dtype, world: int) -> float:
    """Return ``coarseness`` with what so many ranks agree on, errors relative to the largest of their tensors."""
    if not isinstance(codec, AgreeingCodec | HomomorphicCodec):
        return 0.0
    like_all = cast(Transport, SimpleNamespace(rank=0, size=world, all_reduce_max=lambda x: None))
    errors = [0.0]
    for stream in range(16):
        largest = gradient(numel, (1 << 21) + stream, dtype)
        alone = type(codec)(**codec.options, header=False)  # with nothing kept of other sums
        agreed, x = alone.agree(largest, like_all), largest * ((stream + 1) / 16)
        out = agreed.decompress(agreed.compress(x, seed=stream), numel, dtype)
        errors.append(float((out.double() - x.double()).norm() / largest.double().norm().clamp_min(1e-300)))
    return max(errors)


def same_everywhere(transport: Transport, x: Tensor) -> bool:
    """Return whether ``x`` has the same bits on all ranks."""
    digest = hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    every = torch.empty(transport.size, len(digest), dtype=torch.uint8)
    transport.all_gather(mine, every)
    return all(torch.equal(other, mine) for other in every)


def sum_over_ranks(transport: Transport, x: Tensor) -> Tensor:
    """Return the sum in f64 of all ranks' ``x`` (n,)."""
    every = torch.empty(transport.size, x.numel(), dtype=x.dtype)
    transport.all_gather(x.cpu().view(torch.uint8), every.view(torch.uint8))
    return every.double().sum(0)


# ---- checks: all ranks call them together ---------------------------------------------------------------------------


def sums_are_close_and_equal(
    transport: Transport, name: str, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Errors stay within what two quantisations make of every value, and all ranks have the same bits."""
    inputs = [given(rank, 0, numel, dtype).double() for rank in range(transport.size)]
    exact = torch.stack(inputs).sum(0)
    x = given(transport.rank, 0, numel, dtype).to(device, copy=True)
    fresh = type(codec)(**codec.options, header=codec.header)  # with nothing kept of other sums
    collectives.get(name)(x, fresh, transport, seed=derive_seed(numel))
    coarse = max(coarseness(codec, numel, dtype), agreed_coarseness(codec, numel, dtype, transport.size))
    rounding = 2 * torch.finfo(dtype).eps
    norms = sum(float(part.norm()) for part in inputs)
    if name == "ring" and (codec.name in ("int_full", "qgz") or numel == 1):
        # A value that is alone in its group: in each hop it loses a step if the range is full, and else gains what its
        # scale is rounded up by.
        coarse *= max(1, transport.size / 2)
    bound = 2 * coarse * (norms + float(exact.norm())) + rounding * norms
    assert float((x.cpu().double() - exact).norm()) <= bound
    assert same_everywhere(transport, x)


def nothing_is_lost(
    transport: Transport, name: str, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With error feedback, results plus what all ranks keep is what was given, up to rounding of the results."""
    residual = torch.zeros(numel, device=device)
    balance = torch.zeros(numel, dtype=torch.float64)
    for step in range(STEPS):
        x = given(transport.rank, step, numel, dtype).to(device, copy=True)
        collectives.get(name)(x, codec, transport, seed=step, residual=residual)
        assert same_everywhere(transport, x)
        balance += x.cpu().double()
        for rank in range(transport.size):
            balance -= given(rank, step, numel, dtype).double()
    balance += sum_over_ranks(transport, residual)
    tolerance = 2 * STEPS * transport.size * torch.finfo(dtype).eps
    assert not numel or float(balance.abs().max()) <= tolerance


def non_finite_values_surface(
    transport: Transport, name: str, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A NaN or Inf on one rank reaches all, leaves the residuals finite and is gone in the next step."""
    residual = torch.zeros(numel, device=device)
    position = numel // 2
    for step, value in enumerate((float("nan"), float("inf"), None)):
        x = given(transport.rank, step, numel, dtype).to(device, copy=True)
        if value is not None and transport.rank == transport.size - 1:
            x[position] = value
        collectives.get(name)(x, codec, transport, seed=step, residual=residual)
        assert residual.isfinite().all()
        assert same_everywhere(transport, x)
        assert x.isfinite().all() if value is None else not x[position].isfinite()


def conform(
    transport: Transport,
    name: str,
    codec: Codec,
    device: torch.device,
    lengths: Iterable[int] = LENGTHS,
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> None:
    """Hold the collective ``name`` with ``codec`` to all demands; all ranks call it together."""
    for dtype in dtypes:
        for numel in lengths:
            sums_are_close_and_equal(transport, name, codec, numel, dtype, device)
            nothing_is_lost(transport, name, codec, numel, dtype, device)
            if numel in (1, 129, 1000):
                non_finite_values_surface(transport, name, codec, numel, dtype, device)
