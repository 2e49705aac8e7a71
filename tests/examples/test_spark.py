"""The scripts of the page about Spark, as it says, where Spark and Java are installed. Last run: Spark 4.1.1."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.pages import blocks, lines
from tests.test_guides import check_losses
from tests.tiers import engine, long, needs

from .test_start import run

JAVA = pytest.mark.skipif(shutil.which("java") is None, reason="no java: apt-get install default-jre-headless")
pytestmark = [pytest.mark.medium, engine, needs("pyspark"), JAVA]


@long(guarded_by="tests/integrations/test_launch.py::test_each_launcher_is_understood")
def test_two_tasks_of_spark(tmp_path: Path) -> None:
    (code,) = blocks("start/laptop.md", "python")
    (tmp_path / "train.py").write_text(code)
    (start,) = blocks("start/spark.md", "python")
    (tmp_path / "train_spark.py").write_text(start)
    (command,) = lines("start/spark.md", "spark-submit")
    check_losses(run(shlex.split(command), tmp_path, PYSPARK_PYTHON="python", SPARK_LOCAL_IP="127.0.0.1"))
