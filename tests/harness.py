"""Ranks that are processes: every test that needs several of them starts them here.

    from tests.harness import run_ranks

    def total(rank, world, scale):            # top level of a module: it is pickled by name
        x = torch.full((1000,), scale * rank)
        dist.all_reduce(x)
        return x[0].item()

    def test_total():
        assert run_ranks(total, 4, 2.0) == [12.0] * 4

Processes are forked, in a hundredth of a second each, from a server that has imported torch and fusionlayer already: a
test has processes of its own and pays for no import. They meet by a file or a port of the system's choice, call the
function once all are up, and are all gone when the call returns. ``outcomes_of`` is the form for ranks that are meant
to fail.
"""

import datetime
import faulthandler
import functools
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "checkpoint", "outcomes_of", "run_ranks", "stay_last"]

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])

_report: Connection | None = None

# Seconds that ranks have to start, and from then on to end. They only end a hang: a busy machine needs a tenth.
START, DEADLINE = 120.0, 180.0
# Seconds that a rank has to leave once it has returned or raised.
_LEAVING = 60.0


@dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        kind: "returned", "raised", "died" (a signal or os._exit), or "hung" (until the deadline).
        value: what the function returned.
        error: type name of the exception, and its message.
        trace: its traceback.
        attributes: what the exception had in its ``__dict__``, of plain types.
        exit_code: of the process, as multiprocessing gives it.
        at: seconds from the start of the ranks' functions to this end.
        checkpoints: names of the checkpoints that were reached.
    """

    kind: str = "hung"
    value: Any = None
    error: tuple[str, str] = ("", "")
    trace: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    at: float = 0.0
    checkpoints: set[str] = field(default_factory=set)


def checkpoint(name: str) -> None:
    """Tell the test, from within a rank, that this point is reached; a signal set for it arrives before the return."""
    assert _report is not None
    _report.send(("checkpoint", name))
    _report.recv()


def stay_last() -> None:
    """Return, in a rank, when no other rank runs any more: as one must that keeps what the others learn from."""
    assert _report is not None
    _report.send(("last",))
    _report.recv()


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = DEADLINE,
    backend: str | None = "gloo",
    store: str = "file",
) -> list[Any]:
    """Return ``[fn(0, world, *args), fn(1, world, *args), ...]``, called in one process each once all of them are up.

    Args:
        fn: function at the top level of a module.
        world: number of processes.
        args: further arguments; pickled.
        timeout: seconds after which processes that have not ended are killed; no test should come near them.
        backend: of the default process group, None for no process group.
        store: by which they meet: "file", or "tcp", which rank 0 keeps.

    Raises:
        AssertionError: a rank raised, died or hung; led by the traceback of the rank that raised first.
    """
    outcomes = outcomes_of(fn, world, *args, timeout=timeout, backend=backend, store=store)
    if all(outcome.kind == "returned" for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    ends = ", ".join(f"rank {rank} {o.kind} (exit code {o.exit_code})" for rank, o in enumerate(outcomes))
    # What a rank makes of a connection that another has closed is a consequence, and not worth showing first.
    raised = sorted(
        (o for o in outcomes if o.kind == "raised"),
        key=lambda o: (o.error[0] == "TransportError" or "onnection" in o.error[1], o.at),
    )
    first = f"rank {outcomes.index(raised[0])} failed first:\n{raised[0].trace}\n" if raised else ""
    raise AssertionError(first + ends)


def outcomes_of(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    signals: dict[tuple[int, str], signal.Signals] | None = None,
    timeout: float = DEADLINE,
    backend: str | None = "gloo",
    store: str = "file",
) -> list[Outcome]:
    """Return how each rank of ``fn(rank, world, *args)`` ended; the arguments are those of ``run_ranks``.

    Args:
        signals: (rank, checkpoint) -> signal for that rank when it gets there. A stopped process counts as hung, and
            is waited for only as long as others run.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _Run(fn, world, args, signals or {}, timeout, backend, store, Path(folder)).outcomes


class _Run:
    """The processes of one run, from start to end."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world: int,
        args: tuple[Any, ...],
        signals: dict[tuple[int, str], signal.Signals],
        timeout: float,
        backend: str | None,
        store: str,
        folder: Path,
    ) -> None:
        self.outcomes = [Outcome() for _ in range(world)]
        self._signals = signals
        self._stopped: set[int] = set()
        self._last: set[Connection] = set()
        self._up: set[Connection] = set()
        _begin_server()
        self._start, self._timeout = time.monotonic(), timeout
        self._deadline = self._start + START
        self._ends: dict[Connection, int] = {}
        self._processes = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank_main, args=(fn, rank, world, args, theirs, timeout, backend, store, folder), daemon=True
            )
            process.start()
            theirs.close()
            self._ends[ours] = rank
            self._processes.append(process)
        try:
            self._watch()
        finally:
            self._end_all()

    def _watch(self) -> None:
        while set(self._ends.values()) - self._stopped and time.monotonic() < self._deadline:
            if {rank for ours, rank in self._ends.items() if ours not in self._last} <= self._stopped:
                for ours in self._last:
                    ours.send(None)
                self._last.clear()
            for ours in wait(list(self._ends), timeout=0.1):
                rank = self._ends[ours]
                try:
                    kind, *news = ours.recv()
                except (EOFError, OSError):
                    del self._ends[ours]
                    if self.outcomes[rank].kind == "hung":
                        self.outcomes[rank].kind = "died"
                        self.outcomes[rank].at = time.monotonic() - self._start
                    if not self._began():
                        return  # the others would wait for it in vain
                    continue
                if kind == "up":
                    self._up.add(ours)
                    if self._began():
                        self._start = time.monotonic()
                        self._deadline = self._start + self._timeout
                        for each in self._up:
                            each.send(None)
                elif kind == "checkpoint":
                    self._reached(rank, *news, ours)
                elif kind == "last":
                    self._last.add(ours)
                else:
                    self._ended(rank, kind, *news)

    def _began(self) -> bool:
        return len(self._up) == len(self.outcomes)

    def _reached(self, rank: int, name: str, ours: Connection) -> None:
        self.outcomes[rank].checkpoints.add(name)
        chosen = self._signals.get((rank, name))
        if chosen is not None:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, chosen)
            if chosen == signal.SIGSTOP:
                self._stopped.add(rank)
        if chosen != signal.SIGKILL:
            ours.send(None)

    def _ended(self, rank: int, kind: str, at: float, details: dict[str, Any]) -> None:
        outcome = self.outcomes[rank]
        outcome.kind, outcome.at = kind, at - self._start
        if kind == "returned":
            details["value"] = pickle.loads(details["value"])
        for name, value in details.items():
            setattr(outcome, name, value)

    def _end_all(self) -> None:
        for process, outcome in zip(self._processes, self.outcomes, strict=True):
            if outcome.kind in ("returned", "raised"):
                process.join(_LEAVING)
            if process.is_alive():
                process.kill()
            process.join()
            outcome.exit_code = process.exitcode
        for ours in self._ends:
            ours.close()


@functools.cache
def _begin_server() -> None:
    """Return when the server has imported what ranks need: no rank's start includes that."""
    first = _context.Process(target=_context.get_start_method)
    first.start()
    first.join()


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    report: Connection,
    timeout: float,
    backend: str | None,
    store: str,
    folder: Path,
) -> None:
    global _report
    _report = report
    faulthandler.enable()
    faulthandler.dump_traceback_later(START - 2, exit=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    tempfile.tempdir = None  # the server has looked for it; a rank that sets TMPDIR looks again
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                store=_meet(store, folder, rank, world, datetime.timedelta(seconds=timeout)),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout / 2),
            )
        report.send(("up",))
        report.recv()
        faulthandler.dump_traceback_later(max(1.0, timeout - 2), exit=False)
        value = fn(rank, world, *args)
        ended = time.monotonic()
        if backend is not None:
            dist.barrier()  # a rank that leaves early looks like a crash to the others
        # As bytes: a pipe takes tensors as handles, which the parent may ask for when this process has ended.
        report.send(("returned", ended, {"value": pickle.dumps(value)}))
        if backend is not None:
            dist.destroy_process_group()
    except BaseException as error:
        plain = {k: v for k, v in vars(error).items() if isinstance(v, (int, float, str, tuple, type(None)))}
        details = {"error": (type(error).__name__, str(error)), "trace": traceback.format_exc(), "attributes": plain}
        report.send(("raised", time.monotonic(), details))
        report.close()
        os._exit(1)


def _meet(kind: str, folder: Path, rank: int, world: int, patience: datetime.timedelta) -> dist.Store:
    if kind == "file":
        return dist.FileStore(str(folder / "store"), world)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=patience, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), world, is_master=False, timeout=patience)
