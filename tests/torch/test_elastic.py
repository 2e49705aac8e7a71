"""Workers and agents that are killed, and others that come, under torchrun; and what each part of that does alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base.errors import ConfigError
from fusionlayer.torch import elastic
from fusionlayer.torch.elastic.storage import Storage
from fusionlayer.torch.elastic.torch_state import StateHandler, merge_feedback
from fusionlayer.transport import local
from tests.disk import room_for
from tests.integrations.test_local import Oracle
from tests.integrations.training import loss_of, make_model, train, weights
from tests.tiers import exhaustive
from tests.torch.elastic_worker import digest

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """Agents of one elastic job on this host, each with one worker, and what the workers have written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        # Not an agent's: agents are killed here, and the rendezvous must go on.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, name: str) -> None:
        """Start an agent of a job of one or two nodes with a worker each."""
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TEST_AGENT": name,
            "HOROVOD_ELASTIC_TIMEOUT": "10",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "9"),
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--local-addr", "127.0.0.1", "--rdzv-conf"),
            "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10",
            *("-m", "tests.torch.elastic_worker", str(self.folder)),
        ]
        with (self.folder / f"{name}.out").open("wb") as out:
            self.agents[name] = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return found

    def worker(self, name: str) -> int:
        return int([line["pid"] for line in self.lines() if line["agent"] == name][-1])

    def await_steps(self, size: int, after: int, seconds: float = 180) -> int:
        """Return once all ranks of a job of ``size`` have taken 3 steps beyond ``after``; the last of these."""

        def taken() -> bool:
            steps = [line for line in self.lines() if line["kind"] == "step" and line["size"] == size]
            far = {line["rank"] for line in steps if line["step"] >= after + 3}
            return far == set(range(size))

        self.wait(taken, seconds)
        return max(int(line["step"]) for line in self.lines() if line["kind"] == "step")

    def wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, self.told()
            time.sleep(0.1)

    def told(self) -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.*")))

    def kill_all(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        # Their workers outlive them. One that has only begun has written nothing yet.
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.folder).encode() in (process / "cmdline").read_bytes():
                    kill(int(process.name))


def kill(pid: int) -> None:
    """Kill a worker of this test; who has it as its environment says."""
    try:
        if b"TEST_AGENT=" in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    made = Job(folder)
    try:
        yield made
    finally:
        made.kill_all()


@exhaustive(guarded_by="tests/torch/test_elastic.py::test_failure_between_commits_changes_no_bit")
@pytest.mark.medium
@pytest.mark.timeout(400)
def test_worker_killed_then_host_lost_then_another_added(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        run.start("a")
        run.start("b")
        last = run.await_steps(2, 0)
        kill(run.worker("b"))
        last = run.await_steps(2, last)
        run.agents["b"].kill()
        kill(run.worker("b"))
        last = run.await_steps(1, last)
        run.start("c")
        last = run.await_steps(2, last)
        (tmp_path / "finish").touch()
        for name in "ac":
            assert run.agents[name].wait(180) == 0, run.told()
        lines = run.lines()

    steps = {line["step"]: [] for line in lines}
    for line in lines:
        if line["kind"] == "step":
            steps[line["step"]].append(line)
    first, second, alone, grown = generations(lines)
    assert [{line[0]["agent"] for line in each} for each in (first, second, alone, grown)] == [
        {"a", "b"},
        {"a", "b"},
        {"a"},
        {"a", "c"},
    ]
    assert [each[0][0]["size"] for each in (first, second, alone, grown)] == [2, 2, 1, 2]

    # Whoever begins does so where the last commit was, with all of its state.
    for before, after in ((first, second), (second, alone), (alone, grown)):
        committed = after[0][0]["step"]
        (last,) = {start[-1]["step"] for start in before if start[0]["agent"] == "a"}
        assert last - 1 <= committed <= last
        for start in after:
            for key in ("weights", "momenta"):
                assert {start[0][key]} == {line[key] for line in steps[committed] if line["pid"] != start[0]["pid"]}
    assert grown[0][0]["step"] == alone[0][-1]["step"], "a worker that is told to go commits first"

    def told_by(agent: str, generation: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return next(start for start in generation if start[0]["agent"] == agent)

    # Error feedback is each rank's own, and stays with its host; the plan stays while the size does.
    for agent in "ab":
        begun, taken = told_by(agent, second)[:2]
        assert begun["feedback"] == at(told_by(agent, first), begun["step"])["feedback"] != digest([])
        assert taken["sent"] == told_by(agent, first)[1]["sent"]
    assert told_by("a", grown)[0]["feedback"] == at(told_by("a", second), alone[0][0]["step"])["feedback"]
    assert told_by("c", grown)[0]["feedback"] == digest([])

    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert epochs and all(line["covered"] and line["twice"] <= 1 for line in epochs)
    ends = [line for line in lines if line["kind"] == "end"]
    assert len(ends) == 2 and len({line["weights"] for line in ends}) == len({line["step"] for line in ends}) == 1
    agents = [agent.pid for agent in run.agents.values()]
    assert not [left for pid in agents for left in Path("/dev/shm").glob(f"fusionlayer-elastic-*-{pid}-*")]


def at(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(line for line in lines if line["step"] == step and line["kind"] == "step")


def generations(lines: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
    """Return the lines of each worker, by the step at which it began."""
    found: dict[int, list[list[dict[str, Any]]]] = {}
    for pid in dict.fromkeys(line["pid"] for line in lines):
        worker = [line for line in lines if line["pid"] == pid]
        assert worker[0]["kind"] == "begin"
        found.setdefault(worker[0]["step"], []).append(worker)
    return [found[step] for step in sorted(found)]


# ---- its parts ------------------------------------------------------------------------------------------------------


def test_failure_between_commits_changes_no_bit() -> None:
    """Momenta, error feedback, steps and plan come back as they were, in the same processes."""

    def training(rank: int, fails: bool) -> tuple[Tensor, list[str]]:
        hvd.init()
        model, told = make_model(), []
        optimizer: Any = fl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            model.named_parameters(),
            codec="int4",
            error_feedback=True,
        )
        state: Any = elastic.TorchState(model, optimizer, step=0)
        state.register_reset_callbacks([lambda: told.append(f"reset at {state.step}")])
        failures = [4, 7] if fails else []

        @elastic.run
        def body(state: Any, until: int) -> str:
            while state.step < until:
                optimizer.zero_grad()
                loss_of(model, rank, state.step).backward()
                if failures and state.step == failures[0]:
                    told.append(f"failed in {failures.pop(0)}")
                    raise hvd.HorovodInternalError("as if a peer were lost, while gradients are under way")
                optimizer.step()
                state.step += 1
                if state.step % 3 == 0:
                    state.commit()
            return "done"

        assert body(state, 9) == "done"
        assert state.commits == 3
        hvd.shutdown()
        return weights(model), told

    smooth = local.run(lambda rank: training(rank, False), 2)
    rough = local.run(lambda rank: training(rank, True), 2)
    assert all(told == ["failed in 4", "reset at 3", "failed in 7", "reset at 6"] for _, told in rough)
    assert all(torch.equal(result, smooth[0][0]) for result, _ in [*smooth, *rough])


def test_outer_momentum_of_local_steps_reaches_a_newcomer() -> None:
    """Rank 1 is another process from step 4 on, at a round's end: training goes on as if it were the same."""
    sync = fl.Local.diloco(every=2)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def rank_main(rank: int) -> Tensor:
        hvd.init()

        def begin() -> Any:
            model = make_model()
            wrapped = fl.DistributedOptimizer(plain(model.parameters()), model.named_parameters(), sync=sync)
            return elastic.TorchState(model, wrapped)

        before, fresh = begin(), begin()
        train(before.model, before.optimizer, rank, range(4))
        before.commit()
        mine, other = (before, fresh) if rank == 0 else (fresh, before)
        other.optimizer.close()
        mine.on_reset()
        elastic.run(lambda state: train(state.model, state.optimizer, rank, range(4, 8)))(mine)
        mine.optimizer.synchronize()
        hvd.shutdown()
        return weights(mine.model)

    oracle = Oracle(2, sync, plain)
    oracle.train(range(8))
    for found in local.run(rank_main, 2):
        assert torch.equal(found, weights(oracle.models[0]))


def test_a_newcomer_begins_with_the_factors_that_the_others_have() -> None:
    """Rank 1 is another process from step 3 on: training goes on as if the same one had lost its error feedback."""

    def rank_main(rank: int, comes: bool) -> Tensor:
        hvd.init()

        def begin() -> Any:
            model = make_model()
            optimizer: Any = fl.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, codec="powersgd", rank=1
            )
            return elastic.TorchState(model, optimizer)

        before, fresh = begin(), begin()
        train(before.model, before.optimizer, rank, range(3))
        before.commit()
        mine, other = (fresh, before) if comes and rank else (before, fresh)
        other.optimizer.close()
        mine.on_reset()
        if rank and not comes:
            memory = mine.optimizer.reducer.engine.memory
            memory.load_state_dict({**memory.state_dict(), "residuals": {}})
        elastic.run(lambda state: train(state.model, state.optimizer, rank, range(3, 6)))(mine)
        hvd.shutdown()
        return weights(mine.model)

    same, comes = (local.run(lambda rank, comes=comes: rank_main(rank, comes), 2) for comes in (False, True))
    assert torch.equal(*same) and torch.equal(*comes) and torch.equal(same[0], comes[0])


def test_interrupt_keeps_what_is_not_committed_and_comes_on_all_ranks() -> None:
    def rank_main(rank: int) -> list[int]:
        hvd.init()
        state: Any = elastic.TorchState(value=rank)
        calls: list[int] = []

        @elastic.run
        def body(state: Any) -> list[int]:
            calls.append(state.value)
            if len(calls) == 1:
                state.value += 10
                state.check_host_updates()
                if rank == 1:
                    state.on_hosts_updated(0.0, 1)
                state.check_host_updates()
                raise AssertionError("nobody was told")
            if len(calls) == 2:
                state.value = 20 + rank
                raise elastic.HostsUpdatedInterrupt(skip_sync=True)
            return calls

        return body(state)

    assert local.run(rank_main, 2) == [[0, 10, 20], [0, 10, 21]]


def test_newest_commit_wins_whoever_has_it() -> None:
    def rank_main(rank: int) -> tuple[int, float, int]:
        hvd.init()
        model = torch.nn.Linear(2, 1)
        state: Any = elastic.TorchState(model, note=rank)
        torch.nn.init.constant_(model.weight, rank)
        state.save()
        for _ in range([1, 3, 2][rank]):
            state.keep()
        return elastic.run(lambda state: (state.note, model.weight[0, 0].item(), state.commits))(state)

    assert local.run(rank_main, 3) == [(1, 1.0, 3)] * 3


def test_torch_state() -> None:
    @on_ranks(2)
    def rank_main(rank: int) -> None:
        hvd.init()
        model, other = make_model(), torch.nn.Linear(1, 1)
        state: Any = elastic.TorchState(model, None, other=other, numbers=[rank])
        assert state.model is model and state.other is other and state.optimizer is None
        before = weights(model)
        with torch.no_grad():
            model[0].weight.zero_()
        state.numbers.append(5)
        state.restore()
        assert torch.equal(weights(model), before) and state.numbers == [rank]
        state.other = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(state.other.weight, rank + 3.0)
        state.sync()
        assert state.numbers == [0] and state.other.weight.item() == 3.0
        state.other.weight.data.zero_()
        state.restore()
        assert state.other.weight.item() == 3.0, "what was synchronized is what is gone back to"

    @on_ranks(1)
    def alone(rank: int) -> None:
        hvd.init()
        with pytest.raises(NotImplementedError):
            elastic.State(lambda obj: obj, lambda: 0).commit()
        assert elastic.ObjectState(lambda obj: obj, lambda: 0, epoch=2).epoch == 2  # type: ignore[attr-defined]


def test_own_types_have_their_handlers() -> None:
    class Counter:
        count = 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    before = elastic.get_handler_registry()
    elastic.set_handler_registry([*before, (Counter, StateHandler)])
    try:

        @on_ranks(2)
        def rank_main(rank: int) -> None:
            hvd.init()
            counter = Counter()
            state: Any = elastic.TorchState(counter=counter)
            counter.count = 7 + rank
            state.restore()
            assert counter.count == 1
            counter.count = 7 + rank
            state.sync()
            assert counter.count == 7
    finally:
        elastic.set_handler_registry(before)


def test_feedback_of_ranks_that_are_gone_is_added_to_that_of_their_heir() -> None:
    def part(value: float) -> dict[str, Any]:
        kept = {"velocity": torch.full((3,), 10 * value), "right": torch.full((2,), 7.0), "threshold": torch.ones(1)}
        return {
            "residuals": {"w": torch.full((3,), value)},
            "tensors": {"w": kept},
            "numbers": {"w": {"threshold": value}},
        }

    merged = merge_feedback([part(1.0), part(2.0), {"residuals": {}, "tensors": {}, "numbers": {}}])
    assert torch.equal(merged["residuals"]["w"], torch.full((3,), 3.0))
    assert torch.equal(merged["tensors"]["w"]["velocity"], torch.full((3,), 30.0))
    assert torch.equal(merged["tensors"]["w"]["right"], torch.full((2,), 7.0))
    assert torch.equal(merged["tensors"]["w"]["threshold"], torch.ones(1))
    assert merged["numbers"] == {"w": {"threshold": 1.0}}
    assert merge_feedback([]) == {"residuals": {}, "tensors": {}, "numbers": {}}


def test_sampler_deals_out_what_is_left() -> None:
    def rank_main(rank: int, state: dict[str, int] | None = None) -> tuple[list[int], dict[str, int]]:
        hvd.init()
        sampler = elastic.ElasticSampler(range(20), seed=5)
        if state is not None:
            sampler.load_state_dict(state)
        mine = list(sampler)
        assert len(mine) == len(sampler) == sampler.num_samples
        for batch in range(2):
            sampler.record_batch(batch, 3)
        return mine, sampler.state_dict()

    both = local.run(rank_main, 2)
    assert both[0][1] == both[1][1] == {"epoch": 0, "processed_num": 12}
    done = [i for mine, _ in both for i in mine[:6]]
    rest = local.run(lambda rank: rank_main(rank, both[0][1]), 3)
    left = [i for mine, _ in rest for i in mine]
    assert len(done) == 12 and len(left) == 9 and set(done + left) == set(range(20))

    @on_ranks(4)
    def few(rank: int) -> None:
        hvd.init()
        sampler = elastic.ElasticSampler(range(9), shuffle=False)
        sampler.load_state_dict({"epoch": 1, "processed_num": 8})
        assert list(sampler) == [8]
        sampler.load_state_dict({"epoch": 1, "processed_num": 12})
        assert list(sampler) == [] and len(sampler) == 0
        sampler.set_epoch(2)
        assert list(sampler) == [[0, 4, 8], [1, 5, 0], [2, 6, 1], [3, 7, 2]][rank]


def test_storage(tmp_path: Path) -> None:
    environ = {"TORCHELASTIC_RUN_ID": "a/job", "FUSIONLAYER_ELASTIC_DIR": str(tmp_path)}
    assert Storage.of_agent(0, {}) is None
    one, two = Storage.of_agent(0, environ), Storage.of_agent(1, environ)
    assert one is not None and two is not None
    assert one.token == two.token
    assert one.newest() == 0 and one.ranks(0) == []
    two.writes_shared = False
    for number in (1, 2, 3):
        for storage in (one, two):
            storage.keep(number, {"at": number}, number)
    assert one.newest() == 3 and two.shared(3) == {"at": 3} and one.shared(2) == {"at": 2}
    assert one.ranks(3) == [0, 1] and one.own(3, 1) == 3
    names = sorted(path.name for path in (tmp_path / "a%2Fjob").iterdir())
    assert names == ["2.rank-0", "2.rank-1", "2.shared", "3.rank-0", "3.rank-1", "3.shared", "token"]
    one.forget()
    assert not (tmp_path / "a%2Fjob").exists()


def test_memory_of_agents_that_are_gone_is_freed() -> None:
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc until it is waited for
    started = Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[19]
    left = Path(f"/dev/shm/fusionlayer-elastic-{os.getuid()}-{gone.pid}-{started}")
    left.mkdir()
    (left / "1.shared").write_text("")
    storage = Storage.of_agent(0, {"TORCHELASTIC_RUN_ID": "none"})
    assert storage is not None and not left.exists()
    storage.forget()
    gone.wait()


def on_ranks(world: int) -> Callable[[Callable[[int], Any]], None]:
    """Run the decorated function on every rank at once; what it raises, the test raises."""
    return lambda function: local.run(function, world) and None


@pytest.mark.parametrize("room", [100, 5000, 1 << 20])
def test_a_commit_that_finds_no_room_leaves_the_last_one(tmp_path: Path, room: int) -> None:
    storage = Storage(tmp_path, 0)
    storage.keep(1, "shared", "own")
    before = sorted(os.listdir(tmp_path))
    with room_for(room), pytest.raises(ConfigError, match="cannot keep a commit in .*: File too large; make room"):
        storage.keep(2, torch.zeros(1 << 20), "own")
    assert sorted(os.listdir(tmp_path)) == before
    assert (storage.newest(), storage.shared(1), storage.own(1, 0)) == (1, "shared", "own")
