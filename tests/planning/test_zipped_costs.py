"""Equations 6 and 7 from a profile."""

from pathlib import Path

import pytest

from fusionlayer.collectives.switching import KINDS
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.zipped_costs import expected_costs
from tests.planning.profiles import write_example

ZIP = """\
  zip:
    bits: 27.2
    lossless: true
    algorithm: zipped
    encode: &zipping [[4096, 1.0e-6], [4194304, 1.0e-3]]
    decode: *zipping
    sum: *zipping
    recode: *zipping
"""


def profile(folder: Path) -> Profile:
    path = write_example(folder)
    path.write_text(path.read_text().replace("links:\n", f"{ZIP}links:\n", 1))
    return Profile.from_yaml(path)


def test_zipping_pays_on_slow_links_from_some_size_on(tmp_path: Path) -> None:
    known = profile(tmp_path)
    slow, fast = (expected_costs(known, Scenario(rate), 4) for rate in ("100mbit", "1gbit"))
    assert set(slow) == set(fast) == set(KINDS)
    for kind in KINDS:
        assert slow[kind].factor == 27.2 / 32
        if kind != "all_reduce":  # whose native form, a ring, has more hops
            assert 0 < slow[kind].zips_from() < fast[kind].zips_from()
        native, zipped = slow[kind].seconds(1 << 26)
        assert 0.8 < zipped / native < 0.9
    beta, codec = fast["all_to_all"].native.beta, fast["all_to_all"].codec
    assert codec == pytest.approx(2 * 1e-3 / (1 << 22) / 4, rel=0.05)
    assert fast["all_to_all"].seconds(1e9)[1] == pytest.approx(27.2 / 32 * beta * 1e9 + codec * 1e9, rel=0.01)
    assert fast["all_gather"].codec == pytest.approx(codec / 2 * (1 / 3 + 1), rel=1e-6), "one encoding, three decodings"
