from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fusionlayer

pytestmark = pytest.mark.medium

OPTIONAL = {"scipy", "matplotlib", "mpi4py", "triton", "deepspeed", "horovod", "megatron", "rich", "transformers"}

EVERY_MODULE = """
import contextlib, importlib, json, os, pkgutil, sys

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

def ours(name):
    return name.split(".")[0] == "fusionlayer"

def everything():
    import fusionlayer
    names = [m.name for m in pkgutil.walk_packages(fusionlayer.__path__, "fusionlayer.")]
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return names, [name for name in sys.modules if not ours(name)]

def failure_of(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        return repr(error)

names, others = apart(everything)
for name in others:  # seconds of a processor, which each process would need
    with contextlib.suppress(Exception):
        importlib.import_module(name)
assert not any(map(ours, sys.modules))
import fusionlayer  # the first of every import below: a module that comes with it comes in this order always
tried = [name for name in names if name not in sys.modules]
failed = {name: why for name in tried if (why := apart(lambda: failure_of(name)))}
print(json.dumps([names, tried, failed]))
"""

WHAT_COMES_ALONG = """
import json, sys, threading
import torch
before = set(sys.modules)
import fusionlayer
libraries = [line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line]
print(json.dumps([sorted(set(sys.modules) - before), libraries, threading.active_count()]))
"""


def answer(code: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, list)
    return result


@pytest.mark.timeout(900)  # it computes for half a minute, which next to many others takes six
def test_every_module_can_be_the_first() -> None:
    names, tried, failed = answer(EVERY_MODULE)
    assert isinstance(names, list) and {"fusionlayer.wire", "fusionlayer.codecs.integer"} < set(names)
    assert isinstance(tried, list) and {"fusionlayer.cli.plan", "fusionlayer.torch"} < set(tried) < set(names)
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
