"""YAML in every file and option: what PyYAML reads, but no key twice."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fusionlayer.base import config, records
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import FusionPlan
from fusionlayer.cli.arguments import key_value
from fusionlayer.planning.codec_rules import CodecRules
from fusionlayer.planning.losses import LossCosts
from fusionlayer.planning.profile import Profile
from tests.loops import looped

UNIQUE = (
    "",
    "a: 1\nb: {a: 1, c: [{a: 1}, {a: 2}]}",
    '{1: a, "1": b, 1.5: c, false: d, null: e}',
    "base: &base {a: 1, b: 2}\none: {<<: *base, a: 3}\ntwo: {<<: [*base, {a: 4}], c: 5}\nsame: *base",
    "x: &x {a: 1}\ny: &y {<<: *x, a: 2}\nz: {<<: *y, a: 3}\nagain: [*x, *y]",
    "{? {a: 1} : 2}",
    "=: 1",
)
TWICE = (
    "a: 1\na: 2",
    "a: 1\nb: 2\na: 1",
    "{a: 1, 'a': 2}",
    "{1: a, 0x1: b}",
    "{true: a, yes: b}",
    "{1: a, true: b}",
    "{1: a, 1.0: b}",
    "a:\n  b: [{c: 1, c: 2}]",
    "base: &base {a: 1}\none: {a: 2, <<: *base, a: 3}",
    "base: &base {a: 1, a: 2}\none: {<<: *base}",
    "one: {<<: {a: 1}, <<: {b: 1}}",
)


@looped("text", UNIQUE)
def test_what_has_no_key_twice_is_read_as_ever(text: str) -> None:
    try:
        expected = yaml.safe_load(text)
    except yaml.YAMLError as error:
        with pytest.raises(type(error)):
            records.parse(text)
    else:
        assert records.parse(text) == expected


READERS: dict[str, Callable[[Path], object]] = {
    "settings": lambda path: config.load({"FUSIONLAYER_CONFIG": str(path)}),
    "options in a variable": lambda path: config.load({"FUSIONLAYER_CODEC_OPTIONS": path.read_text()}),
    "plan": FusionPlan.from_yaml,
    "profile": Profile.from_yaml,
    "rules": CodecRules.from_yaml,
    "losses": LossCosts.from_yaml,
    "option of a command": lambda path: key_value(f"options={path.read_text()}"),
}


@looped("text", TWICE)
@looped("reader", READERS)
def test_a_key_that_stands_twice_is_refused(reader: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises((ConfigError, argparse.ArgumentTypeError), match="the mapping has the key .* twice"):
        READERS[reader](path)


ODD = (
    *("9" * 5000, "0x" + "f" * 5000, "-" + "7" * 30, "1" + ":59" * 300, "1" + ":59" * 300 + ".5", "1:" * 40 + "1"),
    *("2001-99-99", "2001-02-29 25:00:00", "0b_", "0x_", "!!int x", "!!float x", "!!bool x", "!!timestamp x"),
    "[" * 5000 + "]" * 5000,
)


@looped("text", [form % text for text in ODD for form in ("a: %s", "version: [1, %s]", "%s: 1")])
@looped("reader", READERS)
def test_what_is_no_number_or_date_is_refused_in_a_sentence(reader: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises((ConfigError, argparse.ArgumentTypeError)) as found:
        READERS[reader](path)
        raise ConfigError("plain text is read as a text")  # such as the value of an option
    assert len(str(found.value)) < 1000 + len(text)  # the text of a variable is told


_STEPS = ["&a0 [x, x]", *(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 8))]


@looped("text", [f"[{', '.join(_STEPS)}]", "&a [*a]", "&a {b: *a}"])
def test_aliases_cannot_stand_for_more_than_memory_holds(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"version: 1\nworld_size: {text}\n")
    with pytest.raises(ConfigError, match="aliases repeat more than 1000000 values, or one holds itself"):
        FusionPlan.from_yaml(path)


@looped("text", ["5", "text", "[1]", "2.5"])
@looped("reader", READERS)
def test_a_file_without_keys_is_refused(reader: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises((ConfigError, argparse.ArgumentTypeError)):
        READERS[reader](path)
        raise ConfigError("the value of an option may have none")


@looped("text", ["9" * 5000, "1:" * 40 + "1", "2001-99-99", "!!bool x"])
def test_a_number_that_is_none_is_told_with_its_place(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"version: 1\nworld_size: {text}\n")
    with pytest.raises(ConfigError, match=r"(too large; expected a whole number|put a text in quotes).*line 2, column"):
        FusionPlan.from_yaml(path)
