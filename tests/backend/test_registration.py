"""How torch learns of the backend."""

import inspect
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

import _fusionlayer_autoload
from fusionlayer import backend
from fusionlayer.backend.group import CompressingGroup
from tests.harness import run_ranks
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]

# What Ray's workers do with TorchConfig(backend="fusionlayer"): nobody imports fusionlayer.
PROGRAM = """
import sys, torch, torch.distributed as dist
assert "fusionlayer" not in sys.modules, "import torch has imported the package"
rules = {"rules": [{"codec": "int8"}]}
dist.init_process_group("fusionlayer", store=dist.HashStore(), rank=0, world_size=1, pg_options=rules)
dist.all_reduce(torch.ones(1))
import fusionlayer
assert dist.group.WORLD.policy == fusionlayer.backend.Policy.of(rules)
"""


# Torch may come later than fusionlayer.
LATER = """
import sys, fusionlayer, torch.distributed as dist
dist.init_process_group("fusionlayer", store=dist.HashStore(), rank=0, world_size=1)
"""


def entry_point() -> str:
    section = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.backends"]')[2]
    found = re.match(r"\nfusionlayer = \"(.*)\"", section)
    assert found
    return found[1]


def test_the_entry_point_is_what_registers() -> None:
    module, _, function = entry_point().partition(":")
    loaded: Any = import_module(module)
    assert callable(getattr(loaded, function))
    assert dist.Backend._plugins["FUSIONLAYER"].creator_fn is loaded._create
    assert f'py-modules = ["{module}"]' in (ROOT / "pyproject.toml").read_text()
    backend.register()  # again, which changes nothing
    assert dist.Backend.backend_capability["fusionlayer"][:1] == ["cpu"]
    assert ("cuda" in dist.Backend.backend_capability["fusionlayer"]) == torch.backends.cuda.is_built()


def test_fusionlayer_imports_torch_only_if_torch_would_not_register(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[bool] = []
    monkeypatch.setattr(_fusionlayer_autoload, "register", lambda: registered.append(True))
    name, value = "fusionlayer", entry_point()
    offers = {"none": (), "ours": (EntryPoint(name, value, "torch.backends"),)}
    for has_torch, offer, autoload, expected in (
        (True, "ours", "1", True),
        (False, "ours", "1", False),
        (False, "ours", "0", True),
        (False, "none", "1", True),
    ):
        with monkeypatch.context() as changed:
            registered.clear()
            changed.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
            changed.setattr(_fusionlayer_autoload, "entry_points", lambda group, offer=offer: offers[offer])
            changed.setattr(_fusionlayer_autoload, "sys", Namespace(modules={"torch": torch} if has_torch else {}))
            _fusionlayer_autoload.register_with_torch()
        assert bool(registered) == expected, (has_torch, offer, autoload)


@pytest.mark.medium
@pytest.mark.timeout(400)
@exhaustive(guarded_by="tests/backend/test_registration.py::test_the_entry_point_is_what_registers")
def test_a_program_that_does_not_import_fusionlayer_finds_the_backend(tmp_path: Path) -> None:
    about = tmp_path / "fusionlayer-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fusionlayer\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\nfusionlayer = {entry_point()}\n")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for autoload in "01":
        given = {**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
        later = subprocess.run([sys.executable, "-c", LATER], env=given, cwd=tmp_path, capture_output=True, text=True)
        assert later.returncode == 0, later.stderr
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert "fusionlayer" in done.stderr and done.returncode != 0


# The virtual methods of torch that need no method of ours: they queue no work of tensors.
NOT_OURS = {"getRank", "getSize", "getGroupName", "setGroupName", "getGroupDesc", "setGroupDesc", "mergeRemoteGroup"}


def test_every_method_that_torch_lets_python_override_is_overridden() -> None:
    """Without an override the call holds the GIL in C++ and can block for ever; see ``CompressingGroup``."""
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    text = header.read_text()
    named = set(re.findall(r"\bProcessGroup, /\* Parent class \*/\s*(\w+)", text))
    named |= set(re.findall(r'static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', text))
    assert {"allreduce", "broadcast", "send", "all_to_all_single"} <= named, "the header has another form"
    assert named - NOT_OURS <= set(vars(CompressingGroup)), named - NOT_OURS - set(vars(CompressingGroup))


# What Python may call by attribute and queues no work of tensors.
LEFT = {
    *("name", "rank", "size", "bound_device_id", "group_desc", "group_name", "get_backend", "set_timeout"),
    *("boxed", "unbox", "merge_remote_group", "monitored_barrier", "new_window", "supports_window"),
    *("reconfigure", "supports_reconfigure", "get_reconfigure_handle", "use_pg_for_symm_mem_rendezvous"),
    *(f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in ("abort", "pre", "post")),
}


def test_no_operation_of_torchs_groups_is_unknown() -> None:
    """A name that fails here may be an operation to override; if not, add it to ``LEFT``."""
    for name in dir(dist.ProcessGroup):
        if name[0].islower() and name not in LEFT:
            assert inspect.isfunction(vars(CompressingGroup).get(name)), name


RULES = {"min_bytes": 0, "rules": [{"codec": "int8", "op": list(backend.OPS)}]}
SHOWN = [
    ("fusionlayer:all_reduce", [[3, 4]]),
    ("fusionlayer:reduce_scatter", [[6], [6]]),
    ("fusionlayer:all_gather", [[5]]),
    ("fusionlayer:all_to_all", [[2, 7]]),
]


def call_all(world: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3, 4), group=group)
    dist.reduce_scatter(torch.ones(6), [torch.ones(6) for _ in range(world)], group=group)
    dist.all_gather([torch.ones(5) for _ in range(world)], torch.ones(5), group=group)
    dist.all_to_all_single(torch.ones(world, 7), torch.ones(world, 7), group=group)


def look(rank: int, world: int) -> tuple[list[tuple[str, list[list[int]]]], set[bool]]:
    """Return names and shapes of this rank's events, and whether they are asynchronous."""
    group = dist.new_group(pg_options=RULES)
    call_all(world, group)  # without a profiler
    with profile(record_shapes=True) as seen:
        call_all(world, group)
    with profile() as ended:
        if rank == 0:
            late = dist.all_reduce(torch.ones(8), group=group, async_op=True)
    dist.barrier()
    if rank > 0:  # only now is rank 0's call able to end
        late = dist.all_reduce(torch.ones(8), group=group, async_op=True)
    late.wait()
    assert ended.function_events is not None
    events = [event for event in seen.function_events or [] if event.name.startswith(("fusionlayer:", "gloo:"))]
    return [(event.name, event.input_shapes) for event in events], {event.is_async for event in events}


@pytest.mark.medium
def test_a_compressed_call_is_one_asynchronous_event_with_the_shapes_of_its_inputs() -> None:
    for shown, asynchronous in run_ranks(look, 2, backend="fusionlayer"):
        assert shown == SHOWN and asynchronous == {True}
