"""What the end of a program waits for."""

import subprocess
import sys

import pytest

# The program keeps the interpreter's lock from before the collective ends until it ends itself. So gloo's thread, which
# needs the lock to let go of the tensor, cannot have it before the exit.
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import fusionlayer

_, backend, how = sys.argv
if how == "forked" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
"""


@pytest.mark.medium
@pytest.mark.parametrize(("backend", "how"), [("fusionlayer", "alone"), ("gloo", "alone"), ("fusionlayer", "forked")])
def test_a_thread_of_gloo_that_still_holds_a_tensor_does_not_abort_the_exit(backend: str, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, backend, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
