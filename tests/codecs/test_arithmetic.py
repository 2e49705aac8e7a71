"""What references compute with, held to known answers; that it is the core's, the tests of bytes show."""

from __future__ import annotations

import numpy as np
import pytest

from tests.synthetic import gradient

from .arithmetic import hadamard, pack_runs, unpack_runs

pytestmark = pytest.mark.short


def test_the_transform_is_that_of_the_handbook() -> None:
    """(1 .. 32) / 32 in natural order, normalised: known values. It is its own inverse, but for its size."""
    out = hadamard(np.arange(1, 33, dtype=np.float32)[None] / 32) / 32**0.5
    np.testing.assert_allclose(out[0, :4], [2.916816, -0.088388, -0.176777, 0.0], rtol=0, atol=1e-6)
    for block in (2, 32, 1024):
        x = (np.arange(3 * block, dtype=np.float32) % 17 - 8).reshape(3, block)
        assert (hadamard(hadamard(x)) == x * block).all()


def test_places_of_codes() -> None:
    """12 bits: 32 low bytes, 16 of two high halves; 3 bits: 8 bytes of four low pairs, 4 of eight high bits."""
    codes = np.zeros(32, np.int32)
    for bits, code, places in ((12, 0xABC, {17: 0xBC, 33: 0xA0}), (3, 0b110, {1: 0b10 << 4, 9: 1 << 4})):
        codes[17] = code
        data = pack_runs(codes, bits)
        assert {place: data[place] for place in np.flatnonzero(data)} == places and len(data) == 4 * bits
    for bits in (1, 2, 3, 4, 6, 8, 12, 16):
        codes = gradient(320, bits).numpy().view(np.int32) & (1 << bits) - 1
        assert (unpack_runs(pack_runs(codes, bits), bits) == codes).all()
