"""What type checkers see of the package in a user's script."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.optim import Optimizer

import fusionlayer as fl
from fusionlayer import codecs
from tests.tiers import long, needs

ROOT = Path(__file__).parents[2]


def test_the_fronts_say_what_they_take_and_return() -> None:
    """``make lint`` runs mypy on ``typed_script.py``, which makes use of it."""
    assert inspect.signature(fl.DistributedOptimizer).return_annotation == "Distributed"
    assert issubclass(fl.Distributed, Optimizer)
    known = {option for name in codecs.names() for option in codecs.get(name).options}
    assert set(codecs.CodecOptions.__annotations__) == known
    fronts = (fl.DistributedOptimizer, fl.ddp.register, fl.all_reduce, fl.all_gather, fl.reduce_scatter, fl.all_to_all)
    for front in (*fronts, fl.moe.Dispatcher, fl.tensor_parallel.Channel):
        *_, last = inspect.signature(front).parameters.values()
        options = "PlanningOptions" if front is fl.DistributedOptimizer else "CodecOptions"
        assert (last.kind, last.annotation) == (last.VAR_KEYWORD, f"Unpack[{options}]"), front
    for parameter in inspect.signature(fl.deepspeed.initialize).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.annotation


@pytest.mark.medium
@needs("basedpyright")
@long(guarded_by="tests/integrations/test_types.py::test_the_fronts_say_what_they_take_and_return")
def test_pyright_takes_what_is_right_and_finds_what_is_wrong(tmp_path: Path) -> None:
    """It reads the same comments as mypy; one where it finds nothing wrong is an error here too."""
    settings = {
        "include": [str(Path(__file__).with_name("typed_script.py"))],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.10",
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
