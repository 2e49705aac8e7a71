"""Losses under FSDP2: lines of the table, and a picture with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharded_losses
from benchmarks.sharded_losses import VARIANTS, curves, summarize
from tests.tiers import DRAWS, needs

pytestmark = pytest.mark.short


def run(variant: str, seed: int, loss: float, identical: bool = True) -> dict[str, Any]:
    return {
        **{"variant": variant, "seed": seed, "train_loss": loss + 0.1, "validation_loss": loss},
        **{"validation_losses": [[10, 2 * loss], [20, loss]], "replicas_identical": identical},
    }


FOUND = [
    run("uncompressed", 0, 2.0),
    run("sdp4bit", 0, 2.01),
    run("uncompressed", 1, 3.0),
    run("sdp4bit", 1, 3.03),
    run("qw", 1, 6.0, identical=False),
]


def test_losses_are_compared_with_those_of_the_same_seed() -> None:
    plain, four, coarse = summarize(FOUND)
    assert (plain["variant"], plain["validation loss"], plain["against uncompressed"]) == ("uncompressed", "2.5000", "")
    assert (four["weights"], four["gradients"], four["seeds"]) == ("qwd", "tlq_hs", 2)
    assert four["against uncompressed"] == "+0.75%" and four["training loss"] == "2.6200"
    assert (coarse["against uncompressed"], coarse["replicas"]) == ("+100.00%", "DIFFERENT")
    assert four["replicas"] == "identical"


@needs("matplotlib")
def test_a_line_for_every_variant() -> None:
    (axes,) = curves(FOUND, "title").axes
    ends = ["uncompressed, 2.500 at the end", "sdp4bit, 2.520 at the end", "qw, 6.000 at the end"]
    assert [text.get_text() for text in axes.texts] == ends
    for line, losses in zip(axes.lines, ([5.0, 2.5], [5.04, 2.52], [12.0, 6.0]), strict=True):
        assert list(line.get_ydata()) == pytest.approx(losses)


def test_the_example_is_given_every_option_and_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def train(variant: tuple[str, str], seed: int, options: Any) -> dict[str, Any]:
        asked.append((variant, seed))
        return run("", seed, 2.0) | {"payload_per_step": 1.0}

    monkeypatch.setattr(sharded_losses, "_train", train)
    arguments = ["--variants", "uncompressed,sdp4bit", "--seeds", "2", "--out", str(tmp_path), "--hardware", "here"]
    assert sharded_losses.main(arguments) == 0
    assert asked == [(VARIANTS[name], seed) for seed in (0, 1) for name in ("uncompressed", "sdp4bit")]
    names = {path.name for path in tmp_path.rglob("*.*")}
    assert ("sharded-losses.svg" in names) == DRAWS
    assert sum(name.startswith("sharded-losses_here_") for name in names) == 2
    assert "sdp4bit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sharded_losses.main(["--variants", "nothing"])
    assert "'nothing' is not known" in capsys.readouterr().err
