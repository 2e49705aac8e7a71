"""The pages of docs/howto: their Python trains on two ranks, alike, and their settings are settings."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fusionlayer as fl
from fusionlayer.base import config
from tests.loops import looped
from tests.pages import DOCS, blocks

PAGES = sorted(page.stem for page in (DOCS / "howto").glob("*.md"))
TRAIN = [name for name in PAGES if "fl.init()" in (DOCS / "howto" / f"{name}.md").read_text()]


def trained(name: str, steps: int = 10) -> tuple[dict[str, Any], list[list[float]]]:
    """Run the script of a page on two ranks; return rank 0's names, and the weights of each."""
    (script,) = blocks(f"howto/{name}.md", "python")
    code = compile(script.replace("10)", f"{steps})"), f"{name}.md", "exec")

    def train(rank: int) -> tuple[dict[str, Any], list[float]]:
        names: dict[str, Any] = {}
        exec(code, names)
        names["optimizer"].close()
        return names, torch.cat([parameter.detach().flatten() for parameter in names["model"].parameters()]).tolist()

    (names, first), (_, second) = fl.transport.local.run(train, 2)
    return names, [first, second]


@looped("name", TRAIN)
def test_each_script_trains_alike_on_all_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, (first, second) = trained(name)
    assert first == second and any(names["optimizer"].state.values())
    if name == "out_of_memory":
        parameters = sum(map(torch.numel, names["model"].parameters()))
        assert 1.03 * parameters <= sum(part.nbytes for kept in names["kept"].values() for part in kept.values())


def test_a_resumed_job_begins_where_the_checkpoint_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained("save_and_resume", steps=7)
    names, (first, second) = trained("save_and_resume")
    assert names["first"] == 5 and names["step"] == 9
    assert first == second


def test_metrics_reach_each_of_the_three(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    counters: dict[str, Any] = {}
    wandb, otel, board = (types.ModuleType(name) for name in ("wandb", "opentelemetry", "torch.utils.tensorboard"))
    run = types.SimpleNamespace(log=logged.append)
    meter = types.SimpleNamespace(create_observable_counter=lambda name, callbacks: counters.update({name: callbacks}))
    vars(wandb)["init"] = lambda project: run
    vars(otel)["metrics"] = types.SimpleNamespace(get_meter=lambda _: meter, Observation=lambda *values: values)
    vars(board)["SummaryWriter"] = lambda folder: types.SimpleNamespace(add_scalar=print)
    for module in (wandb, otel, board):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def record(rank: int) -> None:
        for script in blocks("howto/log_metrics.md", "python"):
            names: dict[str, Any] = {}
            exec(script, names)
            for each in ("logging", "writing"):
                if each in names:
                    names[each].close()
            if "log" in names:
                names["log"](fl.metrics.read())
        for (callback,) in counters.values():
            ((value, labels),) = callback(None)
            assert value >= 0 and labels == {"rank": 0}

    fl.transport.local.run(record, 1)
    assert "fusionlayer/bytes_sent" in logged[0] and "fusionlayer.bytes_sent" in counters
    assert {name.removeprefix("fusionlayer.") for name in counters} <= {*fl.metrics.METRICS}


def test_the_settings_of_the_page_on_wans_are_settings() -> None:
    (text,) = blocks("howto/wan.md", "yaml")
    assert config.Config(**yaml.safe_load(text)).transport == "sockets"
