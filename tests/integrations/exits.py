"""Programs that end in the middle of training, two ranks each, with everything alive that fusionlayer can start.

    python -m tests.integrations.exits FOLDER CASE ...

prints for each case how its ranks ended and what they left behind, as JSON. Ranks are forked from this process, which
has imported torch already, and then end as any program of Python does.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they are made: here once for all ranks
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
import fusionlayer.backend
import fusionlayer.torch as hvd
from tests.integrations.training import make_model, train

DEADLINE = 180
watched: list[Any] = []
CASES = (
    "exit in a hook",
    "exit in a hook of both",
    "error in a hook",
    "error in an update",
    "interrupt in backward",
    "interrupt while waiting",
    "interrupt of both",
    "terminate",
    "terminate both",
    "exit after a step",
    "exit amid local steps of both",
)


def raise_in(case: str, rank: int) -> None:
    """Do in rank 1, or in both, what the case is about."""
    if rank == 0 and "both" not in case:
        return
    if case.startswith("exit"):
        sys.exit(7)
    if case.startswith("error"):
        raise ValueError("a mistake of the user's")
    os.kill(os.getpid(), signal.SIGTERM if case.startswith("terminate") else signal.SIGINT)
    while True:
        time.sleep(0.01)


def interrupt_the_wait(sent: Path) -> None:
    """Interrupt the main thread when it waits in a call of fusionlayer, and leave a file to say so."""
    while True:
        frame, code = sys._current_frames()[threading.main_thread().ident or 0], []
        while frame is not None:
            code.append(frame.f_code)
            frame = frame.f_back  # type: ignore[assignment]
        if code[0].co_name == "wait" and any("/fusionlayer/" in each.co_filename for each in code):
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    sent.touch()


def end_amid_local_steps(model: Any, before: Any, rank: int, left: Path) -> None:
    """End with a fragment under way: rank 1 sends its part when rank 0 has ``left``."""
    before.close()
    optimizer = fl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, codec="int8", sync=fl.Local.overlapped(every=2)
    )
    watched.append(optimizer)
    train(model, optimizer, rank, range(4))
    while rank == 1 and not left.exists():
        time.sleep(0.01)
    train(model, optimizer, rank, range(4, 5))
    left.touch()
    raise_in("exit of both", rank)


def check_nothing_is_under_way() -> None:
    """Fail where a thread may still be in a call of torch, which aborts the process when Python has ended."""
    if any(optimizer.reducer.engine.untaken for optimizer in watched):
        print("something is under way at exit", file=sys.stderr, flush=True)
        os._exit(9)


def program(rank: int, case: str, sent: Path) -> None:
    """Train, until the case ends it; ``sent`` says that a rank has been interrupted while it waits."""
    atexit.register(check_nothing_is_under_way)  # handlers run last in, first out: this one after those of init()
    hvd.init()
    dist.new_group(backend="fusionlayer").allreduce([torch.ones(100_000)]).wait()
    model, other = make_model(), make_model()
    optimizer = fl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), codec="int8", planner="wfbp"
    )
    named = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
    train(model, optimizer, rank, range(2))
    train(other, named, rank, range(2))
    hvd.allreduce(torch.ones(100_000), name="named")

    def hook(_: Tensor) -> None:
        if "update" not in case and "waiting" not in case and "step" not in case:
            raise_in(case, rank)

    if "local" in case:
        end_amid_local_steps(model, optimizer, rank, sent)
    model[0].weight.register_hook(hook)
    if case == "error in an update":
        optimizer.register_step_pre_hook(lambda *_: raise_in(case, rank))
    if "waiting" in case:
        if rank == 0:
            while not sent.exists():
                time.sleep(0.01)
        else:
            threading.Thread(target=interrupt_the_wait, args=(sent,), daemon=True).start()
    train(model, optimizer, rank, range(2, 3))
    if "step" in case:
        raise_in(case, rank)
    train(model, optimizer, rank, range(3, 5))


def start(rank: int, case: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    errors = os.open(folder.parent / f"{folder.name}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.environ.update(PMI_RANK=str(rank), PMI_SIZE="2", PMIX_NAMESPACE="exits", TMPDIR=str(folder))
    os.environ.update(FUSIONLAYER_TIMEOUT="30", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    program(rank, case, folder.parent / f"{folder.name}.sent")
    sys.exit(0)


def ended(pids: list[int]) -> list[int | None]:
    """Return the exit codes; None is a rank that did not end, and -N one that signal N has ended."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.02)
    return [codes.get(pid) for pid in pids]


def left_over(pids: list[int]) -> list[int]:
    """Return the processes that the ranks have started and that still run; end them."""
    found = []
    for pid in pids:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pid and fields[0] not in "ZX":
                found.append(int(path.parent.name))
                os.kill(found[-1], signal.SIGKILL)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    shared = {*os.listdir("/dev/shm")}
    pids = {}
    for number, case in enumerate(sys.argv[2:]):
        own = folder / str(number)
        own.mkdir()
        pids[case] = [start(rank, case, own) for rank in range(2)]
    for number, case in enumerate(pids):
        told[case] = {
            "codes": ended(pids[case]),
            "running": left_over(pids[case]),
            "files": [name for name in os.listdir(folder / str(number)) if not name.startswith("torchinductor")],
            "errors": [(folder / f"{number}.{rank}").read_text()[-3000:] for rank in range(2)],
        }
    told["shared memory"] = sorted({*os.listdir("/dev/shm")} - shared)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
