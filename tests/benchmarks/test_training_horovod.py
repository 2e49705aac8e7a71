"""How the training benchmark drives Horovod's processes, shown with a stand-in that averages nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import fusionlayer as fl
from benchmarks.training.horovod_replica import HorovodReplica
from benchmarks.training.workloads import make_workload
from tests.examples.places import ROOT
from tests.harness import run_ranks
from tests.tiers import long

STAND_IN = {
    "horovod/__init__.py": "__version__ = '0.0'",
    "horovod/torch/__init__.py": """
import os
class Compression: none, fp16 = "none", "fp16"
def init(): assert os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321", "not where rank 0 serves"
def shutdown(): print("noise that must not be taken for an answer")
def DistributedOptimizer(optimizer, named_parameters, compression):
    assert compression == "fp16" and len(list(named_parameters)) > 10
    return optimizer
""",
    "horovod/runner/__init__.py": "",
    "horovod/runner/common/__init__.py": "",
    "horovod/runner/common/util/__init__.py": "",
    "horovod/runner/common/util/hosts.py": """
def parse_hosts(text): return text
def get_host_assignments(hosts, size): return hosts, size
""",
    "horovod/runner/http/__init__.py": "",
    "horovod/runner/http/http_server.py": """
class RendezvousServer:
    def start(self): return 4321
    def init(self, assignments): assert assignments == ("host0:2", 2), assignments
""",
}


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def drive(rank: int, world: int, stand_in: str) -> tuple[list[str], int, bool, str]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(PYTHONPATH=os.pathsep.join([stand_in, str(ROOT)]), OMP_NUM_THREADS="1")
    fl.init()
    replica = HorovodReplica("horovod-fp16", make_workload("gpt-small", 0, rank))
    states = [state_of(replica._process.pid)]
    replica.prepare(0, 2)
    dist.barrier()
    states.append(state_of(replica._process.pid))
    turn = replica.run()
    dist.barrier()
    replica.rest()
    states.append(state_of(replica._process.pid))
    parameters = replica.digest()
    replica.close()
    assert turn.seconds > 0 and turn.cpu > 0 and turn.codec is None
    return states, len(turn.losses), replica._process.returncode == 0, parameters


@pytest.mark.medium
@long(guarded_by="tests/benchmarks/test_training.py::test_timed_codec_makes_the_same_bytes_and_counts")
def test_horovod_runs_only_in_its_turn(tmp_path: Path) -> None:
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = run_ranks(drive, 2, str(tmp_path))
    for states, losses, ended_well, _ in found:
        assert states[0] == states[2] == "T"
        assert states[1] != "T"
        assert losses == 2
        assert ended_well
    assert found[0][3] != found[1][3], "each rank has data of its own, and nothing was averaged"
