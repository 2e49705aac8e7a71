"""What docs/frameworks.md says of Accelerate, Hugging Face's Trainer, Lightning and meshes, in one start."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer.training.parameters import local_part
from tests.harness import run_ranks
from tests.tiers import engine, exhaustive, needs

pytestmark = [pytest.mark.medium, engine, needs("accelerate", "transformers")]

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
RULES, *_ = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ACCELERATE, HOOK, SAVE, FSDP2, TRAINER, LIGHTNING, _, _, MESH = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)


class Regression(nn.Module):
    """A model as Trainer wants one: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 128)
        self.last = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.last(self.first(x).tanh())
        return {"loss": (y - labels).square().mean(), "logits": y}


def frameworks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
        **{"FUSIONLAYER_CONFIG": str(folder / "rules.yaml"), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    }
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    real, dist.init_process_group = (
        dist.init_process_group,
        lambda backend: real(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world),
    )
    model: nn.Module = Regression()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "fl": fl}
    exec(ACCELERATE, names)
    model = names["model"]
    assert isinstance(model, DistributedDataParallel)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    names["accelerator"].backward(model(x, x)["loss"])
    results["accelerate"] = (dist.get_backend(), fl.backend.traffic().calls["all_reduce"], gradient(model))

    fl.backend.adopt(None)
    exec(HOOK, names)
    model.zero_grad()
    names["accelerator"].backward(model(x, x)["loss"])
    results["hook"] = (gradient(model), len(names["hook"].state_dict()["residuals"]))
    exec(SAVE, names)
    names["accelerator"].save_state(str(folder / "state"))
    kept = names["hook"].state_dict()
    names["accelerator"].backward(model(x, x)["loss"])
    names["accelerator"].load_state(str(folder / "state"))
    loaded = names["hook"].state_dict()
    assert all(torch.equal(loaded["residuals"][name], residual) for name, residual in kept["residuals"].items())
    names["hook"].close()

    data = [{"x": row, "labels": row} for row in torch.randn(32, 64, generator=torch.Generator().manual_seed(7))]
    arguments = {
        **{"output_dir": str(folder / "out"), "max_steps": 4, "use_cpu": True, "per_device_train_batch_size": 4},
        **{"report_to": [], "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True, "logging_strategy": "no"},
    }
    trained = []
    for resume in (None, str(folder / "out" / "checkpoint-2")):
        names = {"model": Regression(), "data": data, "arguments": arguments, "fl": fl, "resume": resume}
        exec(TRAINER, names)
        trained.append(parameters(names["model"]))
        of_compress = [
            each for each in names["trainer"].callback_handler.callbacks if type(each).__name__ == "Compress"
        ]
        (callback,) = of_compress
        if resume is None:
            callback.hook.close()
    assert trained[0] == trained[1], "resumed training equals uninterrupted training"
    hook = callback.hook
    names["trainer"].train()
    assert callback.hook is hook, "a second training reuses the hook"
    results["trainer"] = (parameters(names["model"]), len(callback.hook.state_dict()["residuals"]))
    callback.hook.close()
    del names

    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # without one Accelerate shards nothing
    model = Regression()
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    exec(FSDP2, names)
    start = parameters(names["model"])
    for _ in range(2):
        names["accelerator"].backward(names["model"](x, x)["loss"])
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    results["fsdp2"] = (names["compression"].weights, names["compression"].bytes_sent)
    assert parameters(names["model"]) != start

    code = ast.parse(LIGHTNING)
    code.body = [node for node in code.body if not re.search("lightning|Strategy", ast.unparse(node))]
    exec(compile(code, "docs/frameworks.md", "exec"), {})
    results["lightning"] = fl.backend.use(None) == fl.backend.Policy.of(yaml.safe_load(RULES)["backend"])

    dist.init_process_group = lambda backend: None  # it runs
    names = {}
    exec(MESH, names)
    fl.backend.use(None)
    mesh: DeviceMesh = names["mesh"]
    x = torch.full((1 << 16,), float(rank + 1))
    dist.all_reduce(x, group=mesh["dp"].get_group())
    results["mesh"] = (dict(fl.backend.traffic(mesh["dp"].get_group()).calls), x[0].item())
    fl.shutdown()
    return results


def gradient(model: nn.Module) -> list[bytes]:
    return [parameter.grad.numpy().tobytes() for parameter in model.parameters() if parameter.grad is not None]


def parameters(model: nn.Module) -> list[bytes]:
    return [local_part(parameter.detach()).numpy().tobytes() for parameter in model.parameters()]


@exhaustive(
    guarded_by="tests/backend/test_differential.py::test_trainings_keep_their_bits_when_calls_pass_and_come_near_with_int8"
)
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    first, second = run_ranks(frameworks, 2, tmp_path, backend=None)
    assert first["accelerate"][:2] == ("fusionlayer", 1) and first["accelerate"] == second["accelerate"]
    assert first["hook"] == second["hook"] and first["hook"][1] == 4
    assert first["hook"][0] != first["accelerate"][2], "int4 and int8 give different sums"
    assert first["trainer"] == second["trainer"] and first["trainer"][1] == 4
    assert first["trainer"][0] != parameters(Regression())
    assert "differences" in first["fsdp2"][0] and first["fsdp2"][1] > 2000
    assert first["lightning"] and second["lightning"]
    assert first["mesh"] == second["mesh"] == ({"all_reduce": 1}, pytest.approx(3.0, rel=0.01))
