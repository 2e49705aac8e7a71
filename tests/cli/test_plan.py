"""``fusionlayer plan``, ``explain`` and ``profile``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusionlayer import context
from fusionlayer.base.plan import FusionPlan
from fusionlayer.cli import main
from fusionlayer.planning.profile import Profile
from fusionlayer.scheduler import planners
from tests.cli.test_simulate import table_rows
from tests.loops import looped
from tests.packaging.project_tree import ROOT
from tests.planning.profiles import write_example
from tests.tiers import exhaustive

PLANNING = (ROOT / "docs" / "planning.md").read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_example(tmp_path)


@pytest.fixture
def plan(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "made" / "plan.yaml"
    arguments = ["plan", "--profile", str(path), "--workers", "4", "--codec", "int4", "--rate", "1gbit"]
    assert main([*arguments, "--planner", "wfbp", "-o", str(out)]) == 0
    capsys.readouterr()
    return out


class TestPlan:
    def test_a_plan_is_written(self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "plan.yaml"
        arguments = ["--codec", "int4", "--codec-option", "group_size=64", "--rate", "100mbit", "--workers", "4"]
        assert main(["plan", "--profile", str(path), *arguments, "-o", str(out)]) == 0
        made = FusionPlan.from_yaml(out)
        made.check([tensor.info for tensor in Profile.from_yaml(path).model.tensors], 4)
        assert {(b.codec, b.options["group_size"], b.algorithm) for b in made.buckets} == {("int", 64, "two_shot")}
        assert f"{out}: {len(made.buckets)} buckets of 3 tensors; predicted" in capsys.readouterr().out

    def test_gradients_are_encoded_ahead_if_wanted(self, path: Path, tmp_path: Path) -> None:
        out = tmp_path / "plan.yaml"
        arguments = ["plan", "--profile", str(path), "--workers", "4", "--codec", "int4", "-o", str(out)]
        assert main([*arguments, "--ahead"]) == 0
        assert all(bucket.ahead and bucket.algorithm == "gather" for bucket in FusionPlan.from_yaml(out).buckets)

    def test_planners_are_compared_at_several_rates(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rates = ["--rates", "1gbit,100mbit"]
        assert main(["plan", "--profile", str(path), "--workers", "4", "--codec", "int4", "--compare", *rates]) == 0
        output = capsys.readouterr().out
        assert output.startswith("example: int(bits=4")
        slow, fast = (output[output.index(f"at {rate}, predicted") :] for rate in ("100mbit", "1gbit"))
        names = planners.names()
        found = {}
        for text in (slow, fast):
            rows = table_rows(text)
            assert [row[0] for row in rows] == names
            waiting = {row[0]: float(row[2]) for row in rows}
            step = {row[0]: float(row[4]) for row in rows}
            assert min(step, key=lambda name: step[name]) == min(waiting, key=lambda name: waiting[name])
            assert waiting["cupcake_optimal"] <= waiting["safusion"] <= waiting["safusion_inter"]
            assert waiting["safusion_inter"] <= min(waiting["safusion_naive"], waiting["wfbp"], waiting["single"])
            for name in names:
                assert step[name] - waiting[name] == pytest.approx(200, abs=1), "backward is the same for all"
            found[text] = list(step.values())
        assert all(more > less for more, less in zip(found[slow], found[fast], strict=True))

    @looped(
        "arguments, message",
        [
            ([], "nothing to do; give -o PLAN.yaml"),
            (["--rates", "1gbit", "-o", "x"], "--rates is for --compare"),
            (["--codec", "bf16", "-o", "x"], "profile has no costs of codec 'bf16'"),
            (["--codec", "int5", "-o", "x"], "unknown codec 'int5'; did you mean 'int'"),
            (["--codec", "int4", "--density", "0.1", "-o", "x"], "codec 'int' cannot take the options"),
            (["--planner-option", "scheme=none", "-o", "x"], "safusion planner: scheme='none'"),
            (["--algorithm", "two_shot", "--ahead", "-o", "x"], "algorithm 'two_shot' sums a flat tensor"),
            (["--codec", "int4", "--algorithm", "dense", "-o", "x"], "algorithm 'dense' sends values as they are and"),
            (["--rate", "fast", "-o", "x"], "rate 'fast'"),
            (["--codec", "auto", "--no-ahead", "-o", "x"], "--algorithm and --ahead are for one codec"),
            (["--codec", "int4", "--fidelity", "lossless", "-o", "x"], "--fidelity is for --codec auto"),
        ],
    )
    def test_errors_are_one_line(
        self, path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", "--profile", str(path), "--workers", "4", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1
        assert not context.is_initialized(), "a command that fails ends what it began"


class TestExplain:
    def test_buckets_and_tensors_are_shown(self, path: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", str(plan), "--profile", str(path), "--rate", "1gbit"]) == 0
        output = capsys.readouterr().out
        assert output.startswith("example: 4 workers, 1gbit")
        rows = table_rows(output)
        assert [(row[0], row[4], row[5]) for row in rows] == [(str(i), "int4", "two_shot,") for i in range(3)]
        head, units = output.splitlines()[2:4]
        assert head.split() == [
            *("bucket", "tensors", "elements", "sends", "codec", "sent", "by", "F", "C"),
            *("ready", "start", "end", "idle"),
        ]
        assert units.split() == ["kB", *["ms"] * 6]
        assert [float(row[9]) for row in rows] == [50, 150, 200], "when the gradients are there"
        assert [row[2] for row in rows] == ["1000000", "2000000", "1000000"]
        assert float(rows[1][12]) == pytest.approx(150 - float(rows[0][11]), abs=0.02), "idle until then"
        trace = path.with_name("step.json")
        assert main(["explain", str(plan), "--profile", str(path), "--rate", "1gbit", "--timeline", str(trace)]) == 0
        events = json.loads(trace.read_text())
        sent = [e for e in events if e["ph"] == "X" and e["tid"] == 2 and e["name"] != "idle"]
        assert [e["name"] for e in sent] == [f"bucket {i}" for i in range(3)]
        last = max(e["ts"] + e["dur"] for e in sent)
        assert last / 1e3 == pytest.approx(float(rows[-1][11]), abs=0.02), "the last result"
        for tensor in ("head", "body", "tail"):
            (line,) = (line.split() for line in output.splitlines() if line.startswith(tensor))
            name, _, _, codec, bits, alone, saves = line
            assert (name, codec, bits) == (tensor, "int4", "4.25") and float(saves) > float(alone) > 0
        assert "Backward, with what is encoded in it: 200.00 ms." in output
        assert "A node sends 3.19 MB to other nodes (4 nodes of 1 rank)." in output

    @looped(
        "arguments, told",
        [
            ("--nodes 2", "Sending / computing: "),
            ("--nodes 2 --rate 1gbit --step 0.1", "a node sends 16 MB a step in 128 ms. Computing takes 100 ms."),
            ("--nodes 1 --per-host 4 --rate 100gbit", "a rank sends 24 MB"),
            ("--nodes 2 --parameters 1e9 --rate 2gbit", "Links above 1gbit were not measured"),
        ],
    )
    def test_without_a_plan_the_ratio_of_a_profile(
        self, path: Path, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["explain", "--profile", str(path), *arguments.split()]) == 0
        output = capsys.readouterr().out
        assert told in " ".join(output.split()) and "optimizer = fl.DistributedOptimizer(" in output


SMALL = ["--model", "gpt", "--codec", "int4,raw", "--steps", "1", "--repeats", "1", "--largest", "4096"]


@pytest.mark.medium
class TestProfile:
    @exhaustive(guarded_by="tests/planning/test_profiler.py::test_codecs_have_costs")
    def test_one_process_measures_what_it_can(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["profile", *SMALL, "--hardware", "My Machine"]) == 0
        written = Path(capsys.readouterr().out.strip())
        assert written.parent == Path("profiles") and written.name.startswith("gpt_my-machine_20")
        profile = Profile.from_yaml(written)
        assert profile.environment["hardware"] == "My Machine" and not profile.links
        assert set(profile.codecs) == {"int4", "raw"}

    @exhaustive(guarded_by="tests/planning/test_profiler.py::test_codecs_have_costs")
    def test_two_processes_measure_a_link_and_a_plan_can_be_made_of_it(self, tmp_path: Path) -> None:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        program = "import sys; from fusionlayer.cli import main; sys.exit(main())"
        command = [*run, sys.executable, "-c", program, "profile", *SMALL, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        written = Path(done.stdout.strip())
        profile = Profile.from_yaml(written)
        (rate,) = profile.links
        assert rate.endswith("mbit") and set(profile.collectives) == {"dense", "one_shot", "two_shot"}
        out = tmp_path / "plan.yaml"
        arguments = ["--workers", "2", "--codec", "int4", "-o", str(out), "--compare"]
        assert main(["plan", "--profile", str(written), *arguments]) == 0
        assert main(["explain", str(out), "--profile", str(written)]) == 0


class TestPolicy:
    def test_codecs_are_chosen_and_explained(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        policy, out = tmp_path / "policy.yaml", tmp_path / "plan.yaml"
        policy.write_text("fidelity: aggressive\nrules: [{match: head, codec: raw}, {codec: auto}]\n")
        arguments = ["plan", "--profile", str(path), "--workers", "4", "--rate", "1gbit", "-o", str(out)]
        assert main([*arguments, "--policy", str(policy)]) == 0
        rows = table_rows(capsys.readouterr().out)
        assert [(row[0], row[2], row[3]) for row in rows] == [
            ("head", "raw", "rules[0]:"),
            ("body", "int4", "rules[1]:"),
            ("tail", "int4", "rules[1]:"),
        ]
        by_codec = {bucket.codec: bucket.names for bucket in FusionPlan.from_yaml(out).buckets}
        assert by_codec["raw"] == ("head",)
        assert main(["explain", str(out), "--profile", str(path), "--rate", "1gbit"]) == 0

    def test_a_loss_budget_takes_what_was_measured(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the output fits 80 columns."""
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.chdir(tmp_path)
        (example,) = re.findall(r"^```yaml\n(- \{codec: int4.*?)^```$", PLANNING, re.MULTILINE | re.DOTALL)
        Path("losses.yaml").write_text(example)
        Path("each.yaml").write_text("- {codec: int4, percent: 0.0, source: a training that sends in each step}\n")
        arguments = ["plan", "--profile", str(path), "--rate", "100mbit", "--workers", "4"]
        arguments += ["-o", "plan.yaml", "--planner", "wfbp"]
        local = [*arguments, "--codec", "auto", "--fidelity", "local"]
        for options, told in [
            (["--loss-budget", "2", "--losses", "each.yaml"], "No local steps: "),
            (["--loss-budget", "2", "--workers", "2"], "was +1.6 % of that of f32"),
            (["--loss-budget", "2"], "No local steps: "),  # with four workers they cost more
            (["--loss-budget", "2", "--losses", "losses.yaml"], "sync=fusionlayer.Local.averaging(every=4)"),
            (["--loss-budget", "4", "--losses", "losses.yaml"], "sync=fusionlayer.Local.streaming()"),
        ]:
            assert main([*local, *options]) == 0
            output = capsys.readouterr().out
            assert told in output
            assert max(map(len, output.splitlines())) <= 80, output
        for wrong, error in [
            ([*arguments, "--codec", "int4", "--loss-budget", "2"], "are for --codec auto --fidelity local"),
            ([*local, "--loss-budget", "-1"], "--loss-budget -1; expected percent of the loss, at least 0"),
            ([*local, "--losses", "none.yaml"], "losses none.yaml cannot be read"),
        ]:
            assert main(wrong) == 2
            assert error in capsys.readouterr().err
