from dataclasses import replace
from pathlib import Path

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cost_model import AlphaBeta, Curve
from fusionlayer.planning.profile import Profile, Validation
from tests.loops import looped

from .profiles import EXAMPLE, write_example


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile.from_yaml(write_example(tmp_path))


def test_the_example_of_the_page_is_a_profile(profile: Profile) -> None:
    assert profile.machine.cores_per_worker == 1
    assert [tensor.info.nbytes for tensor in profile.model.tensors] == [4_000_000, 8_000_000, 4_000_000]
    assert profile.copy == AlphaBeta(0.0, 3e-10)
    assert profile.codec("int4").encode == Curve(((4096.0, 1e-5), (4194304.0, 4e-3)))
    assert profile.codec("raw").lossless and not profile.codec("int4").lossless
    assert profile.inside is None and profile.validation is None


def test_what_is_written_is_read_again(profile: Profile, tmp_path: Path) -> None:
    known = Validation("r.json", 3, (2, 4), ("100mbit", "1gbit"), ("ddp",), (0.1, 0.05, 0.25), 0.9, 1.0, 1.25)
    full = replace(
        profile, validation=known, environment={"cores": "2", "date": "2026-01-01"}, inside=profile.links["1gbit"]
    )
    full.to_yaml(tmp_path / "again.yaml", "two\nlines")
    assert (tmp_path / "again.yaml").read_text().startswith("# two\n# lines\nversion: 1\n")
    assert Profile.from_yaml(tmp_path / "again.yaml") == full


@looped(
    "old, new, message",
    [
        ("version: 1", "version: 2", r"version 2, expected 1; make it anew"),
        ("version: 1", "", r"profile .*: lacks 'version'; it needs: version, title, machine"),
        ("title:", "titel:", r"profile .*: unknown key 'titel'; did you mean 'title'"),
        ("cores: 2", "cores: two", r"machine.cores='two'; expected a whole number"),
        ("cores: 2", "cores: 0", r"machine: cores=0; expected at least 1"),
        ("cores: 2", "cores: true", r"machine.cores=True; expected a whole number"),
        ("forward: 0.1", "forward: -1", r"model: forward=-1.0; expected seconds from 0 on"),
        ("numel: 2000000", "numel: 2.5", r"model.tensors\[1\].numel=2.5; expected a whole number"),
        ("lossless: true", "lossless: 1", r"codecs.raw.lossless=1; expected true or false"),
        (
            "[[65536, 5.8e-3], [1048576, 8.9e-2], [4194304, 0.355]]",
            "7",
            r"exchange=7; expected keys and values or a list",
        ),
        ("[65536, 5.8e-3]", "[65536]", r"links.100mbit.exchange\[0\]=\[65536\]; expected a list of 2"),
        ("[65536, 5.8e-3]", "[9999999, 5.8e-3]", r"links.100mbit.exchange: a curve over the sizes"),
        ("  100mbit:", "  fast:", r"rate 'fast'; expected a number above 0 with bit"),
        ("copy: {alpha: 0.0, beta: 3.0e-10}", "copy: {alpha: 0.0}", r"copy: lacks 'beta'"),
        ("bits: 4.25", "bits: .nan", r"bits=nan for an element; expected 0 to 64"),
        ("version: 1", "version: [", r"cannot be read: "),
        (
            "title: example",
            "title: !!python/object/apply:os.getcwd []",
            r"cannot be read: could not determine a constructor",
        ),
        (EXAMPLE, "[]", r"profile .*: \[\]; expected keys and values"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    assert EXAMPLE.count(old) >= 1
    path.write_text(EXAMPLE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        Profile.from_yaml(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
