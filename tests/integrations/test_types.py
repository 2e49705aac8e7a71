"""What type checkers see of the package in a user's script."""

import ast
import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
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


INITIALIZE = "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required"
ZERO = "runtime/zero/"
# By engine: a file, a function, which may be a class's, and the arguments that it begins with.
CALLS: dict[str, list[tuple[str, str, str]]] = {
    "ray": [
        ("train/v2/api/train_fn_utils.py", "get_context", ""),
        *(
            ("train/v2/api/context.py", f"{kind}TrainContext.get_{what}", "self")
            for kind in ("", "Distributed")
            for what in ("world_size", "world_rank", "local_rank", "local_world_size")
        ),
        ("train/collective/collectives.py", "broadcast_from_rank_zero", "data"),
        ("_private/services.py", "get_node_ip_address", "address"),
    ],
    "megatron": [
        ("core/optimizer/distrib_optimizer.py", "DistributedOptimizer.step_with_ready_grads", "self"),
        ("core/distributed/param_and_grad_buffer.py", "_ParamAndGradBucketGroup.start_param_sync", "self force_sync"),
    ],
    "deepspeed": [
        ("__init__.py", "initialize", f"{INITIALIZE} collate_fn config mesh_param config_params"),
        ("runtime/engine.py", "DeepSpeedEngine.allreduce_no_retain", "self bucket"),
        ("runtime/engine.py", "DeepSpeedEngine.allreduce_bucket", "self bucket"),
        *(
            (f"{ZERO}stage_1_and_2.py", f"DeepSpeedZeroOptimizer.{name}", arguments)
            for name, arguments in (
                ("average_tensor", "self tensor communication_data_type"),
                ("allreduce_and_scatter", "self bucket communication_data_type"),
                ("allreduce_bucket", "self bucket communication_data_type"),
                ("step", "self closure"),
            )
        ),
        *(
            (f"{ZERO}stage3.py", f"DeepSpeedZeroOptimizer_Stage3.{name}", f"self {given} communication_data_type")
            for name, given in (
                ("__avg_scatter_grads", "params_to_reduce"),
                ("__avg_scatter_contiguous_grads", "buffer_to_reduce"),
            )
        ),
    ],
}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in CALLS])
def test_an_engine_has_what_is_called(engine: str) -> None:
    spec = find_spec(engine)
    assert spec is not None and spec.submodule_search_locations
    (root,) = spec.submodule_search_locations
    for file, name, expected in CALLS[engine]:
        found = arguments(Path(root, file).read_text(), name)
        assert found is not None, f"{engine} has no {name} in {file}"
        wanted = expected.split()
        assert found[: len(wanted)] == wanted, f"{engine}: {name} takes {found}"
        assert name != "initialize" or found == wanted == list(fl.deepspeed.initialize.__code__.co_varnames[:13])


def arguments(source: str, name: str) -> list[str] | None:
    """Return the arguments of a function, "Class.function" of a method; None: there is no such function."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for each in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each), [])
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return None
