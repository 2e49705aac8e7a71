"""Children that a rank forks: they end as others do, are told what they cannot use, and their parents go on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.medium

WORKER = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader
import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import context
from fusionlayer.base.errors import UsageError

torch.set_num_threads(1)  # a pool of threads would not be there in the child
def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

# A group of the backend, before there is a job: torch's destructor of it would wait for threads of the parent.
dist.init_process_group("fusionlayer")
dist.all_reduce(torch.ones(3))
child = os.fork()
if child == 0:
    sys.exit(3)
assert ended(child) == 3
fl.init(20)
model = nn.Linear(30, 10)
optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), codec="int8")
transport = context.transport()
hvd.init()
hvd.allreduce(torch.ones(3), name="before")

def step(rows):
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()

def refused():
    uses = {
        "transport": transport.barrier, "duplicate": transport.duplicate, "init": fl.init, "rank": fl.rank,
        "hvd": lambda: hvd.allreduce(torch.ones(3), name="x"), "step": lambda: step(torch.ones(2, 30)),
    }
    for name, use in uses.items():
        try:
            use()
        except (UsageError, hvd.HorovodInternalError) as error:
            assert "spawn" in str(error), error
        else:
            os._exit(90 + list(uses).index(name))
    transport.close()

step(torch.ones(2, 30))
is_child = False
for way in ("exit", "return"):
    child = os.fork()
    if child == 0:
        refused()
        if way == "exit":
            sys.exit(3)
        is_child = True
        break
    code = ended(child)
    assert code == {"exit": 3, "return": 0}[way], code
    step(torch.ones(2, 30))
if not is_child:
    process = mp.get_context("fork").Process(target=refused)
    process.start()
    process.join()
    assert process.exitcode == 0
    for rows in DataLoader(torch.ones(8, 30), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        step(rows)
    transport.barrier()
    print("went on", flush=True)
"""


def test_a_forked_child_ends_and_its_parent_goes_on(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FUSIONLAYER_TIMELINE": str(tmp_path / "trace")}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env={**os.environ, **place, **meeting, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for rank in ranks:
            out, err = rank.communicate()
            assert (rank.returncode, out) == (0, "went on\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
