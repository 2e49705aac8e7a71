"""Bytes do not depend on the instruction set or on the number of threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fusionlayer
from fusionlayer import native
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from tests.cores import all_cores
from tests.synthetic import awkward
from tests.tiers import exhaustive

from .conformance import DTYPES, as_bits, blank, encoded, rows
from .test_delta import applied, change, moved
from .variants import every, is_variant_of_few_bits, repeats


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    native.select_isa("auto")
    native.set_threads(max(1, min(torch.get_num_threads(), 8)))


def available() -> list[str]:
    """Return the instruction sets that were built and that this CPU has."""
    found = []
    for name in fusionlayer.build_info().isas:
        try:
            native.select_isa(name)
        except ConfigError:
            continue
        found.append(name)
    native.select_isa("auto")
    return found


def everything(codec: Codec, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the bits of what every verb makes of ``n`` elements."""
    x, residual = awkward(n, codec.block, dtype), torch.full((n,), 1e-3)
    messages = rows(codec, 3, n, dtype, x.device)
    payload = encoded(codec, x, seed=7, offset=codec.block, residual=residual)
    recoded = blank(codec, n, dtype, x.device)
    lost, decoded, total = residual.clone(), torch.empty_like(x), x.clone()
    codec.decode(payload, decoded)
    codec.decode_sum(messages, total, add=True)
    codec.recode(messages, recoded, n, dtype=dtype, x=x, seed=1, residual=lost)
    return [payload, recoded, *map(as_bits, (residual, lost, decoded, total))]


def by_name(fast: bool) -> dict[str, list[Codec]]:
    """Return the variants of each codec whose bytes differ; or those that repeat others, and those of few bits."""
    found: dict[str, list[Codec]] = {}
    for codec in every():
        if fast != (codec in repeats() or is_variant_of_few_bits(codec)):
            found.setdefault(codec.name, []).append(codec)
    return found


GROUPS = [(name, True) for name in by_name(True)] + [
    pytest.param(name, False, marks=exhaustive) for name in by_name(False)
]


@pytest.mark.short
@pytest.mark.parametrize("name, fast", GROUPS)
def test_every_instruction_set_makes_the_same_bytes(name: str, fast: bool, restored: None) -> None:
    for codec in by_name(fast)[name]:
        for dtype in DTYPES:
            every_instruction_set_makes_the_same_bytes(codec, dtype)


def every_instruction_set_makes_the_same_bytes(codec: Codec, dtype: torch.dtype) -> None:
    names = available()
    assert "baseline" in names and native.isa() in names
    for n in (1, 31, 129, 7 * codec.block + 33):
        made = []
        for name in names:
            native.select_isa(name)
            assert native.isa() == name
            made.append(everything(codec.bare, n, dtype))
        for name, other in zip(names, made, strict=True):
            assert all(map(torch.equal, other, made[0])), f"{codec}: {name} differs from {names[0]} at {n} x {dtype}"


@pytest.mark.short
@pytest.mark.parametrize("name, fast", GROUPS)
def test_every_number_of_threads_makes_the_same_bytes(name: str, fast: bool, restored: None) -> None:
    for codec in by_name(fast)[name]:
        made = []
        with all_cores():  # threads that never run at once would show no race
            for threads in (1, 3):
                native.set_threads(threads)
                made.append(everything(codec.bare, 100_001, torch.float32))
        assert all(map(torch.equal, *made)), codec


@pytest.mark.short
def test_changes_since_a_base_have_the_same_bytes(restored: None) -> None:
    for dtype in DTYPES:
        base = awkward(5 * 16384 + 77, 32, dtype)
        for share, reach in ((0.02, 1), (0.5, 3), (1, 100)):
            x = moved(base, share, reach)
            payload = change(x, base)
            for isa, threads in itertools.product(available(), (1, 3)):
                native.select_isa(isa)
                native.set_threads(threads)
                with all_cores():
                    assert torch.equal(change(x, base), payload), isa
                    assert torch.equal(as_bits(applied(payload, base)), as_bits(x)), (isa, threads)


@pytest.mark.short
def test_an_unknown_instruction_set_is_refused(restored: None) -> None:
    before = native.isa()
    with pytest.raises(ConfigError, match="'avx1024'.*avx512, avx2, baseline or auto"):
        native.select_isa("avx1024")
    assert native.isa() == before
    with pytest.raises(ConfigError, match="threads=0"):
        native.set_threads(0)


@pytest.mark.medium
@pytest.mark.parametrize("given, expected", [("baseline", "baseline"), ("sparc", "FUSIONLAYER_ISA='sparc' cannot")])
def test_the_environment_chooses_the_instruction_set(given: str, expected: str) -> None:
    code = (
        "from fusionlayer import native\nfrom fusionlayer.base.errors import ConfigError\n"
        "try: print(native.isa())\nexcept ConfigError as error: print(error)"
    )
    environment = {**os.environ, "FUSIONLAYER_ISA": given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert expected in done.stdout
