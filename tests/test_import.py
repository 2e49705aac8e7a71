import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fusionlayer
from tests.tiers import tiered

pytestmark = pytest.mark.medium

# The public names that come without a framework, and without the parts of torch that need more than a second.
USUAL = sorted({*fusionlayer.__all__} - {"deepspeed", "fsdp", "megatron", "moe", "pipeline", "tensor_parallel"})
OPTIONAL = {
    "scipy",
    "matplotlib",
    "mpi4py",
    "triton",
    "deepspeed",
    "horovod",
    "megatron",
    "rich",
    "transformers",
    "vllm",
}

EVERY_MODULE = """
import importlib, json, os, pkgutil, sys

def apart(work):  # what it returns, and nothing that it imports
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(writer, "w") as answer:
                json.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told or '"its process ended"')

def loaded_by(name):  # the modules of ours that come with this one, or why it cannot be imported
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except Exception as error:
        return repr(error)
    return [other for other in sys.modules if other.split(".")[0] == "fusionlayer" and other not in before]

def visit(name):
    # A module that is the first one imports all others that it needs. Each of these is the first one before it is kept.
    tried.append(name)
    new = apart(lambda: loaded_by(name))
    if isinstance(new, str):
        failed[name] = new
        return
    if EVERY:
        for other in new:
            if other not in tried:
                visit(other)
        importlib.import_module(name)

import numpy, scipy, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.pipelining, yaml
sys.dont_write_bytecode, sys.pycache_prefix = False, "CACHE"  # each module is compiled once
import fusionlayer
names = [m.name for m in pkgutil.walk_packages(fusionlayer.__path__, "fusionlayer.") if EVERY or m.ispkg]
tried, failed = [], {}
for name in names:
    if name not in tried:
        visit(name)
print(json.dumps([names, tried, failed]))
"""

PUBLIC = f"for name in {USUAL}: getattr(fusionlayer, name)"

WHAT_COMES_ALONG = f"""
import json, sys, threading
import torch
before = set(sys.modules)
import fusionlayer
{PUBLIC}
libraries = [line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line]
print(json.dumps([sorted(set(sys.modules) - before), libraries, threading.active_count()]))
"""


def answer(code: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, list)
    return result


@pytest.mark.timeout(900)  # with every module it computes for half a minute, which next to many others takes six
@pytest.mark.parametrize("every", tiered([False, True], lambda every: not every), ids=["packages", "modules"])
def test_every_module_can_be_the_first(every: bool, tmp_path: Path) -> None:
    names, tried, failed = answer(EVERY_MODULE.replace("CACHE", str(tmp_path)).replace("EVERY", str(every)))
    known = (
        {"fusionlayer.native.wire", "fusionlayer.codecs.quantized.integer"}
        if every
        else {"fusionlayer.codecs", "fusionlayer.torch"}
    )
    assert isinstance(names, list) and known < set(names)
    assert not failed
    assert isinstance(tried, list) and sorted(tried) == sorted(names)


def test_import_brings_nothing_optional_and_starts_nothing() -> None:
    modules, libraries, threads = answer(WHAT_COMES_ALONG)
    assert isinstance(modules, list) and isinstance(libraries, list)
    assert not OPTIONAL & {name.split(".")[0] for name in modules}
    assert not [name for name in libraries if name.startswith(("libfusionlayer_cuda", "libcuda.", "libnccl"))]
    assert threads == 1


def test_the_last_calls_of_exit_come_after_those_of_the_program() -> None:
    """Even those that the program registers before it uses fusionlayer, and with it the threads that are ended."""
    code = "import atexit, fusionlayer; atexit.register(print, 'program')"
    code += "; fusionlayer.process.forks.at_exit(lambda: print('last'), last=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["program", "last"], done.stderr


def test_public_names_exist() -> None:
    assert sorted(fusionlayer.__all__) == fusionlayer.__all__
    assert all(hasattr(fusionlayer, name) for name in fusionlayer.__all__)


def test_documented_modules_are_imported_by_names_without_their_package() -> None:
    for short, home in {
        "errors": "base.errors",
        "plan": "base.plan",
        "wire": "native.wire",
        "metrics": "observe.metrics",
        "watching": "health",
        "integrations.ddp": "training.ddp",
        "integrations.pipeline": "parallel.pipeline",
    }.items():
        module = importlib.import_module(f"fusionlayer.{home}")
        spec = module.__spec__
        assert importlib.import_module(f"fusionlayer.{short}") is module and module.__spec__ is spec, short
    for name in ("fusionlayer.no_such", "fusionlayer.integrations.no_such"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
