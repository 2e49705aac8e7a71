"""Codecs, collectives and planners of installed packages: found by their entry points, in all fronts and commands."""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import fusionlayer as fl
from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.cli import doctor, main
from fusionlayer.collectives import gathers
from fusionlayer.scheduler import planners
from tests.planning.profiles import EXAMPLE

PAGE = (Path(__file__).parents[1] / "docs" / "adding_a_codec.md").read_text()
(MODULE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(PROJECT,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# What a build makes of the section in pyproject.toml.
ENTRY_POINTS = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", PROJECT).replace('"', "")
COLLECTIVE = """
from fusionlayer import collectives

@collectives.collective("toy_sum")
def toy_sum(x, codec, transport, *, seed=0, residual=None):
    collectives.get("one_shot")(x, codec, transport, seed=seed, residual=residual)
"""
GATHER = """
from fusionlayer import collectives

@collectives.gather_collective("toy_gather")
def toy_gather(payload, every, messages, codec, transport):
    collectives.get_gather("gather")(payload, every, messages, codec, transport)
"""
PLANNER = """
from dataclasses import dataclass
from fusionlayer.scheduler.planners import Planner

@dataclass(frozen=True)
class Toy(Planner, name="toy_pairs"):
    def cut(self, tensors, costs):
        return [list(tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
"""
TOYS = {"mycodecs.py": MODULE, "toy_sums.py": COLLECTIVE, "toy_gathers.py": GATHER, "toy_planners.py": PLANNER}
MORE = """
[fusionlayer.collectives]
toy_sum = toy_sums:toy_sum
[fusionlayer.gathers]
toy_gather = toy_gathers
[fusionlayer.planners]
toy_pairs = toy_planners:Toy
"""
REGISTRIES = (codecs.registry, collectives.registry, gathers, planners.registry)

Install = Callable[[str, Mapping[str, str], str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package where Python finds it, as pip does; all of them go at the end."""
    assert all(each.names() for each in REGISTRIES), "what fusionlayer has itself is registered"
    before = [(dict(each._factories), dict(each._offered)) for each in REGISTRIES]
    modules = set(sys.modules)

    def put(name: str, files: Mapping[str, str], entry_points: str) -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(entry_points)
        for file, text in files.items():
            (folder / file).write_text(text)
        monkeypatch.syspath_prepend(folder)

    yield put
    for each, (factories, offered) in zip(REGISTRIES, before, strict=True):
        each._factories, each._offered = factories, offered
        each._told.clear()
    for name in set(sys.modules) - modules:
        if name in ("mycodecs", "toy_sums", "toy_gathers", "toy_planners", "torn"):
            del sys.modules[name]


def test_every_front_and_command_finds_them(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("toys", TOYS, ENTRY_POINTS + MORE)
    assert codecs.get("int8") and collectives.get("two_shot") and planners.get("tapered")
    assert not {"mycodecs", "toy_sums", "toy_planners"} & set(sys.modules), "no name of theirs was looked up"
    assert codecs.options("e5m2") == ["factor", "header"]
    assert "toy_sums" not in sys.modules
    assert "e5m2" in codecs.names() and "toy_sum" in collectives.names() and "toy_pairs" in planners.names()
    assert "toy_gather" in collectives.gather_names() and collectives.is_gather("toy_gather")

    def train(rank: int) -> tuple[fl.FusionPlan, torch.Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fl.DistributedOptimizer(optimizer, model, "e5m2", "toy_sum", "toy_pairs", factor=2.0)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        optimizer.step()
        plan = optimizer.fusion_plan
        assert plan
        optimizer.close()
        return plan, torch.cat([p.detach().flatten() for p in model.parameters()])

    (plan, first), (_, second) = fl.transport.local.run(train, 2)
    assert torch.equal(first, second)
    assert [len(bucket.slots) for bucket in plan.buckets] == [2, 2]
    assert {(bucket.codec, bucket.algorithm) for bucket in plan.buckets} == {("e5m2", "toy_sum")}

    bench = "bench collectives --collectives all_reduce --codecs raw,e5m2 --algorithms toy_sum --max 4K --calls 1"
    assert fl.transport.local.run(lambda rank: main(bench.split()), 2) == [0, 0]
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("all_reduce")]
    assert rows == [["all_reduce", codec, "toy_sum"] for codec in ("raw", "e5m2")]

    profile = yaml.safe_load(EXAMPLE)
    profile["codecs"]["e5m2"] = profile["codecs"]["int4"]
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    measured, made = str(tmp_path / "profile.yaml"), str(tmp_path / "plan.yaml")
    line = ["plan", "--profile", measured, "--workers", "2", "--codec", "e5m2", "--planner", "toy_pairs", "-o", made]
    assert main(line) == 0
    assert main(["explain", made, "--profile", measured]) == 0
    assert main(["simulate", measured, "--workers", "2", "--codec", "e5m2", "--planner", "toy_pairs"]) == 0
    assert "e5m2/toy_pairs" in capsys.readouterr().out
    assert {bucket.codec for bucket in fl.FusionPlan.from_yaml(made).buckets} == {"e5m2"}


BROKEN = {
    "missing": "codec 'torn' of package missing 1.5 cannot be used: ModuleNotFoundError: No module named 'torn'",
    "nothing": "codec 'torn' of package nothing 1.5 cannot be used: torn registers no codec of this name",
    "raising": "codec 'torn' of package raising 1.5 cannot be used: RuntimeError: not today",
    "taking": "codec 'torn' of package taking 1.5 cannot be used: codec name 'raw' is taken; choose another",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_package_is_one_line_and_harms_no_other(
    install: Install, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = {
        "nothing": "",
        "raising": MODULE.replace("e5m2", "torn") + "raise RuntimeError('not today\\nbut')",
        "taking": MODULE.replace("e5m2", "raw"),
    }.get(fault)
    install("toys", TOYS, ENTRY_POINTS)
    install("unreadable", {}, "[fusionlayer.codecs]\nno sense\n")
    install(fault, {} if text is None else {"torn.py": text}, "[fusionlayer.codecs]\ntorn = torn\n")
    with caplog.at_level(logging.WARNING, "fusionlayer"):
        for _ in range(2):
            assert {"e5m2", "raw"} <= set(codecs.names()) and "torn" not in codecs.names()
    unreadable = "package unreadable 1.5 is left out: its entry_points.txt cannot be read; mend or uninstall it"
    assert sorted(record.getMessage() for record in caplog.records) == [BROKEN[fault], unreadable]
    with pytest.raises(ConfigError, match=f"^{re.escape(BROKEN[fault])}$"):
        codecs.get("torn")
    assert codecs.get("e5m2") and codecs.get("raw").lossless


def test_doctor_tells_what_packages_offer(install: Install) -> None:
    install("toys", TOYS, ENTRY_POINTS + MORE)
    install("missing", {}, "[fusionlayer.codecs]\ntorn = torn\n")
    found = {finding.name: (finding.state, finding.detail) for finding in doctor._plugins()}
    fine = ("codec e5m2", "collective toy_sum", "gathering collective toy_gather", "planner toy_pairs")
    assert {name: found.pop(name) for name in fine} == dict.fromkeys(fine, ("ok", "toys 1.5"))
    assert found["codec torn"][0] == "FAIL" and BROKEN["missing"] in found.pop("codec torn")[1]
    assert not found


def test_a_name_that_two_packages_offer_is_refused(install: Install) -> None:
    install("toys", TOYS, ENTRY_POINTS)
    install("others", {}, ENTRY_POINTS)
    with pytest.raises(ConfigError, match="^codec 'e5m2' of package others 1.5 and toys 1.5 cannot be used: both"):
        codecs.get("e5m2")
