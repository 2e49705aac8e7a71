"""Ranks of an elastic job are killed and come: the others go on in the same processes, with the same bits."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base.errors import TransportError
from fusionlayer.observe import metrics
from fusionlayer.training.policies import elastic_policy
from fusionlayer.transport import Transport
from tests.harness import Outcome, checkpoint, outcomes_of, run_ranks
from tests.synthetic import gradient
from tests.tiers import exhaustive

from .worker import Weighted, begin, digest, train

pytestmark = pytest.mark.medium

WEIGHTS = {rank: 2.0**rank for rank in range(8)}


def check(outcomes: list[Outcome], lost: tuple[int, ...], stopped: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Check that ranks were killed or ``stopped`` and all others have ended alike; return what these have returned."""
    told = [o.trace for o in outcomes if o.kind == "raised"]
    assert not told, told[0]
    assert [rank for rank, o in enumerate(outcomes) if o.kind == "died"] == sorted(lost), outcomes
    assert [rank for rank, o in enumerate(outcomes) if o.kind == "hung"] == sorted(stopped), outcomes
    ends = [o.value for rank, o in enumerate(outcomes) if rank not in lost + stopped]
    assert len({end["digest"] for end in ends}) == 1 and len({end["finished"] for end in ends}) == 1
    return ends


def check_averages(ends: list[dict[str, Any]], weights: dict[int, float]) -> None:
    """Each update is the average over those who took part, the same on all of them."""
    for end in ends:
        for seen in end["seen"][1:]:  # a newcomer's first step takes the state over
            taking = [weights[pid] for pid in seen["pids"] if pid in weights]
            if len(taking) == len(seen["pids"]):
                assert seen["update"] == pytest.approx(sum(taking) / len(taking), abs=1e-2), seen


def test_any_rank_may_be_lost_and_another_comes(tmp_path: Path) -> None:
    """Rank 0, which keeps the store, and rank 2 are killed in the middle of a backward; a process joins for each."""
    signals = {(0, "lost"): signal.SIGKILL, (2, "lost"): signal.SIGKILL}
    outcomes = outcomes_of(train, 5, str(tmp_path), 3, 3, signals=signals, backend=None)
    ends = check(outcomes, (0, 2))
    assert sorted(end["place"] for end in ends) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
    assert all(end["dealt"] == (3, end["place"][0], 20) for end in ends)
    # A process is known to those who have outlived it by nothing but its gradients.
    weights = {end["pid"]: WEIGHTS[rank] for end, rank in zip(ends, (1, 3, 4), strict=True)}
    check_averages(ends, weights)
    assert ends[0]["steps"] == ends[0]["finished"], "no step was made twice, and none was left out"
    assert {end["schedule"] for end in ends} == {ends[0]["schedule"]}


def publish(rank: int, world: int, folder: str) -> tuple[float, int | None]:
    """Publish each step; rank 0 is killed after its third."""
    begin(rank, folder, world)
    model = Weighted(1.0)
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, codec="raw")
    with fl.publish(model, Path(folder, "versions")) as publisher:
        for _ in range(7):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.step()
            if rank == 0 and publisher.version == 2:
                assert publisher.flush(60)
                checkpoint("lost")
        return float(model.parts[0].detach()[0]), publisher.version


def test_a_job_that_publishes_goes_on_without_its_rank_0(tmp_path: Path) -> None:
    signals = {(0, "lost"): signal.SIGKILL}
    outcomes = outcomes_of(publish, 3, str(tmp_path), signals=signals, backend=None, timeout=90)
    assert [o.kind for o in outcomes] == ["died", "returned", "returned"], outcomes
    with fl.subscribe(tmp_path / "versions") as follower:
        assert follower.wait(60) == outcomes[1].value[1]
        assert float(follower.state_dict()["parts.0"][0]) == outcomes[1].value[0] == -7


@exhaustive(guarded_by="tests/elastic/test_processes.py::test_any_rank_may_be_lost_and_another_comes")
def test_a_rank_that_is_stopped_is_left_out_and_another_comes(tmp_path: Path) -> None:
    """It is rank 0, at whose store the others report: it takes connections and answers nothing."""
    signals = {(0, "lost"): signal.SIGSTOP, (2, "lost"): signal.SIGKILL}
    outcomes = outcomes_of(train, 5, str(tmp_path), 3, 3, signals=signals, backend=None)
    ends = check(outcomes, lost=(2,), stopped=(0,))
    check_averages(ends, {end["pid"]: WEIGHTS[rank] for end, rank in zip(ends, (1, 3, 4), strict=True)})


# ---- a step is taken back, and made once more -----------------------------------------------------------------------


def disturbed(rank: int, world: int, folder: str, cases: list[tuple[str, dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Train with each codec undisturbed, then with faults by which nobody is lost; return both ends."""
    begin(rank, folder, world)
    return [
        {fault: _trained(rank, folder, codec, options, bits, fault) for fault in ("none", "faults")}
        for codec, options, bits in cases
    ]


def _trained(rank: int, folder: str, codec: str, options: dict[str, Any], bits: int, fault: str) -> Any:
    members = fl.membership()
    first = members.step
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer: Any = fl.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model, codec=codec, error_feedback=True, feedback_bits=bits, **options
    )
    agree, exchange, made = members.agree, optimizer.reducer.policy._exchange, []

    def fail(transport: Transport) -> None:
        """End the exchanges of this rank, as if its links were lost."""
        for lane in optimizer.reducer.engine.lanes.all:
            lane.transport.close()
        raise TransportError("a fault of the test", [rank])

    def failing(number: int, transport: Transport) -> None:
        step = number - first
        if step == 8:
            Path(folder, f"{codec} {rank}").touch()
        if step == 5 and rank == 1:
            fail(transport)  # it has all results; the others have them too, and do not know that of it
        agree(number, transport)
        if step == 6 and rank == 2:
            fail(transport)  # the others know that all have the results, and fail in the next step

    def losing(engine: Any) -> Any:
        made.append(members.step - first)
        results = exchange(engine)
        if members.step - first == 7 and rank == 0:
            # All others have the results and go on; this rank's last messages are lost.
            while not all(Path(folder, f"{codec} {other}").exists() for other in (1, 2)):
                time.sleep(0.01)
            for x in results.values():
                x.fill_(7.0)
            engine.fail(TransportError("a fault of the test", [rank]))
        return results

    generation = members.generation
    if fault == "faults":
        members.agree, optimizer.reducer.policy._exchange = failing, losing  # type: ignore[method-assign]
    for step in range(9):
        x = gradient(320, 100 * rank + step, torch.float32).view(8, 40)
        loss = model(x).square().mean()
        if fault == "faults" and step == 2 and rank == 0:
            hook = next(iter(model.parameters())).register_hook(lambda g: _close(optimizer))
            loss.backward()
            hook.remove()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    members.agree = agree  # type: ignore[method-assign]
    changes = members.generation - generation, made.count(7)
    memory = optimizer.reducer.engine.memory.state_dict()
    kept = {name: x.tolist() for key in ("residuals",) for name, x in memory[key].items()}
    codes = {name: part["codes"].tolist() for name, part in memory["packed"].items()}
    optimizer.close()
    return digest(model), kept, codes, members.step - first, changes


def _close(optimizer: Any) -> None:
    for lane in optimizer.reducer.engine.lanes.all:
        lane.transport.close()


def test_a_step_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Gradients, error feedback and the optimizer are as before it: all ends have the bits of undisturbed training."""
    cases: list[tuple[str, dict[str, Any], int]] = [("topk", {"density": 0.1}, 8)]
    ends = run_ranks(disturbed, 3, str(tmp_path), cases, backend=None)
    for case in range(len(cases)):
        for rank in range(3):
            calm, rough = ends[rank][case]["none"], ends[rank][case]["faults"]
            assert calm[:4] == rough[:4] and rough[3] == 9, cases[case]
            assert calm[0] == ends[0][case]["none"][0]
            assert calm[4] == (0, 0) and rough[4] == (4, 1), (
                "each fault begins a generation, and what is there is given"
            )


def give(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Lose rank 0 while it gives the last ranks the results of the third step, which they lack; train on."""
    begin(rank, folder, world)
    members = fl.membership()
    model = Weighted(2.0**rank)
    optimizer: Any = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, codec="raw")
    agree, exchange, send = members.agree, optimizer.reducer.policy._exchange, elastic_policy.send_results
    given: list[int] = []

    def telling(number: int, transport: Transport) -> None:
        if number == 3:
            Path(folder, f"has {rank}").touch()
        agree(number, transport)

    def losing(engine: Any) -> Any:
        results = exchange(engine)
        if members.step == 2 and rank in (2, 3):
            while not all(Path(folder, f"has {other}").exists() for other in (0, 1)):
                time.sleep(0.01)
            engine.fail(TransportError("a fault of the test", [rank]))
        return results

    def send_or_be_lost(results: Any, transport: Transport, to: int) -> None:
        if members.processes[to] in lost_at:
            checkpoint("lost")
        given.append(to)
        send(results, transport, to)

    members.agree, optimizer.reducer.policy._exchange = telling, losing  # type: ignore[method-assign]
    elastic_policy.send_results = send_or_be_lost
    updates = []
    lost_at = members.processes[3:] if rank == 0 else ()
    while members.step < 6:
        before = float(model.parts[0].detach()[0])
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.append(before - float(model.parts[0].detach()[0]))
    return {"digest": digest(model), "finished": members.step, "updates": updates, "given": len(given)}


def test_a_member_that_has_a_steps_results_gives_them_to_the_others_also_if_another_giver_is_lost(
    tmp_path: Path,
) -> None:
    """Ranks 0 and 1 have updated; 2 and 3 lack the results. Rank 0 gives them to rank 2, and is lost then."""
    outcomes = outcomes_of(give, 4, str(tmp_path), signals={(0, "lost"): signal.SIGKILL}, backend=None)
    ends = check(outcomes, (0,))
    all_four, three = 15 / 4, 14 / 3
    for end in ends:
        assert end["updates"] == pytest.approx([all_four] * 3 + [three] * 3), "the third step has all four gradients"
    assert [end["given"] for end in ends] == [1, 0, 0], "rank 1 gives rank 3 what rank 0 has not"


# ---- local steps ----------------------------------------------------------------------------------------------------


def train_locally(rank: int, world: int, folder: str, first: int) -> dict[str, Any]:
    """Train with local steps; rank 0 is lost in its seventh step, a process joins, and all sync ten times then."""
    lost, every = Path(folder, "lost"), 3
    while rank >= first and not lost.exists():
        time.sleep(0.01)
    begin(rank, folder, first)
    members = fl.membership()
    torch.manual_seed(rank)
    model = nn.Linear(40, 8)
    sync = fl.Local(every=every, lr=0.7, momentum=0.9)
    optimizer: Any = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8", sync=sync)
    generator, made, ended = torch.Generator().manual_seed(rank), 0, None
    target = torch.randn(40, 8, generator=torch.Generator().manual_seed(99))
    losses = []
    while ended is None or members.step < ended:
        if rank == 0 and made == 7:
            checkpoint("lost")
        x = torch.randn(16, 40, generator=generator)
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        made += 1
        if members.size < first and rank == 1:
            lost.touch()
        if members.generation >= 2 and members.size == first and ended is None:
            ended = members.step + 10
    optimizer.synchronize()
    momenta = optimizer.reducer.policy.local.state_dict(optimizer.reducer.enrolment.names)["momentum"]
    return {
        "digest": digest(model),
        "finished": members.step,
        "momentum": {name: x.tolist() for name, x in momenta.items()},
        "losses": losses,
    }


def test_local_steps_go_on_between_those_who_are_left_and_who_come(tmp_path: Path) -> None:
    outcomes = outcomes_of(train_locally, 4, str(tmp_path), 3, signals={(0, "lost"): signal.SIGKILL}, backend=None)
    ends = check(outcomes, (0,))
    assert all(end["momentum"] == ends[0]["momentum"] for end in ends) and ends[0]["momentum"]
    assert ends[0]["losses"][-1] < ends[0]["losses"][0]


# ---- a job that is watched ------------------------------------------------------------------------------------------


LATE = re.compile(r"rank 1 is late: it is at \S*test_processes\.py:\d+; rank 0 waits")


def watched(rank: int, world: int, folder: str) -> tuple[list[str], tuple[int, int], float]:
    """Train until rank 0 is lost; then the last rank is late until that is told. Return what the watcher knows then."""
    os.environ["FUSIONLAYER_STATUS"] = f"{folder}/status.json"
    begin(rank, folder, world)
    watcher = fl.watch(patience=1.5)
    assert watcher is not None and watcher.place == (rank, world)
    members, told, end = fl.membership(), Path(folder, "told"), Path(folder, "end")

    def look() -> None:
        while not told.exists():
            if watcher.place == (0, world - 1) and any(map(LATE.match, watcher.lines)):
                told.touch()
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()
    model = nn.Linear(40, 8)
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8")
    while not end.exists() or members.step < int(end.read_text()):
        model(torch.ones(2, 40)).square().mean().backward()
        if rank == 0 and members.step == 5:
            checkpoint("lost")
        if members.size < world and fl.rank() == 1 and not end.exists():
            while not told.exists():
                time.sleep(0.05)
            end.with_name("draft").write_text(str(members.step + 3))
            end.with_name("draft").rename(end)
        optimizer.step()
        optimizer.zero_grad()
    found = watcher.lines, watcher.place, metrics.read()["ranks"]
    fl.shutdown()
    assert watcher.is_closed
    return found


def test_who_watches_an_elastic_job_goes_on_with_those_who_are_left(tmp_path: Path) -> None:
    signals = {(0, "lost"): signal.SIGKILL}
    outcomes = outcomes_of(watched, 3, str(tmp_path), signals=signals, backend=None)
    assert [o.kind for o in outcomes] == ["died", "returned", "returned"], outcomes
    for place, outcome in enumerate(outcomes[1:]):
        assert outcome.value[1:] == ((place, 2), 2.0)
    assert any(map(LATE.match, outcomes[1].value[0]))
    assert not (tmp_path / "status.json").exists(), "the job has ended well"


# ---- who does not fit -----------------------------------------------------------------------------------------------


def meet_another(rank: int, world: int, folder: str, codec: str) -> int:
    """Train until a process that has another codec has come and gone; return how many generations that took."""
    while rank == world - 1 and not Path(folder, "begun").exists():
        time.sleep(0.01)
    begin(rank, folder, world - 1)
    model = nn.Linear(40, 8)
    codec = codec if rank == world - 1 else "int8"
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec=codec)
    members = fl.membership()
    ended: int | None = None
    while ended is None or members.step < ended:
        model(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Path(folder, "begun").touch()
        if members.generation >= 2 and members.size == world - 1 and ended is None:
            ended = members.step + 2
    return members.generation


def test_who_comes_with_other_options_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = outcomes_of(meet_another, 3, str(tmp_path), "int4", backend=None)
    assert [o.kind for o in outcomes] == ["returned", "returned", "raised"], outcomes
    assert outcomes[2].error[0] == "ConfigError" and "other parameters, options or settings" in outcomes[2].error[1]


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(rank: int, world: int, folder: str) -> list[str]:
    found = []

    def told(call: Any) -> None:
        try:
            call()
        except (fl.ConfigError, fl.UsageError) as error:
            found.append(str(error))

    os.environ["FUSIONLAYER_JOIN"] = "nowhere"
    told(fl.init)
    told(lambda: fl.init(elastic=True))
    del os.environ["FUSIONLAYER_JOIN"]
    begin(rank, folder, world)
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    told(lambda: fl.DistributedOptimizer(sgd, model, sync=fl.Local.streaming()))
    told(lambda: fl.DistributedOptimizer(sgd, model, overlap_forward=model))
    told(lambda: fl.DistributedOptimizer(sgd, model, codec="auto"))
    told(lambda: fl.DistributedOptimizer(sgd, model, codec="int4", fallback="raw"))
    told(lambda: fl.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    optimizer = fl.DistributedOptimizer(sgd, model)
    told(lambda: fl.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)))
    told(lambda: optimizer.step(lambda: 0.0))
    told(lambda: optimizer.reconnect())
    told(lambda: fl.membership().share(model=3))
    store = dist.HashStore()
    told(lambda: dist.init_process_group("fusionlayer", store=store, rank=0, world_size=1))
    told(hvd.init)
    told(lambda: hvd.elastic.run(print)(None))
    return found


def test_what_cannot_lose_a_rank_is_refused_with_the_reason(tmp_path: Path) -> None:
    (found,) = run_ranks(refused, 1, str(tmp_path), backend=None)
    expected = [
        "FUSIONLAYER_JOIN=nowhere and no elastic=True",
        "FUSIONLAYER_JOIN=nowhere: no host:port; expected host:port of a member",
        "sync=Local(every=30,",
        "overlap_forward in an elastic job",
        "codec='auto' in an elastic job",
        "fallback in an elastic job",
        "ShardedOptimizer in a job that fusionlayer.init(elastic=True) has begun",
        "an elastic job has one DistributedOptimizer",
        "step(closure) in an elastic job",
        "reconnect() in an elastic job",
        "share(model=...): got an int",
        'a process group "fusionlayer" in a job that fusionlayer.init(elastic=True) has begun',
        "init() in a job that fusionlayer.init(elastic=True) has begun: hvd.elastic restarts workers",
        "hvd.elastic.run in a job that fusionlayer.init(elastic=True) has begun",
    ]
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found
