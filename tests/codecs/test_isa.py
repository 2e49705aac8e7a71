"""Bytes do not depend on the instruction set or on the number of threads."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base import libraries
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from tests.cores import all_cores
from tests.loops import looped
from tests.native.abi import each_isa, threads
from tests.synthetic import awkward, gradient
from tests.tiers import exhaustive

from .conformance import DTYPES, as_bits, blank, encoded, rows
from .test_delta import applied, change, moved
from .variants import every, is_variant_of_few_bits, repeats


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


@pytest.mark.parametrize("name, fast", GROUPS)
def test_bytes_depend_neither_on_instruction_set_nor_on_threads(name: str, fast: bool) -> None:
    """Of short messages, which are ragged, and of a long one; ``tests/native/test_cores.py`` has more of them."""
    for number, codec in enumerate(by_name(fast)[name]):
        dtype, made = DTYPES[number % 3], []
        for _ in each_isa():
            small = everything(codec.bare, 7 * codec.block + 33, dtype)
            for count in (1, 3):
                with all_cores(), threads(count):  # threads that never run at once would show no race
                    made.append([*small, *everything(codec.bare, 100_001, dtype)])
        assert all(all(map(torch.equal, made[0], other)) for other in made), f"{codec} in {dtype}"


def test_changes_since_a_base_have_the_same_bytes() -> None:
    for dtype in DTYPES:
        base = awkward(5 * 16384 + 77, 32, dtype)
        for share, reach in ((0.02, 1), (0.5, 3), (1, 100)):
            x = moved(base, share, reach)
            payload = change(x, base)
            for isa in each_isa():
                for count in (1, 3):
                    with all_cores(), threads(count):
                        assert torch.equal(change(x, base), payload), isa
                        assert torch.equal(as_bits(applied(payload, base)), as_bits(x)), (isa, count)


@looped("name", ["raw", "bf16", "int8"])
def test_threads_that_begin_within_a_message_end_with_it(name: str) -> None:
    codec, chunk = codecs.get(name).bare, 3 * 8192 + 512
    x = gradient(20 * chunk - 99, 1)
    payloads = torch.zeros(20, codec.wire(chunk).capacity + 64, dtype=torch.uint8)[:, :-64]  # apart
    with all_cores(), threads(3):
        codec.encode_chunks(x, payloads, chunk)
        out = torch.empty_like(x)
        codec.decode_chunks(payloads, out, chunk)
    for part, payload, back in zip(x.split(chunk), payloads, out.split(chunk), strict=True):
        own = codec.compress(part)
        assert torch.equal(payload[: own.numel()], own) and torch.equal(back, codec.decompress(own, part.shape))


def test_an_unknown_instruction_set_is_refused() -> None:
    before = libraries.isa()
    with pytest.raises(ConfigError, match="'avx1024'.*avx512, avx2, baseline or auto"):
        libraries.select_isa("avx1024")
    assert libraries.isa() == before
    with pytest.raises(ConfigError, match="threads=0"):
        libraries.set_threads(0)


@pytest.mark.medium
@pytest.mark.parametrize("given, expected", [("baseline", "baseline"), ("sparc", "FUSIONLAYER_ISA='sparc' cannot")])
def test_the_environment_chooses_the_instruction_set(given: str, expected: str) -> None:
    code = (
        "from fusionlayer.base import libraries\nfrom fusionlayer.base.errors import ConfigError\n"
        "try: print(libraries.isa())\nexcept ConfigError as error: print(error)"
    )
    environment = {**os.environ, "FUSIONLAYER_ISA": given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert expected in done.stdout
