"""Every example runs, and says what it has measured: one under torchrun, the others in ranks that are forked."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.loops import looped
from tests.tiers import exhaustive

from .forked import torchrun
from .places import EXAMPLES

FIELDS = {
    *(
        "method",
        "codec",
        "codec_options",
        "sync",
        "fusion_plan",
        "workers",
        "device",
        "parameters",
        "steps",
        "batch_size",
        "seed",
    ),
    *("train_loss", "validation_loss", "step_seconds", "network_device", "bytes_per_step", "bytes_per_step_dense"),
    *("compression_ratio", "replicas_identical", "torch", "fusionlayer"),
}


@pytest.mark.medium
@exhaustive(guarded_by="tests/test_documents.py::test_the_commands_of_the_readme_run")
def test_train_gpt_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    codec = ("--codec", "int4", "--codec-option", "group_size=64")
    travel = ("--algorithm", "two_shot", "--planner", "wfbp")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(EXAMPLES / "train_gpt.py"), *codec, *travel, "--steps", "4", "--json", str(path)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d)/4 ", done.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    result = json.loads(path.read_text())
    assert set(result) == FIELDS
    assert (result["method"], result["codec"], result["workers"], result["steps"]) == ("fusionlayer", "int4", 2, 4)
    assert result["codec_options"] == {"group_size": 64}
    assert math.isfinite(result["train_loss"]) and math.isfinite(result["validation_loss"])
    assert result["replicas_identical"] is True
    assert result["bytes_per_step_dense"] == 4 * result["parameters"]
    assert result["compression_ratio"] == result["bytes_per_step_dense"] / result["bytes_per_step"]
    assert f"validation loss   {result['validation_loss']:.4f}" in done.stdout
    assert f"sent per step     {result['bytes_per_step'] / 1e6:.3f} MB" in done.stdout
    assert "replicas          identical" in done.stdout


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_configured.py::test_a_wrong_value_is_told_with_its_variable")
def test_train_gpt_plans_as_the_documents_say(tmp_path: Path) -> None:
    """The commands of two pages, in their order: the second of planning.md uses the plan that the first has saved."""
    root = EXAMPLES.parent
    pages = (root / "docs" / "planning.md").read_text() + (root / "docs" / "config.md").read_text()
    commands = re.findall(r"^(?:(\w+)=(\w+) )?(torchrun .*examples/train_gpt.py.*)$", pages, re.MULTILINE)
    small = ["--width", "32", "--layers", "1", "--heads", "2"]
    told = []
    for variable, value, command in commands:
        _, _, workers, script, *words = shlex.split(command)
        steps = "12" if "auto" in words else "3"  # auto chooses after seven
        variables = {variable: value} if variable else {}
        out = torchrun(
            int(workers), Path(script).name, *words, *small, "--steps", steps, folder=tmp_path, variables=variables
        )
        told += re.findall(r"^buckets +(\d.*)$", out, re.MULTILINE)
    assert len(told) == len(commands) == 3
    assert told[0] == told[1], "the plan that was saved is the plan that is used"
    assert "int by" in told[2]


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_ddp.py::test_training")
def test_train_ddp_learns() -> None:
    output = torchrun(2, "train_ddp.py", "int4")
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", output, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < 0.2 * losses[0]


@pytest.fixture
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples_on_path")
@looped(
    "arguments, complaint",
    [
        (["--codec", "int9"], "invalid choice: 'int9'"),
        (["--codec-option", "group_size"], "'group_size'; expected KEY=VALUE"),
        (["--codec-option", "x=[1"], "'x=[1'; expected a value in YAML"),
        (["--steps", "0"], "0; expected a whole number above 0"),
        (["--json", "/proc/x"], "argument --json: /proc/x cannot be written: No such file or directory"),
        (["--every", "4"], "--every is for --sync; give both"),
        (["--heads", "3"], "--heads 3 does not divide --width 128"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_gpt

    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        train_gpt.parse_options()
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert complaint in told


def of_page(page: str, script: str) -> list[tuple[int, list[str]]]:
    """Return with how many workers, and with which options, a page of ``docs`` starts an example, in its order."""
    text = (EXAMPLES.parent / "docs" / page).read_text()
    found = re.findall(rf"^torchrun --nproc-per-node (\d) examples/{script}(.*)$", text, re.MULTILINE)
    return [(int(workers), shlex.split(options)) for workers, options in found]


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_tensor_parallel_processes.py::test_operations_compile_as_one_graph")
def test_train_tp_learns_and_its_ranks_agree(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    workers, options = of_page("model_parallel.md", "train_tp.py")[-1]
    small = ("--width", "64", "--layers", "2", "--steps", "12", "--batch-size", "4")
    out = torchrun(workers, "train_tp.py", *options, *small, "--json", str(path))
    losses = [float(loss) for loss in re.findall(r"^step \d+/12  loss (\S+)", out, re.MULTILINE)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    result = json.loads(path.read_text())
    assert result["mesh"] == [2, 2]
    assert (result["codec"], result["sequence_parallel"]) == ("taco", True)
    assert math.isfinite(result["validation_loss"])
    assert result["ranks_agree"] is True and "ranks             agree to the last bit" in out


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_moe.py::test_zipped_has_the_bits_of_raw")
def test_train_moe_zipped_has_the_bits_of_uncompressed_training(tmp_path: Path) -> None:
    results = {}
    small = ("--width", "64", "--layers", "2", "--steps", "12", "--batch-size", "4")
    ((ranks, options),) = of_page("model_parallel.md", "train_moe.py")
    assert options == ["--codec", "zip"]
    for codec in ("raw", "zip"):
        path = tmp_path / f"{codec}.json"
        out = torchrun(ranks, "train_moe.py", "--codec", codec, *small, "--json", str(path))
        results[codec] = json.loads(path.read_text())
        assert f"digest            {results[codec]['digest'][:16]}" in out
    raw, zipped = results["raw"], results["zip"]
    assert zipped["losses"] == raw["losses"] and len(raw["losses"]) == 12
    assert raw["losses"][-1] < raw["losses"][0] - 1
    assert zipped["digest"] == raw["digest"]
    assert zipped["validation_loss"] == raw["validation_loss"]
    assert raw["busiest_rank_most"] >= raw["busiest_rank_mean"] > 1.01, "the router is not balanced by itself"


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_pipeline.py::test_training")
def test_train_pp_learns(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    small = ("--width", "64", "--layers", "4", "--steps", "12", "--batch-size", "8")
    ((workers, options),) = of_page("model_parallel.md", "train_pp.py")
    assert options[-2:] == ["--schedule", "interleaved"]
    out = torchrun(workers, "train_pp.py", *options, *small, "--json", str(path))
    losses = [float(loss) for loss in re.findall(r"^step \d+/12  loss (\S+)", out, re.MULTILINE)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    result = json.loads(path.read_text())
    assert (result["gradient_codec"], result["stages"]) == ("int8", 4)
    assert math.isfinite(result["validation_loss"])


@exhaustive(guarded_by="tests/integrations/test_tensor_parallel_processes.py::test_operations_compile_as_one_graph")
@pytest.mark.medium
def test_train_gpt_3d_learns(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    small = ("--width", "64", "--layers", "2", "--steps", "10", "--batch-size", "4", "--microbatches", "2")
    codecs = ("--tensor-codec", "taco", "--pipeline-codec", "tahquant", "--data-codec", "int4", "--warmup-steps", "2")
    out = torchrun(8, "train_gpt_3d.py", *codecs, *small, "--json", str(path))
    losses = [float(loss) for loss in re.findall(r"^step \d+/10  loss (\S+)", out, re.MULTILINE)]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    assert json.loads(path.read_text())["shape"] == [2, 2, 2]


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_replica.py::test_copies_are_equal_and_stay_near")
def test_train_fsdp_learns_at_four_bits_as_without(tmp_path: Path) -> None:
    small = ("--width", "64", "--layers", "2", "--steps", "12", "--batch-size", "4", "--validate-every", "6")
    results = {}
    for weights, (workers, options) in zip(("sdp4bit", "none"), of_page("fsdp.md", "train_fsdp.py"), strict=True):
        path = tmp_path / f"{weights}.json"
        out = torchrun(workers, "train_fsdp.py", *options, *small, "--json", str(path))
        losses = [float(loss) for loss in re.findall(r"^step \d+/12  loss (\S+)", out, re.MULTILINE)]
        assert len(losses) == 12 and losses[-1] < losses[0] - 1
        results[weights] = json.loads(path.read_text())
        assert results[weights]["replicas_identical"] is True and "replicas          identical" in out
        assert [step for step, _ in results[weights]["validation_losses"]] == [6, 12]
    four, plain = results["sdp4bit"], results["none"]
    assert four["weights"].startswith("differences, int(bits=4") and plain["weights"] is None
    assert 0 < abs(four["validation_loss"] / plain["validation_loss"] - 1) < 0.02
    assert four["replica_bytes"] > 0 == plain["replica_bytes"]


def told(output: str) -> list[float]:
    """Return the numbers that an example has printed as losses."""
    return [float(loss) for loss in re.findall(r"loss (\S+)", output)]


def losses_in_one_process(module: Any, epochs: int) -> list[float]:
    """Return rank 0's loss of every batch of two ranks, and the test loss of each epoch."""
    torch.manual_seed(42)
    model = module.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2 * 0.05, momentum=0.9)
    train_set, test_set = module.digits()
    samplers: list[Any] = [DistributedSampler(train_set, num_replicas=2, rank=rank, seed=42) for rank in range(2)]
    losses = []
    for epoch in range(1, epochs + 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(train_set, batch_size=32, sampler=sampler) for sampler in samplers]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            each = [F.nll_loss(model(images), labels) for images, labels in batches]
            (sum(each) / 2).backward()
            optimizer.step()
            losses.append(each[0].item())
        images, labels = zip(*test_set, strict=True)
        with torch.no_grad():
            losses.append(F.nll_loss(model(torch.stack(images)), torch.stack(labels)).item())
    return losses


@pytest.mark.medium
@exhaustive(guarded_by="tests/torch/test_behaviours.py::test_behaviour")
def test_digits_has_the_losses_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import hvd_digits

    ((workers, options),) = of_page("horovod.md", "hvd_digits.py")
    output = torchrun(workers, "hvd_digits.py", *options, "--log-interval", "1")
    losses, expected = told(output), losses_in_one_process(hvd_digits, 2)
    assert len(losses) == len(expected) == 2 * 24
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < 0.5 * losses[0]
    accuracy = [float(percent) for percent in re.findall(r"accuracy (\S+)%", output)]
    assert len(accuracy) == 2 and accuracy[1] > 70


@pytest.mark.medium
@exhaustive(guarded_by="tests/publishing/test_processes.py::test_every_version_that_a_follower_shows_is_the_publishers")
@pytest.mark.parametrize("way", ["tcp", "folder"])
def test_a_generator_switches_versions_while_it_runs(way: str, tmp_path: Path) -> None:
    address = ["--address", f"file://{tmp_path}"]
    if way == "tcp":
        secret = tmp_path / "secret"
        secret.touch(0o600)
        secret.write_text("0123456789abcdef")
        address = ["--secret-file", str(secret)]
    command = [sys.executable, str(EXAMPLES / "publish_weights.py"), *address, "--bytes", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^generator  version +(\d+) (\w{32})  'def", done.stdout, re.MULTILINE)
    ended = re.findall(r"^trainer    loss \d\.\d+, version (59) (\w{32})$", done.stdout, re.MULTILINE)
    assert len(ended) == 1, done.stdout
    versions = [int(version) for version, _ in shown]
    assert versions == sorted(versions) and shown[-1] == ended[0]
    assert way == "folder" or len({*versions}) > 1


@pytest.mark.medium
@exhaustive(guarded_by="tests/publishing/test_processes.py::test_every_version_that_a_follower_shows_is_the_publishers")
def test_a_reward_rises_while_weights_stream() -> None:
    command = [sys.executable, str(EXAMPLES / "rl_weights.py"), "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(r"reward (\d\.\d+) -> (\d\.\d+) in 40 steps; 40 versions", done.stdout.splitlines()[-1])
    assert told is not None, done.stdout
    assert float(told[1]) < 0.5 < float(told[2])
