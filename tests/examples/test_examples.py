"""Every example runs, and says what it has measured: one under torchrun, the others in ranks that are forked."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.loops import looped
from tests.tiers import exhaustive

from .forked import ended, torchrun
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
@exhaustive(guarded_by="tests/integrations/test_local.py::test_training_is_that_of_a_plain_loop")
def test_train_gpt_takes_local_steps(tmp_path: Path) -> None:
    """A sync after two of three steps, and one at the end: workers then have one model."""
    path = tmp_path / "result.json"
    small = ("--width", "32", "--layers", "1", "--steps", "3", "--json", str(path))
    output = torchrun(2, "train_gpt.py", "--codec", "int4", "--sync", "averaging", "--every", "2", *small)
    assert re.search(r"^local steps +averaging$", output, re.MULTILINE)
    assert json.loads(path.read_text())["replicas_identical"] is True


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


@pytest.mark.short
@pytest.mark.usefixtures("examples_on_path")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
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


@pytest.mark.short
@pytest.mark.usefixtures("examples_on_path")
class TestGPT:
    def test_sizes(self) -> None:
        from gpt import GPT, Config

        def count(config: Config) -> int:
            return sum(parameter.numel() for parameter in GPT(config).parameters())

        assert count(Config()) == 834_304
        assert count(Config(width=384, layers=6, heads=6, context=128, tied=False)) == 10_893_312

    def test_untrained_model_knows_little_and_no_future(self) -> None:
        from gpt import GPT, Config

        torch.manual_seed(0)
        model = GPT(Config(width=32, layers=2))
        tokens = torch.randint(256, (4, 64))
        assert abs(model(tokens, tokens.flip(0)).item() - math.log(256)) < 1.5
        cut = model(tokens[:, :32], tokens[:, 32:])
        changed = tokens.clone()
        changed[:, 32:] = 0
        full = model.forward(changed, torch.cat([tokens[:, 32:], torch.full((4, 32), -100)], dim=1))
        assert torch.allclose(cut, full, atol=1e-5)

    def test_text_is_the_same_every_time_and_split(self) -> None:
        from gpt import Corpus

        one, other = Corpus(), Corpus()
        assert torch.equal(one.train, other.train)
        assert len(one.validation) > 100_000
        tokens, targets = one.sample(3, 16, torch.Generator().manual_seed(5))
        again, _ = other.sample(3, 16, torch.Generator().manual_seed(5))
        assert torch.equal(tokens, again)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        text = bytes(one.validation[:2000].tolist())
        assert text not in bytes(one.train.tolist())


@pytest.mark.short
@pytest.mark.usefixtures("examples_on_path")
def test_carrier_of_the_workers_traffic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wire

    row = "{}: 1 2 3 4 5 6 7 8 {} 10 11 12 13 14 15 16\n"
    table = tmp_path / "dev"
    table.write_text("head\nhead\n" + row.format("   lo", 90) + row.format(" eth0", 91) + row.format("  ib0", 92))
    routes = tmp_path / "route"
    routes.write_text("Iface Destination\nib0 0000FEA9\neth0 00000000\n")
    places = {"/proc/net/dev": table, "/proc/net/route": routes}
    monkeypatch.setattr(wire, "Path", lambda path: places[path])
    assert wire.carrier(2, 2, "eth0") == "lo"
    assert wire.carrier(1, 2, "none0,ib0") == "ib0"
    assert wire.carrier(1, 2) == "eth0"
    assert wire.sent_bytes("ib0") == 92
    places["/proc/net/dev"] = places["/proc/net/route"] = tmp_path / "missing"
    assert wire.carrier(2, 2) is None
    assert wire.carrier(1, 2) is None


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
@looped(
    "script, options, complaint",
    [
        ("train_tp.py", ("--heads", "3", "--width", "96"), "2 tensor-parallel ranks do not divide --heads 3"),
        ("train_pp.py", ("--layers", "1"), "--layers 1 are too few for 2 stages"),
        ("train_moe.py", ("--experts", "3"), "--experts 3, --experts-per-token 2, --layers 4 over 2 ranks"),
    ],
)
@exhaustive(guarded_by="tests/integrations/test_tensor_parallel_processes.py::test_operations_compile_as_one_graph")
def test_layers_that_cannot_be_cut_are_refused(script: str, options: tuple[str, ...], complaint: str) -> None:
    assert any(complaint in outcome.error[1] for outcome in ended(2, script, *options))


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
