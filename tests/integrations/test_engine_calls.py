"""What engines are called by, and what of theirs is replaced: their sources still have it, with these arguments."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

import fusionlayer as fl
from tests.tiers import needs

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
