"""Pipelines whose stages send messages of a codec, under torch's schedules."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, PlanMismatch
from tests.harness import run_ranks
from tests.integrations.training import fill
from tests.ranks import on_processes
from tests.synthetic import gradient

pytestmark = pytest.mark.medium

WIDTH, BATCH, MICROBATCHES = 48, 8, 4
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}


def make_block(index: int) -> nn.Sequential:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
    fill(block, index + 1)
    return block


def data(step: int) -> tuple[Tensor, Tensor]:
    values = gradient(2 * BATCH * WIDTH, 5000 + step).view(2, BATCH, WIDTH)
    return values[0], values[1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_schedule(name: str, rank: int, world: int, **how: Any) -> tuple[Any, dict[int, nn.Module], list[Any]]:
    """Return a schedule, this rank's blocks by their place in the model, and its stages."""
    per_rank = 1 if name in SINGLE else 2
    places = [rank + world * i for i in range(per_rank)]
    blocks: dict[int, nn.Module] = {place: make_block(place) for place in places}
    make = fl.pipeline.PipelineStage if "codec" in how else PipelineStage
    stages: list[Any] = [
        make(block, place, per_rank * world, torch.device("cpu"), **how) for place, block in blocks.items()
    ]
    if name in SINGLE:
        return SINGLE[name](stages[0], MICROBATCHES, loss_fn=loss_of), blocks, stages
    return MULTI[name](stages, MICROBATCHES, loss_fn=loss_of), blocks, stages


def step(schedule: Any, stages: list[Any], number: int) -> Tensor | None:
    """Take one step; return the output, on the last rank."""
    x, y = data(number)
    inputs = [x] if any(stage.is_first for stage in stages) else []
    target = {"target": y} if any(stage.is_last for stage in stages) else {}
    output: Tensor | None = schedule.step(*inputs, **target)
    return output


def gradients(blocks: dict[int, nn.Module]) -> list[Tensor]:
    return [p.grad.clone() for block in blocks.values() for p in block.parameters() if p.grad is not None]


def distance(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest relative error of a tensor."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(mine, theirs, strict=True))


def hold_schedule(rank: int, world: int, name: str) -> None:
    schedule, blocks, stages = make_schedule(name, rank, world)
    output = step(schedule, stages, 0)
    exact = gradients(blocks)
    assert len(exact) == 4 * len(stages)
    bounds = {"raw": 0.0, "bf16": 0.02, "int8": 0.05, "int4": 0.6, "tahquant6": 0.15}
    chosen = [*bounds] if (name, world) == ("1f1b", 2) else ["raw", "int8"]
    sub = {codec: dist.new_group() for codec in chosen}
    for codec in chosen:
        tolerance = bounds[codec]
        schedule, blocks, stages = make_schedule(name, rank, world, codec=codec, group=sub[codec])
        mine = step(schedule, stages, 0)
        error = distance(gradients(blocks), exact)
        assert error <= tolerance, (codec, error)
        assert codec == "raw" or error > 0
        if output is not None:
            assert mine is not None and float((mine - output).norm()) <= tolerance * float(output.norm())
        # Each stage has sent its activations, but the last, and its gradients, but the first: one message each.
        form = fl.codecs.get(codec).bare.wire(BATCH // MICROBATCHES * WIDTH)
        for stage in stages:
            messages = 0 if codec == "raw" else MICROBATCHES * (2 - stage.is_first - stage.is_last)
            assert [message.numel() for message in stage._sent] == [form.capacity] * messages


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_schedules(name: str) -> None:
    run_ranks(hold_schedule, 2, name)


def test_more_stages() -> None:
    run_ranks(hold_schedule, 4, "1f1b")


RUNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lossy": {"codec": "int4"},
    "warm": {"codec": "int4", "warmup_steps": 4},
    "gradients": {"codec": "raw", "gradient_codec": "int4"},
    "tahquant": {
        "codec": "tahquant",
        "codec_options": {"tile": 32, "channels": 96},
        "gradient_codec": fl.codecs.get("tahquant6", channels=96),
    },
}


def train(rank: int, world: int, **how: Any) -> list[float]:
    """Return the losses of 8 steps, then those of the microbatches of an evaluation; the last rank knows them."""
    schedule, blocks, stages = make_schedule("1f1b", rank, world, **how)
    optimizer = torch.optim.SGD([p for block in blocks.values() for p in block.parameters()], lr=1.0)
    losses = []
    for number in range(8):
        optimizer.zero_grad()
        output = step(schedule, stages, number % 2)
        optimizer.step()
        if output is not None:
            losses.append(loss_of(output, data(number % 2)[1]).item())
    x, y = data(0)
    evaluated: list[Tensor] = []
    with torch.no_grad():
        schedule.eval(*([x] if rank == 0 else []), **({"target": y, "losses": evaluated} if stages[0].is_last else {}))
    return losses + [loss.item() for loss in evaluated]


def hold_training(rank: int, world: int) -> dict[str, list[float]]:
    return {name: train(rank, world, group=dist.new_group(), **how) for name, how in RUNS.items()}


def test_training() -> None:
    _, losses = run_ranks(hold_training, 2)
    exact, lossy, warm, gradients, tahquant = (losses[name] for name in RUNS)
    assert len(exact) == 8 + MICROBATCHES
    assert exact[7] < 0.9 * exact[1]
    for other in (lossy, warm, gradients, tahquant):
        assert all(abs(a - b) < 0.1 * b for a, b in zip(other, exact, strict=True))
    for other in (lossy, tahquant):
        assert other[0] != exact[0] and other[8] != exact[8]
    # Warm-up travels uncompressed.
    assert warm[:4] == exact[:4]
    assert warm[4] != exact[4] and warm[8] != exact[8]
    # Gradients have a codec of their own: they change what is learnt, and the first forward has not seen it.
    assert gradients[0] == exact[0] and gradients[2] != exact[2]


class Several(nn.Module):
    """A stage that passes on what no codec takes, and a tensor that is not contiguous."""

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        mask = rest[0] if rest else x[:, 0] > 0
        wide = rest[1] if rest else x.double()
        return (x.t().contiguous().t() if rest else x.contiguous()) * 2, mask, wide


@on_processes(3)
def test_what_no_codec_takes_travels_as_it_is(rank: int, world: int) -> None:
    x, _ = data(0)
    stage = fl.pipeline.PipelineStage(Several(), rank, world, torch.device("cpu"), codec="int8")
    schedule = ScheduleGPipe(stage, 2)
    with torch.no_grad():
        output = schedule.step(*([x] if rank == 0 else []))
    if rank == world - 1:
        assert output is not None
        doubled, mask, wide = output
        assert torch.equal(mask, x[:, 0] > 0) and torch.equal(wide, x.double())
        torch.testing.assert_close(doubled, x * 2**world, rtol=0.05, atol=0.05 * float(x.abs().max()) * 2**world)
        assert not torch.equal(doubled, x * 2**world)


@on_processes(2)
def test_what_is_not_finite_surfaces(rank: int, world: int) -> None:
    schedule, blocks, stages = make_schedule("1f1b", rank, world, codec="int8")
    if rank == 0:
        with torch.no_grad():
            next(iter(blocks.values())).get_parameter("2.bias")[0] = float("inf")
    output = step(schedule, stages, 0)
    assert output is None or not output.isfinite().any()
    assert all(grad.isnan().any() for grad in gradients(blocks))


@on_processes(2)
def test_stages_that_disagree_are_refused(rank: int, world: int) -> None:
    def make(group: Any = None, **how: Any) -> Any:
        return fl.pipeline.PipelineStage(make_block(rank), rank, world, torch.device("cpu"), group=group, **how)

    with pytest.raises(ConfigError, match="warmup_steps=-1; expected a number of steps"):
        make(warmup_steps=-1)
    with pytest.raises(ConfigError, match="unknown codec 'int7'"):
        make(codec="int7")
    kept = make(codec="int8")
    with pytest.raises(ConfigError, match="this stage has int.*bits=4.*other stages of this process int.*bits=8"):
        make(codec="int4")
    with pytest.raises(PlanMismatch, match="codecs or warm-up of pipeline stages differs over ranks"):
        make(dist.new_group(), codec="int8", warmup_steps=rank)
    del kept
    with pytest.raises(PlanMismatch, match="codecs or warm-up of pipeline stages differs over ranks"):
        make(codec="int8", warmup_steps=rank)


@on_processes(2)
def test_a_pipeline_with_another_codec_follows_one_that_is_gone(rank: int, world: int) -> None:
    """Pipelines of one process in one group, each with another codec; also again one from before."""
    found: dict[str, list[Tensor]] = {}
    for name in ("interleaved", "gpipe"):
        for codec in ("int8", "raw", "int4", "int8"):
            schedule, blocks, stages = make_schedule(name, rank, world, codec=codec)
            step(schedule, stages, 0)
            mine = gradients(blocks)
            assert all(map(torch.equal, mine, found.setdefault(name + codec, mine)))
            with pytest.raises(ConfigError, match="delete stages and schedule"):
                make_schedule(name, rank, world, codec="bf16")
            del schedule, blocks, stages
    assert not any(map(torch.equal, found["gpipeint8"], found["gpipeint4"]))
