from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fusionlayer
from tests.tiers import tiered

pytestmark = pytest.mark.medium

OPTIONAL = {"scipy", "matplotlib", "mpi4py", "triton", "deepspeed", "horovod", "megatron", "rich", "transformers"}

EVERY_MODULE = """
import importlib, json, pkgutil, sys
import fusionlayer

names = [m.name for m in pkgutil.walk_packages(fusionlayer.__path__, "fusionlayer.")]
failed = {}
for name in ["fusionlayer", *(name for name in names if name.count(".") <= DEPTH)]:
    for loaded in [n for n in sys.modules if n.split(".")[0] == "fusionlayer"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps([names, failed]))
"""

WHAT_COMES_ALONG = """
import json, sys, threading
import torch
before = set(sys.modules)
import fusionlayer
libraries = [line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line]
print(json.dumps([sorted(set(sys.modules) - before), libraries, threading.active_count()]))
"""


def answer(code: str, seconds: float = 50) -> list[object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, list)
    return result


@pytest.mark.timeout(200)
@pytest.mark.parametrize("depth", tiered([1, 9], lambda depth: depth == 1))
def test_every_module_can_be_the_first(depth: int) -> None:
    names, failed = answer(f"DEPTH = {depth}{EVERY_MODULE}", 190)  # all of the package anew for each of its modules
    assert isinstance(names, list) and {"fusionlayer.wire", "fusionlayer.codecs.integer"} < set(names)
    assert not failed


def test_import_brings_nothing_optional_and_starts_nothing() -> None:
    modules, libraries, threads = answer(WHAT_COMES_ALONG)
    assert isinstance(modules, list) and isinstance(libraries, list)
    assert not OPTIONAL & {name.split(".")[0] for name in modules}
    assert not [name for name in libraries if name.startswith(("libfusionlayer_cuda", "libcuda.", "libnccl"))]
    assert threads == 1


def test_public_names_exist() -> None:
    assert sorted(fusionlayer.__all__) == fusionlayer.__all__
    assert all(hasattr(fusionlayer, name) for name in fusionlayer.__all__)


def test_build_info_tells_version_instruction_sets_and_cuda() -> None:
    info = fusionlayer.build_info()
    assert info.version == fusionlayer.__version__
    assert info.isa in info.isas and "baseline" in info.isas
    lines = str(info).splitlines()
    assert lines[0] == f"fusionlayer {info.version}"
    assert lines[1].startswith(f"cpu: isa {info.isa} (built: ") and info.compiler in lines[1]
    assert lines[2].startswith("cuda: ")
