"""What survivors see when a rank dies, stops, raises, disagrees or receives damaged bytes: named errors, never a hang.

Nothing here asserts a time: what hangs is ended by the harness, which fails the test.
"""

import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusionlayer as fl
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.integrations.test_optimizer_results import plan_of
from tests.integrations.training import loss_of, make_model, train, weights
from tests.ranks import on_processes
from tests.tiers import exhaustive, tiered

pytestmark = pytest.mark.medium

TIMEOUT = "8"


def join(rank: int, world: int, folder: str, **settings: str) -> None:
    """Join a job whose processes find each other in ``folder``."""
    os.environ.update(PMI_RANK=str(rank), PMI_SIZE=str(world), PMIX_NAMESPACE="test", TMPDIR=folder, **settings)
    os.environ["FUSIONLAYER_TIMEOUT"] = TIMEOUT
    fl.init()


def wrap(model: nn.Module, part: nn.Module | None = None, **options: Any) -> Any:
    return fl.DistributedOptimizer(SGD((part or model).parameters(), lr=0.1), model.named_parameters(), **options)


def described(error: fl.TransportError) -> dict[str, Any]:
    printed = "".join(traceback.format_exception(error))
    assert printed.count("Traceback (most recent call last)") == 1, printed
    return {
        "text": str(error),
        "ranks": error.ranks,
        "bucket": error.bucket,
        "tensors": error.tensors,
        "sequence": error.sequence,
    }


def leave_early(rank: int, world: int, folder: str) -> list[str]:
    """Rank 0 makes two steps, the others four. Return the errors of the others."""
    join(rank, world, folder)
    found = []
    for kind in ("optimizer", "local steps", "hook", "sharded"):
        model: nn.Module = make_model()
        optimizer: Any = SGD(model.parameters(), lr=0.1)
        close = fl.shutdown
        if kind == "hook":
            model = DistributedDataParallel(model)
            close = fl.ddp.register(model, "int8").close
        elif kind == "sharded":
            optimizer = fl.ShardedOptimizer(model.parameters(), SGD, lr=0.1)
        else:
            optimizer = wrap(model, sync=fl.Local.averaging(every=2) if kind == "local steps" else None)
            close = optimizer.close
        train(model, optimizer, rank, range(2))
        if rank == 0:
            close()
        else:
            with pytest.raises(fl.TransportError) as error:
                train(model, optimizer, rank, range(2, 4))
            assert 0 in error.value.ranks
            found.append(str(error.value))
    return found


def test_the_others_are_told_of_a_rank_that_left_its_loop_earlier(tmp_path: Path) -> None:
    """As https://github.com/deepspeedai/DeepSpeed/issues/2223, which hung: ranks have other numbers of batches."""
    _, *others = run_ranks(leave_early, 2, str(tmp_path))
    text = (
        r"rank 0 closed its transport after collective \d+; it left its loop earlier or failed: .* equally many steps"
    )
    for found in others:
        assert len(found) == 4 and all(re.search(text, each) for each in found), found


def lose_a_peer(rank: int, world: int, folder: str, how: str) -> list[dict[str, Any]]:
    """Train; then rank 1 is lost in the middle of a backward. Return the survivor's errors of optimizer and DDP."""
    join(rank, world, folder)
    model = make_model()
    optimizer = wrap(model, codec="int8", planner="wfbp")
    ddp = DistributedDataParallel(make_model())
    hook = fl.ddp.register(ddp, "int8")
    sharded_model = make_model()
    sharded = fl.ShardedOptimizer(sharded_model.parameters(), SGD, lr=0.1)
    train(model, optimizer, rank, range(2))
    for step in range(2):
        loss_of(ddp, rank, step).backward()

    def in_backward(gradient: Tensor) -> None:
        checkpoint("in backward")
        if how == "raise" and rank == 1:
            raise ValueError("a mistake of the user's")

    model[0].weight.register_hook(in_backward)  # the first layer: the buckets of the last one are on their way by then
    found = []
    with pytest.raises(fl.TransportError) as error:
        for step in range(2, 4):
            train(model, optimizer, rank, [step])
    found.append(described(error.value))
    with pytest.raises(fl.TransportError) as error:
        loss_of(ddp, rank, 3).backward()
    found.append(described(error.value))

    # From now on everything raises at once, the error that says why.
    optimizer.zero_grad()
    with pytest.raises(fl.TransportError):
        train(sharded_model, sharded, rank, [0])
    states = (optimizer.state_dict, hook.state_dict, sharded.state_dict)  # they would be of weights that are worthless
    for again in (lambda: loss_of(model, rank, 4).backward(), optimizer.step, optimizer.synchronize, *states):
        with pytest.raises(fl.TransportError, match="rank 1"):
            again()
    with pytest.raises((fl.TransportError, RuntimeError)):
        loss_of(ddp, rank, 4).backward()

    # A survivor that ends while the other still looks for its peers would be a second one that is lost.
    (Path(folder) / f"done {rank}").touch()
    while not all((Path(folder) / f"done {survivor}").exists() for survivor in (0, 2)):
        time.sleep(0.05)
    return found


def lose_a_peer_between_syncs(rank: int, world: int, folder: str) -> tuple[dict[str, Any], bool]:
    """Take local steps; rank 1 is lost between two syncs. Return the survivor's error, and whether weights stayed."""
    join(rank, world, folder)
    model = make_model()
    optimizer = wrap(model, codec="int8", sync=fl.Local.averaging(every=4))
    train(model, optimizer, rank, range(6))
    checkpoint("between syncs")
    train(model, optimizer, rank, [6])  # nobody is missed yet
    optimizer.zero_grad()
    loss_of(model, rank, 7).backward()
    own = torch.cat([(parameter - 0.1 * parameter.grad).detach().reshape(-1) for parameter in model.parameters()])
    with pytest.raises(fl.TransportError) as error:
        optimizer.step()
    for again in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
        with pytest.raises(fl.TransportError, match="rank 1"):
            again()
    return described(error.value), torch.allclose(own, weights(model))


@exhaustive(guarded_by="tests/integrations/test_failures.py::test_survivors_of_a_lost_rank_are_told_which")
def test_a_rank_that_is_lost_between_two_syncs_is_named_at_the_next(tmp_path: Path) -> None:
    outcomes = outcomes_of(
        lose_a_peer_between_syncs, 2, str(tmp_path), backend=None, signals={(1, "between syncs"): signal.SIGKILL}
    )
    assert outcomes[1].kind == "died", outcomes[1].trace
    assert outcomes[0].kind == "returned", outcomes[0].trace or outcomes[0].kind
    error, kept = outcomes[0].value
    assert error["ranks"] == (1,), error
    assert kept, "a sync that fails leaves the rank's own parameters"


@pytest.mark.parametrize("how", tiered(["kill", "stop", "raise"], lambda how: how != "stop"))
def test_survivors_of_a_lost_rank_are_told_which(how: str, tmp_path: Path) -> None:
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    lost, kept = 1, (0, 2)
    outcomes = outcomes_of(
        lose_a_peer,
        3,
        str(tmp_path),
        how,
        backend=None,
        signals={(lost, "in backward"): signals[how]} if how in signals else {},
    )
    ends = {"kill": "died", "stop": "hung", "raise": "raised"}
    assert outcomes[lost].kind == ends[how], outcomes[lost].trace
    if how == "raise":
        assert outcomes[lost].error == ("ValueError", "a mistake of the user's")
    for survivor in kept:
        assert outcomes[survivor].kind == "returned", outcomes[survivor].trace or outcomes[survivor].kind
        of_optimizer, of_ddp = outcomes[survivor].value
        for error in (of_optimizer, of_ddp):
            assert error["ranks"] == (lost,), error
            assert f"rank {lost}" in error["text"]
            assert error["sequence"] > 0
        (tensor,) = of_optimizer["tensors"]  # whichever was on its way
        assert tensor in ("0.weight", "0.bias", "2.weight", "2.bias")
        assert f"step 2, bucket {of_optimizer['bucket']} ({tensor})" in of_optimizer["text"]
        assert of_ddp["bucket"] == 0 and set(of_ddp["tensors"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@on_processes(3)
def test_ranks_that_disagree_are_told_before_anything_is_sent(rank: int, world: int) -> None:
    os.environ["FUSIONLAYER_TIMEOUT"] = "15"
    odd = rank == 1
    base = {"codec": "int4"}
    for change in [
        {"codec": "int8"},
        {"codec": "int4", "rounding": "stochastic"},
        {"codec": "int4", "group_size": 64},
        {"codec": "raw"},
        {"algorithm": "one_shot"},
        {"planner": "wfbp"},
        {"plan": plan_of(world, "int4", bits=4)},
        {"op": fl.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"error_feedback": False},
    ]:
        model = make_model()
        optimizer = wrap(model, **{**base, **(change if odd else {})})
        assert_mismatch(optimizer, model, rank)
    plan, other = plan_of(world, "int8"), plan_of(world, "int8", hadamard=True)
    model = make_model()
    assert_mismatch(wrap(model, plan=other if odd else plan), model, rank)

    short, half, other = make_model(), make_model(torch.bfloat16), nn.Sequential(nn.Identity(), *make_model())
    short[2] = nn.Linear(40, 5, bias=False)
    for model, first in [
        (short, "rank 0 has '2.bias' (5,) float32, rank 1 has no more"),
        (half, "rank 0 has '0.weight' (40, 24) float32, rank 1 has '0.weight' (40, 24) bfloat16"),
        (other, "rank 0 has '0.weight' (40, 24) float32, rank 1 has '1.weight' (40, 24) float32"),
    ]:
        with pytest.raises(fl.PlanMismatch, match="differ over ranks") as error:
            wrap(model if odd else make_model())
        assert error.value.ranks == (1,) and first in str(error.value)
    for option, first in [({"check_replicas": 9}, "check_replicas=9"), ({"broadcast": False}, "broadcast=False")]:
        with pytest.raises(fl.PlanMismatch, match=f"rank 1 has {first};"):
            wrap(make_model(), **(option if odd else {}))

    model = make_model()
    model[0].requires_grad_(False)
    optimizer = wrap(model, codec="int8")
    train(model, optimizer, rank, range(2))
    if odd:
        model[0].weight.requires_grad_(True)
    before = weights(model)
    with pytest.raises(fl.TransportError, match=r"rank 1 (is )?in an agreement.*\('0.weight' now require gradients\)"):
        train(model, optimizer, rank, [2])
    assert torch.equal(weights(model), before)

    model = make_model()
    optimizer = wrap(model, model[2])
    train(model, optimizer, rank, range(2))  # and those who agree train on
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, rank, range(2))
    mine = weights(model)
    dist.broadcast(mine, 0)
    assert torch.equal(mine, weights(model))


def assert_mismatch(optimizer: Any, model: nn.Module, rank: int) -> None:
    # Ranks compare while backward goes on, which has the error where they were done before its last bucket.
    with pytest.raises(fl.PlanMismatch, match="differs over ranks") as error:
        loss_of(model, rank, 0).backward()
        optimizer.step()
    assert error.value.ranks == (1,)
    for again in (lambda: loss_of(model, rank, 1).backward(), optimizer.step):
        with pytest.raises(fl.PlanMismatch, match="differs over ranks"):
            again()
