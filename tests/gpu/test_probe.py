"""What a machine has, printed, and the first that must be so on it; its output is worth reading where others fail."""

import multiprocessing as mp
import os
import platform
import shutil
import subprocess

import pytest
import torch

import fusionlayer as fl
from tests.gpu.place import GPU, ON
from tests.gpu.test_codec_gpu import same
from tests.synthetic import gradient


def use_the_device() -> None:
    assert float(torch.ones(3, device=GPU).sum()) == 3


def test_cuda_in_a_forked_process() -> None:
    """As ranks are: whether there is a device was asked here before, which may not use CUDA. First in this process."""
    child = mp.get_context("fork").Process(target=use_the_device)
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


def test_versions() -> None:
    print(f"\npython {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}", end="")
    print(f", {' '.join(platform.libc_ver())}, kernel {platform.release()}, {os.cpu_count()} cores")
    print(fl.build_info())
    shm = shutil.disk_usage("/dev/shm")
    print(f"/dev/shm {shm.free >> 20} MiB free, tools: {[shutil.which(name) for name in ('ncu', 'compute-sanitizer')]}")
    if ON == "cuda":
        print(f"{torch.cuda.get_device_properties(0)}, NCCL {torch.cuda.nccl.version()}")
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_int4(dtype: torch.dtype) -> None:
    codec, x = fl.codecs.get("int4").bare, gradient(70_001, 1, dtype)
    payload = codec.compress(x.to(GPU))
    assert same(codec.compress(x), payload)
    assert same(codec.decompress(payload.cpu(), x.shape, dtype), codec.decompress(payload, x.shape, dtype))
