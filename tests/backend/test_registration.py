"""How torch learns of the backend."""

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

import _fusionlayer_autoload
from fusionlayer import backend
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
