"""README and docs show what the result files have: in tables, in pictures, and in sentences."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pages import figures, losses, tables
from benchmarks.pages.found import RESULTS, load
from fusionlayer.planning.losses import LossCost
from tests.loops import looped
from tests.pages import DOCS
from tests.tiers import exhaustive


def test_tables_and_figures_are_those_of_the_result_files() -> None:
    known = figures.read()
    pages = figures.texts()
    wrong = [page for page, text in pages.items() if tables.fill(text) != text]
    assert not wrong, "write them anew with 'python -m benchmarks.pages'"
    assert not [problem for page, text in pages.items() for problem in figures.problems(page, text, known)]
    assert not [*figures.strays(known)]
    shown = {name for text in pages.values() for name in re.findall(r"<!-- table: (\w+) -->", text)}
    assert shown == set(tables.TABLES), "a table that no page shows"


def test_losses_by_which_plans_are_chosen_are_those_of_the_result_files() -> None:
    """Also of files with local steps, which may come later."""
    assert losses.PAGE.read_text() == losses.page(), "write them anew with 'python -m benchmarks.pages'"
    runs = {"ddp": (2.0, 2.2), "int4+local=averaging:every=4": (2.02, 2.222), "local=sparseloco:every=8": (2.1, 2.31)}
    seeds = {method: {seed: (final, "a file") for seed, final in enumerate(finals)} for method, finals in runs.items()}
    found = {method: losses.cost(method, finals, seeds["ddp"]) for method, finals in seeds.items()}
    assert found["ddp"] is None
    assert found["int4+local=averaging:every=4"] == LossCost("int4", 1.0, "a file", 2, "averaging(every=4)", 4)
    sparse = LossCost("chunked_topk", 5.0, "a file", 2, "sparseloco(every=8)", 8)
    assert found["local=sparseloco:every=8"] == sparse
    streaming = losses.cost("int4+local=streaming", seeds["ddp"], seeds["ddp"])
    assert streaming == LossCost("int4", 0.0, "a file", 2, "streaming()", 30, 3, 5)
    for other in (
        "int4+wfbp",
        "dgc+warmup_steps=60",
        "int4+overlap+local=averaging",
        "local=muloco",
        "ddp-fp16",
        "auto",
    ):
        assert losses.cost(other, seeds["ddp"], seeds["ddp"]) is None, f"{other} is not the codec as it is by default"


STEPS = 'the("training-gpt-2x1", rate="100mbit", method="int4").speedup.median'


@looped(
    "text, measured, defined, wrong",
    [
        ("int4 makes 6.37 times as many", {"6.37 times": STEPS}, {}, ""),
        ("int4 makes 6.4\ntimes as many", {"6.4 times": STEPS}, {}, ""),
        ("int4 makes 6.38 times as many", {"6.38 times": STEPS}, {}, "6.38 should be 6.37"),
        ("int4 makes 6.37 times as many", {}, {}, "neither its result nor its reason"),
        ("int4 makes 6.37x", {}, {"6.37x": "of a test"}, ""),
        ("it takes 16.37 ms", {}, {"6.37 ms": "of a test"}, "does not say '6.37 ms'"),
        ("int4 is fast", {"6.4 times": STEPS}, {}, "does not say '6.4 times'"),
        ("a link of 100 Mbit/s, `5 ms`\n```\n3x\n```\n", {}, {}, ""),
        ("6.4 to 6.5 times", {"6.4 to 6.5 times": STEPS}, {}, "2 numbers, but 1 expressions"),
        ("6.4 times", {"6.4 times": 'speedup("int3", "100mbit")'}, {}, "has 0 rows"),
        ("<!-- table: headline -->\n3 %<!-- end of table -->", {}, {}, ""),
    ],
)
def test_a_figure_needs_a_result_or_a_reason(
    text: str, measured: dict[str, str], defined: dict[str, str], wrong: str
) -> None:
    known: dict[str, Any] = {"measured": {"page.md": measured}, "defined": {"page.md": defined}}
    found = "\n".join(figures.problems("page.md", text, {**figures.read(), **known}))
    assert wrong in found and bool(wrong) == bool(found)


def test_a_reason_is_given_for_every_definition() -> None:
    known = yaml.safe_load(Path(figures.MAP).read_text())
    for reasons in known["defined"].values():
        assert all(len(reason) > 5 for reason in (reasons.values() if isinstance(reasons, dict) else [reasons]))


def test_a_figure_of_the_page_of_results_is_near_one_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    page = figures.ROOT / "benchmarks/results/README.md"
    text = page.read_text()
    assert "477 ms" in text
    read = Path.read_text
    stale = text.replace("477 ms", "471.3 ms")
    monkeypatch.setattr(Path, "read_text", lambda path: stale if path == page else read(path))
    (problem,) = figures.strays(figures.read())
    assert "says '471.3 ms'" in problem


OF_CHANGED_TREES = {"codec-gpu", "codec-gpu-choices", "one-launch"}
"""Results of an H100 that nothing newer replaces."""


def test_results_are_few_linked_and_of_clean_commits() -> None:
    page = (RESULTS / "README.md").read_text()
    paths = sorted(RESULTS.glob("*.json"))
    assert 0 < len(paths) <= 90
    assert {path.stem for path in paths} == {path.stem for path in RESULTS.glob("*_*.md")}
    assert not [path.stem for path in paths if f"({path.stem}.md)" not in page], "link it, or remove it"
    texts = "".join(
        path.read_text() for path in (figures.ROOT / "README.md", RESULTS / "README.md", *DOCS.rglob("*.md"))
    )
    pictures = {path.stem for path in (RESULTS / "plots").glob("*.svg")}
    assert pictures == set(re.findall(r"plots/([\w-]+)\.svg\)", texts)), "a picture that no page shows"
    changed = {path.stem.split("_")[0] for path in paths if "dirty" in load(path).environment.commit}
    assert changed == OF_CHANGED_TREES, "commit before you measure"


@exhaustive(guarded_by="tests/test_pages.py::test_tables_and_figures_are_those_of_the_result_files")
def test_pictures_are_those_of_the_result_files(tmp_path: Path) -> None:
    """By the text in them, names and values, since other versions of matplotlib draw other curves."""
    from benchmarks import drawing
    from benchmarks.pages.pictures import FOLDER, PICTURES

    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    for name, draw in PICTURES.items():
        path = tmp_path / f"{name}.svg"
        with drawing.style():
            drawing.save(draw(), path)
        assert _words(path) == _words(FOLDER / path.name), f"{name}: draw it anew with 'python -m benchmarks.pages'"


def _words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
