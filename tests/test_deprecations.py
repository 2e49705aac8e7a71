"""Deprecations: what a warning says, and that the page of them lists every one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fusionlayer as fl
from tests.ranks import over_threads

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def test_a_deprecated_argument_still_works_and_says_what_to_write() -> None:
    (warning,) = re.findall(r"^```\n(.*)\n```$", PAGE, re.MULTILINE)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())

    def body(_: object) -> None:
        with pytest.warns(DeprecationWarning, match=f"^{re.escape(warning)}$"):
            fl.DistributedOptimizer(optimizer, layer.named_parameters(), num_groups=1)

    over_threads(1, body)


def test_every_deprecation_is_on_the_page_and_made_by_the_one_helper() -> None:
    listed = re.findall(r"^\| `([\w.]+)`.*\| 0\.\d+ \|", PAGE, re.MULTILINE)
    found = []
    for path in (ROOT / "fusionlayer").rglob("*.py"):
        text = path.read_text()
        found += re.findall(r'\bdeprecated\("([\w.]+)"', text)
        made = [line for line in text.splitlines() if "DeprecationWarning" in line and "except" not in line]
        assert not made or path.name == "deprecations.py", path  # Ray raises one, which is caught
    assert sorted(listed) == sorted(found)
