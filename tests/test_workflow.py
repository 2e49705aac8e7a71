"""The public CI names the versions that README, pyproject.toml and constraints.txt name, and targets that there are."""

import re

import yaml

from tests.pages import ROOT

TEXT = (ROOT / ".github/workflows/ci.yml").read_text()
JOBS = yaml.safe_load(TEXT)["jobs"]


def test_the_versions_are_those_of_the_readme_and_the_metadata() -> None:
    matrix = JOBS["test"]["strategy"]["matrix"]
    (row,) = re.findall(r"^\| torch +\|(.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    of_readme = set(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", row))
    tested = {*matrix["torch"], *(each["torch"] for each in matrix["include"])}
    assert {version.removesuffix(".0") for version in tested} == {version.removesuffix(".0") for version in of_readme}
    assert {*re.findall(r"for torch in (.*);", TEXT)[0].split()} == tested
    assert f"torch=={matrix['torch'][0]}\n" in (ROOT / "constraints.txt").read_text()
    metadata = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r":: Python :: (3\.\d+)", metadata)
    assert f'requires-python = ">={matrix["python"][0]}"' in metadata


def test_each_step_of_make_is_a_target_and_each_action_has_a_version() -> None:
    steps = [step for job in JOBS.values() for step in job["steps"]]
    targets = {match[1] for step in steps if (match := re.match(r"make (\S+)", step.get("run", "")))}
    assert targets == {"lint", "docs", "test", "wheels"}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    assert all(("run" in step) != bool(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", ""))) for step in steps)
    assert all(job["timeout-minutes"] and job["runs-on"].startswith("ubuntu-") for job in JOBS.values())
