"""The pages for newcomers: Start, Choosing, the guides and the concepts. Their code runs, and their commands start."""

import importlib
import os
import random
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base.plan import TensorInfo
from fusionlayer.cli import main, ratio
from fusionlayer.planning.cost_model import AlphaBeta
from fusionlayer.scheduler.planners import StepCosts
from fusionlayer.scheduler.planners._base import registry
from tests.harness import run_ranks
from tests.loops import looped
from tests.pages import DOCS, ROOT, blocks, lines
from tests.ports import free_port

PAGES = [DOCS / f"{name}.md" for name in ("choosing", "watching", "adding_a_codec", "adding_a_planner", "architecture")]
PAGES += sorted(page for folder in ("start", "guides", "concepts") for page in (DOCS / folder).glob("*.md"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_two_lines_train_alike_on_all_ranks(
    one_thread: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the first page, and those for Ray, whose stand-in starts threads."""
    (laptop,), (ray, _, horovod) = (
        # Digits: losses of two ranks, which have data of their own, are equal in three of them now and then.
        [
            code.replace("range(200)", "range(10)").replace(":.3f}", ":.8f}")
            for code in blocks(f"start/{page}.md", "python")
        ]
        for page in ("laptop", "ray")
    )
    fl.transport.local.run(lambda rank: exec(compile(laptop, "laptop.md", "exec"), {}), 2)
    check_losses(capsys.readouterr().out)

    class Trainer:
        def __init__(self, train: Any, scaling_config: int, train_loop_config: dict[str, float] | None = None) -> None:
            given = [] if train_loop_config is None else [train_loop_config]
            self.fit = lambda: fl.transport.local.run(lambda rank: (train(*given), hvd.shutdown()), scaling_config)

    names = {"ray": {}, "ray.train": {"ScalingConfig": lambda num_workers: num_workers}}
    names["ray.train.torch"] = {"TorchTrainer": Trainer}
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(ray, "ray.md", "exec"), {"__name__": "__main__"})
    check_losses(capsys.readouterr().out)
    exec(compile(horovod, "ray.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("of 2: equal True") == 2


def check_losses(out: str, ranks: int = 2) -> None:
    """Check what ranks have printed: they had data of their own, and have the same model."""
    rows = re.findall(r"rank \d(?: of \d)?: loss (\S+), first weight (-?\d\.\d{8})", out)
    assert len(rows) == ranks, out
    losses, weights = ({*values} for values in zip(*rows, strict=True))
    assert len(losses) == ranks and len(weights) == 1, out


LINE = re.compile(r"`(fl\.(?:Distributed|Sharded)Optimizer\([^`]*\))`")


@looped("line", LINE.findall((DOCS / "choosing.md").read_text()))
def test_every_line_to_choose_from_trains(line: str) -> None:
    def train(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        names = {"fl": fl, "torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        optimizer = eval(line, names)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 40), rank + 1.0)).square().sum().backward()
            optimizer.step()
        if "Distributed" in line:
            optimizer.synchronize()
            optimizer.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    first, second = fl.transport.local.run(train, 2)
    assert first == second


def test_the_rows_of_the_page_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "choosing.md").read_text()
    (command,) = lines("choosing.md", "explain")
    assert main(shlex.split(command)[1:]) == 0
    told = capsys.readouterr().out
    assert "sends 750 MB a step in 6 s" in told and "Sending / computing: 17.1\n" in told and "Row 'above 10'" in told
    for row in ratio.ROWS:
        assert re.search(rf"^\| {row.name}\b.*\|", page, re.MULTILINE), row
        assert f'codec="{row.codec}"' in page and all(line.split("= ")[1].split("(")[0] in page for line in row.before)


@pytest.mark.medium
def test_the_code_for_each_user_trains(tmp_path: Path) -> None:
    users = blocks("choosing.md", "python")
    assert len(users) == 8
    run_ranks(hold_users, 2, users, [free_port() for _ in users], tmp_path, backend=None)


def hold_users(rank: int, world: int, users: list[str], ports: list[int], folder: Path) -> None:
    """Run each program as a launcher would; the one that is two jobs has another role on each rank."""
    os.chdir(folder)
    for code, port in zip(users, ports, strict=True):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        sys.argv = ["train.py", ("train", "serve")[rank]]
        names: dict[str, Any] = {}
        exec(compile(code, "choosing.md", "exec"), names)
        assert not dist.is_initialized() and not fl.is_initialized(), code


def test_the_code_of_concepts_and_api_runs() -> None:
    pages = [page.relative_to(DOCS) for folder in ("concepts", "api") for page in (DOCS / folder).glob("*.md")]
    codes = [code for page in sorted(pages) for code in blocks(str(page), "python")]
    assert len(codes) == 9

    def run(rank: int) -> bool:
        for code in codes:
            for line in filter(None, code.splitlines()):
                model = nn.Linear(40, 30)
                names: dict[str, Any] = {"fl": fl, "torch": torch, "model": model, "tensor": torch.ones(300)}
                names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
                exec(line, names)
                if names["optimizer"].__class__.__name__ == "SGD" and hasattr(names["optimizer"], "close"):
                    names["optimizer"].close()
        return True

    assert fl.transport.local.run(run, 2) == [True, True]


def test_the_planners_of_the_tutorial_keep_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, use = blocks("adding_a_planner.md", "python")
    names: dict[str, Any] = {"__name__": __name__, "fl": fl}
    cost, draw = AlphaBeta(1e-4, 1e-8), random.Random(0)
    try:
        exec(compile(f"from __future__ import annotations\n{first}\n{second}", "adding_a_planner.md", "exec"), names)
        for count in (0, 1, 2, 9):
            model = [TensorInfo(f"t{i}", draw.choice([10, 900_000]), "float32", 4) for i in range(count)]
            costs = StepCosts({t.name: 1e-9 * t.numel for t in model}, cost, cost, cost, cost(1))
            for planner in (fl.planners.get("large_alone"), fl.planners.get("two_buckets")):
                runs = planner(model, costs)
                assert [tensor for run in runs for tensor in run] == model and all(runs)
                assert planner(model, costs) == runs
            alone = [run for run in fl.planners.get("large_alone")(model) if run[0].nbytes > 1 << 20]
            assert all(len(run) == 1 for run in alone)

        def optimize(rank: int) -> int:
            model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 2))
            mine = {**names, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
            exec(use, mine)
            model(torch.ones(1, 200)).sum().backward()
            mine["optimizer"].step()
            buckets = len(mine["optimizer"].fusion_plan.buckets)
            mine["optimizer"].close()
            return buckets

        assert fl.transport.local.run(optimize, 2) == [2, 2], "the large one, and the small ones before it"
        (command,) = lines("adding_a_planner.md", "fusionlayer")
        words = shlex.split(command)[1:]
        words[words.index("--profile") + 1] = str(ROOT / words[words.index("--profile") + 1])
        assert main(words) == 0
        assert {"large_alone", "two_buckets"} <= {*capsys.readouterr().out.split()}
    finally:
        registry.remove("large_alone")
        registry.remove("two_buckets")


def test_the_drawings_are_what_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "drawings"))
    draw = importlib.import_module("draw")
    shown = {name for page in PAGES for name in re.findall(r"drawings/(\w+)\.svg\)", page.read_text())}
    assert shown == {*draw.DRAWINGS} == {path.stem for path in (DOCS / "drawings").glob("*.svg")}
    for name, drawing in draw.DRAWINGS.items():
        current = (DOCS / "drawings" / f"{name}.svg").read_text()
        assert drawing().svg() == current, "draw them anew with 'python docs/drawings/draw.py'"


def test_errors_that_pages_explain_are_errors_that_there_are() -> None:
    """Of each table of what goes wrong: the words between backquotes, up to the first number or dots."""
    sources = "\n".join(path.read_text() for path in (ROOT / "fusionlayer").rglob("*.py"))
    sources = re.sub(r"\{[^{}]*\}", "*", re.sub(r'"\s*\n\s*f?"', "", sources))
    foreign = ("Host key", "Permission denied", "ambiguous option", "torchrun:", "OMP_", "rank 0 of 1")
    told = 0
    for page in PAGES:
        table = re.search(r"(?s)\| the error says \|.*?\n\n|\| the error says \|.*", page.read_text() + "\n\n")
        for row in table[0].splitlines()[2:] if table else []:
            for words in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                if words.startswith(foreign):
                    continue
                parts = [
                    part.strip(" ,;'") for part in re.split(r"\.\.\.|\d[\d.]*|'\w+'|\[1?\]|\]|\[|eth0|boxa", words)
                ]
                assert any(len(part) > 7 and part in sources for part in parts), f"{page.name}: no error says {words!r}"
                told += 1
    assert told > 8
