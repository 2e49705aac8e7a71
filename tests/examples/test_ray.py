"""The scripts of the page about Ray, saved and started as it says, where Ray is installed. Last run: Ray 2.60.0."""

from pathlib import Path

import pytest

from tests.pages import blocks
from tests.test_guides import check_losses
from tests.tiers import engine, exhaustive, long, needs

from .test_start import run

pytestmark = [pytest.mark.medium, engine, needs("ray")]

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


@pytest.fixture
def page(tmp_path: Path) -> tuple[str, str, str]:
    """Save the script that the page names, with few steps; return all three."""
    first, second, third = (code.replace("range(200)", "range(10)") for code in blocks("start/ray.md", "python"))
    (tmp_path / "train_ray.py").write_text(first)
    return first, second, third


@long(guarded_by="tests/test_guides.py::test_the_two_lines_train_alike_on_all_ranks")
def test_torch_trainer(page: tuple[str, str, str], tmp_path: Path) -> None:
    check_losses(run(["python", "train_ray.py"], tmp_path, **QUIET))


@exhaustive(
    guarded_by="tests/integrations/test_launch.py::test_workers_that_ray_has_told_nothing_in_variables_meet_by_ray"
)
def test_a_trainer_without_the_environment_of_torch(page: tuple[str, str, str], tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(page[1])
    check_losses(run(["python", "other.py"], tmp_path, **QUIET))
