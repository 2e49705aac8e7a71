"""What README and docs tell people to run, runs."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer.cli import doctor, fusionrun, main
from fusionlayer.codecs.base import registry
from tests.codecs.conformance import CHECKS
from tests.codecs.variants import variants
from tests.harness import run_ranks
from tests.loops import looped
from tests.pages import PAGES, ROOT, blocks
from tests.ports import free_port

README = (ROOT / "README.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs/guarantees.md").read_text()
    promises = re.findall(r"^- .*(?:\n  .*)*", page.partition("## What is not guaranteed")[0], re.MULTILINE)
    assert len(promises) > 80
    for promise in promises:
        named = re.findall(r"^  `([\w/]+\.py)(?:::(\w+))?`$", promise, re.MULTILINE)
        assert named, promise
        for file, test in named:
            assert f"def {test or 'test_'}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


@looped("world", [2, 3])
def test_the_diff_of_a_training_loop_trains_alike_on_all_ranks(world: int) -> None:
    """Without a seed, too: ranks begin with rank 0's parameters."""
    (diff,) = blocks("../README.md", "diff")
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 3, "the README promises three lines"
    plain = "\n".join(line[1:] for line in diff.splitlines())
    assert blocks("../README.md", "python") == [plain + "\n"], "the code to copy is that of the diff"
    code = compile(plain, "README.md", "exec")

    def train(rank: int) -> list[Tensor]:
        class Loss(nn.Linear):
            def __init__(self, config: int) -> None:
                super().__init__(config, 1)
                begun[rank] = [parameter.detach().clone() for parameter in self.parameters()]

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).square().mean()

        data = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
        names: dict[str, Any] = {"torch": torch, "GPT": Loss, "config": 5, "data": data, **vars(torch.utils.data)}
        exec(code, names)
        names["optimizer"].close()
        drawn[rank] = {*names["sampler"]}
        return [parameter.detach() for parameter in names["model"].parameters()]

    begun: dict[int, list[Tensor]] = {}
    drawn: dict[int, set[int]] = {}
    first, *others = fl.transport.local.run(train, world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values())) == 96, "each rank has data of its own"
    assert not torch.equal(begun[0][0], begun[1][0]), "without a seed each rank has a model of its own at first"
    assert not torch.equal(first[0], begun[0][0]), "nothing was learnt"
    torch.testing.assert_close(first[0], begun[0][0], rtol=0, atol=1e-2)


def test_the_python_about_using_it_runs(tmp_path: Path) -> None:
    hook, overlap, reduction, codec, signs, own, sharded, muon, saved = blocks("using.md", "python")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 2))
        exec(hook, {"fl": fl, "model": model})
        model(torch.ones(1, 4)).sum().backward()
    finally:
        fl.shutdown()
        dist.destroy_process_group()

    def ahead(rank: int) -> None:
        names: dict[str, Any] = {"fl": fl, "model": nn.Linear(4, 2)}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        exec(overlap, names)
        names["model"](torch.ones(1, 4)).sum().backward()
        names["optimizer"].step()
        names["optimizer"].close()

    fl.transport.local.run(ahead, 2)

    def optimize(code: str, rank: int) -> list[float]:
        names: dict[str, Any] = {"fl": fl, "torch": torch, "model": nn.Linear(4, 2)}
        exec(code, names)
        names["model"](torch.ones(1, 4)).sum().backward()
        names["optimizer"].step()
        if isinstance(names["optimizer"], fl.Distributed):
            names["optimizer"].close()
        return torch.cat([p.detach().flatten() for p in names["model"].parameters()]).tolist()

    in_folder = saved.replace("checkpoints", str(tmp_path))
    for code in (signs, own, sharded, muon, f"{sharded}\n{in_folder}"):
        first, second = fl.transport.local.run(partial(optimize, code), 2)
        assert first == second

    def reduce(rank: int) -> Tensor:
        tensor = torch.full((300,), float(rank + 1))
        exec(reduction, {"fl": fl, "tensor": tensor})
        return tensor

    for result in fl.transport.local.run(reduce, 2):
        torch.testing.assert_close(result, torch.full((300,), 3.0), rtol=0.02, atol=0)

    names: dict[str, Any] = {"fl": fl, "x": torch.randn(10, 30, generator=torch.Generator().manual_seed(0))}
    exec(codec, names)
    assert names["y"].shape == names["x"].shape
    assert (names["y"] - names["x"]).norm() < 0.3 * names["x"].norm()


@pytest.mark.medium
def test_the_python_about_model_parallelism_runs(tmp_path: Path) -> None:
    styles, channel, optimizer, experts, pipeline = blocks("model_parallel.md", "python")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "tp", "pp"))
        model = nn.Sequential()
        model.up, model.down = nn.Linear(4, 8), nn.Linear(8, 4)
        names: dict[str, Any] = {"mesh": mesh, "model": model, "group": mesh["tp"].get_group()}
        exec(styles, names)
        names.update({"fl": fl, "up": model.up, "down": model.down})
        exec(channel, names)
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(optimizer, names)
        names["perceptron"](torch.ones(2, 4)).sum().backward()
        names["optimizer"].step()
        exec(experts, names)
        mixture = names["Mixture"](4, 3)
        mixture(torch.ones(2, 5, 4)).sum().backward()
        assert mixture.router.weight.grad is not None
        names.update({"module": nn.Linear(4, 4), "index": 0, "count": 1, "device": torch.device("cpu")})
        names["loss"] = nn.functional.mse_loss
        exec(pipeline, names)
        names["schedule"].step(torch.ones(8, 4), target=torch.zeros(8, 4))
        assert names["module"].weight.grad is not None
    finally:
        fl.shutdown()
        dist.destroy_process_group()


def test_the_python_about_publishing_runs(tmp_path: Path) -> None:
    """The inference jobs run between two steps of the trainer."""
    trainer, inference, engine, relay = blocks("publish.md", "python")
    served: list[str] = []

    class LLM:
        def __init__(self, model: object, worker_extension_cls: str, **options: object) -> None:
            assert worker_extension_cls == f"{fl.vllm.WorkerExtension.__module__}.{fl.vllm.WorkerExtension.__name__}"

        def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
            served.append(request["init_info"]["secret_file"])

        def collective_rpc(self, method: str) -> list[None]:
            return [None]

        def generate(self, prompts: list[str]) -> None:
            served.extend(prompts)

    def batches() -> Iterator[int]:
        yield 0
        exec(inference, {**names, "model": nn.Linear(2, 2), "prompts": ["a", "b"]})
        exec(engine, {**names, "LLM": LLM, "WeightTransferConfig": str, "batches": [["c"]]})
        follows = {**names, "address": names["publisher"].address}
        exec(relay, follows)
        follows["follower"].close()
        yield 1

    names: dict[str, Any] = {"fl": fl, "model": nn.Linear(2, 2), "batches": batches()}
    (tmp_path / "weights.secret").touch(0o600)
    (tmp_path / "weights.secret").write_text("0123456789abcdef")
    names |= {
        "Path": tmp_path.joinpath,
        "train": lambda model, batch: None,
        "generate": lambda model, prompt: served.append(prompt),
    }
    exec(trainer, names)
    assert served == ["a", "b", "weights.secret", "c"] and names["publisher"].version == 1


@pytest.mark.medium
def test_the_python_about_fsdp_runs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(hold_fsdp, 2, folder)


def hold_fsdp(rank: int, world: int, folder: str) -> None:
    training, replicas, checkpoints = blocks("fsdp.md", "python")
    mesh = dist.init_device_mesh("cpu", (world,))
    data = torch.randn(2, 4, 8, 256, generator=torch.Generator().manual_seed(rank))
    names: dict[str, Any] = {"mesh": mesh, "batches": list(zip(*data, strict=True)), "folder": folder}
    torch.manual_seed(0)
    exec(training, names)
    assert all(parameter.grad is None and parameter.placements for parameter in names["model"].parameters())
    exec(checkpoints, names)
    names["model"](names["batches"][0][0])
    assert names["compression"].replica_bytes > 0
    names |= {"dist": dist, "model": nn.Sequential(nn.Linear(256, 256)), "nodes": world, "ranks": 1}
    exec(replicas, names)
    names["model"](names["batches"][0][0]).sum().backward()
    assert names["compression"].bytes_between_replicas > 0


@pytest.mark.medium
def test_the_python_and_the_rules_about_the_backend_run() -> None:
    run_ranks(hold_backend, 2, free_port(), backend=None)


def hold_backend(rank: int, world: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict[str, Any] = {}
    for code in blocks("backend.md", "python"):
        exec(code, names)
    assert fl.backend.traffic().calls == {"all_reduce": 1} and fl.backend.traffic(names["data"]).bytes_sent > 100_000
    assert not fl.backend.traffic(names["other"]).calls
    (rules,) = blocks("backend.md", "yaml")
    assert len(fl.backend.Policy.of(yaml.safe_load(rules)).rules) == 5
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.medium
def test_the_commands_of_the_readme_run() -> None:
    command = re.search(r"`(torchrun [^`]*train_gpt[^`]*)`", README)
    assert command is not None
    script = [str(ROOT / part) if part.startswith("examples/") else part for part in shlex.split(command[1])]
    small = ["--steps", "2", "--width", "32", "--layers", "1"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *script[1:], *small]
    out = subprocess.run(run, capture_output=True, text=True)
    assert out.returncode == 0 and "replicas          identical" in out.stdout, out
    targets = re.findall(r"^make (\S+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_codec_of_the_tutorial_conforms() -> None:
    (code,) = blocks("adding_a_codec.md", "python")
    try:
        exec(compile(code, "adding_a_codec.md", "exec"), {"__name__": __name__})
        for codec in variants("e5m2"):
            for check in CHECKS.values():
                check(codec, torch.float32, torch.device("cpu"))
    finally:
        registry.remove("e5m2")


def test_what_is_to_be_installed_exists() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def bare(word: str) -> str:
        return re.split(r"[\[<>=]", word.strip("'\";,"))[0]

    known = {
        ".",
        "fusionlayer",
        "torch",
        "nvidia-cuda-nvcc",
        "https://download.pytorch.org/whl/cpu",
        "ray",
        "s3fs",
        *(bare(line) for lines in extras.values() for line in lines),
    }
    named: set[str] = set()
    pages = [*(ROOT / page for page in PAGES), *(ROOT / "fusionlayer").rglob("*.py"), *ROOT.glob("examples/*.py")]
    for page in pages:
        text = page.read_text()
        named |= {
            extra for one in re.findall(r"(?:fusionlayer|['\" ]\.)\[([a-z,-]+)\]", text) for extra in one.split(",")
        }
        for command in re.findall(r'pip install +([^`"&#\n()]*)', text):
            ours = {"dist", "fusionlayer-cuda"} if "--find-links dist " in command else set()
            words = {
                bare(word) for word in command.split() if not word.startswith("-") and not word.startswith("dist/")
            }
            assert words - {""} <= known | ours, f"{page.name}: pip install {command}"
    assert {"mpi", "deepspeed"} <= named <= {*extras}


@looped("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}"


@looped("page", PAGES)
def test_no_cell_of_a_table_reads_as_a_list_or_a_heading(page: str) -> None:
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in re.split(r"(?<!\\)\|", line)]
    assert not [cell for cell in cells if re.match(r"- |#+ |```", cell)]


def anchors(page: Path) -> set[str]:
    """Return where a page of Markdown can be linked at: GitHub's names for its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_commands_of_the_page_on_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "diagnose", lambda _: [])  # tests/cli/test_doctor.py runs it
    Path("hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    commands = [line for block in blocks("operations.md", "") for line in block.splitlines()]
    for words in map(shlex.split, commands):
        if words[0] == "fusionrun":
            options = fusionrun._parse(words[1:])
            assert options.check_build or fusionrun.plan(options)
        elif words[1] == "bench":
            assert words[3:5] == ["-np", "2"]
            arguments = [*words[1:3], *words[5:], "--calls", "1", "--warmup", "1"]
            assert fl.transport.local.run(lambda rank, arguments=arguments: main(arguments), 2) == [0, 0]
        elif words[1] == "doctor":
            assert main(words[1:]) == 0
        else:
            assert words[:2] == ["FUSIONLAYER_TRANSPORT=mpi", "mpirun"]  # tests/transport/test_mpi.py starts such a job
    assert len(commands) == 10 and "all_to_all" in capsys.readouterr().out
