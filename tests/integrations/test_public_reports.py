"""Jobs that users of other libraries reported as wrong: each gives the right values, or an error with the remedy."""

import copy
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.harness import run_ranks
from tests.integrations.training import averaged, fill, loss_of, make_batch, make_model, reference, train, weights
from tests.loops import looped
from tests.synthetic import gradient

WORLD = 2

checkpoint = inspect.unwrap(checkpoint_of_torch)
"""Without the seconds that its decorator's import of a compiler takes."""

Wrap = Callable[[Optimizer, nn.Module], Any]


def by_fl(optimizer: Optimizer, model: nn.Module) -> Any:
    return fl.DistributedOptimizer(optimizer, model)


def by_hvd(optimizer: Optimizer, model: nn.Module) -> Any:
    hvd.init()
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    return hvd.DistributedOptimizer(optimizer, [(name, p) for name, p in model.named_parameters() if p in owned])


def assert_equals(results: list[Tensor], expected: Tensor) -> None:
    assert all(torch.equal(results[0], other) for other in results)
    torch.testing.assert_close(results[0], expected, atol=1e-5, rtol=1e-5)


# ---- clipping, and gradients that no step uses ----------------------------------------------------------------------


def test_gradients_may_be_read_and_dropped_without_a_step() -> None:
    """https://github.com/horovod/horovod/issues/2420: the next step uses its own gradients alone.

    With Horovod's names ``zero_grad`` refuses what is still being reduced, and names ``synchronize``.
    """

    def body(rank: int, wrap: Wrap) -> Tensor:
        model = make_model()
        optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, 100 + step).backward()
            if wrap is by_hvd:
                with pytest.raises(fl.UsageError, match=r"before step\(\) or synchronize\(\)"):
                    optimizer.zero_grad()
                optimizer.synchronize()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return weights(model)

    expected = reference(WORLD, 3, lambda p: SGD(p, lr=0.1, momentum=0.9))
    for wrap in (by_fl, by_hvd):
        assert_equals(local.run(lambda rank, wrap=wrap: body(rank, wrap), WORLD), expected)  # type: ignore[misc]


# ---- what is done with the model ------------------------------------------------------------------------------------


@looped("wrap", [by_fl, by_hvd])
def test_an_epoch_may_end_before_all_passes_of_a_step(wrap: Wrap) -> None:
    """https://github.com/horovod/horovod/issues/2466: ``step`` takes fewer passes; without it an error names it."""

    def body(rank: int, steps_at_end: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            for step in range(3):
                loss_of(model, rank, step).backward()
                if step == 1 or steps_at_end and step == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return weights(model)

    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for steps in ((0, 1), (2,)):
            optimizer.zero_grad()
            for step in steps:
                for rank in range(WORLD):
                    (loss_of(model, rank, step) / WORLD).backward()
            optimizer.step()
    assert_equals(local.run(lambda rank: body(rank, True), WORLD), weights(model))
    with pytest.raises(fl.UsageError, match=r"computed more than 2 times before step\(\); call step\(\)"):
        local.run(lambda rank: body(rank, False), WORLD)


@looped("wrap", [by_fl, by_hvd])
def test_gradients_of_a_step_that_a_scaler_skips_may_be_cleared(wrap: Wrap) -> None:
    """https://github.com/horovod/horovod/issues/3160: ``zero_grad`` was refused, as nothing had awaited gradients."""

    def body(rank: int) -> Tensor:
        model, scaler = make_model(), GradScaler("cpu", init_scale=4.0)
        optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step) * (float("inf") if step == rank == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    model = make_model()
    expected = averaged(model, SGD(model.parameters(), lr=0.1, momentum=0.9), WORLD, (0, 2, 3))
    assert_equals(local.run(body, WORLD), expected)


class Lookahead(Optimizer):
    """A user's own optimizer around another one, which leaves out torch's constructor."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            p.copy_(slow.lerp_(p, 0.5))


@looped("wrap", [by_fl, by_hvd])
def test_an_optimizer_of_a_user_may_be_around_another_one(wrap: Wrap) -> None:
    """https://github.com/horovod/horovod/issues/1354: such an optimizer did not find its parameter groups."""

    def make(parameters: Any) -> Optimizer:
        return Lookahead(SGD(parameters, lr=0.1, momentum=0.9))

    def body(rank: int) -> Tensor:
        model = make_model()
        train(model, wrap(make(model.parameters()), model), rank, range(3))
        return weights(model)

    assert_equals(local.run(body, WORLD), reference(WORLD, 3, make))


# ---- several optimizers ---------------------------------------------------------------------------------------------


def alternate(model: nn.Module, first: Any, second: Any, backward: Callable[[int], None], drop: bool) -> None:
    """Update the halves of the model in turn; each backward makes gradients of both."""
    for step in range(3):
        for i, (mine, other) in enumerate([(first, second), (second, first)]):
            mine.zero_grad()
            backward(2 * step + i)
            mine.step()
            if drop:
                other.synchronize()
            other.zero_grad()


def halves(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    layers: Any = model
    return SGD(layers[0].parameters(), lr=0.1, momentum=0.9), Adam(layers[2].parameters(), lr=0.01)


@looped("wrap", [by_fl, by_hvd])
def test_two_optimizers_of_one_model_take_turns(wrap: Wrap) -> None:
    """https://github.com/horovod/horovod/issues/1417: each half moves by its own averages.

    With Horovod's names the gradients of the half that rests are dropped after ``synchronize``.
    """

    def body(rank: int) -> Tensor:
        model = make_model()
        first, second = (wrap(each, model) for each in halves(model))
        alternate(model, first, second, lambda step: loss_of(model, rank, step).backward(), wrap is by_hvd)
        return weights(model)

    model = make_model()

    def backward(step: int) -> None:
        for rank in range(WORLD):
            (loss_of(model, rank, step) / WORLD).backward()

    alternate(model, *halves(model), backward, False)
    assert_equals(local.run(body, WORLD), weights(model))


def play(make: Callable[[Optimizer, nn.Module], Any], ranks: Iterable[int], share: float) -> Tensor:
    """Train a generator and a discriminator, whose parameters have the same names."""
    generator, judge = nn.Sequential(nn.Linear(24, 24)), nn.Sequential(nn.Linear(24, 1))
    fill(generator, 1)
    fill(judge, 2)
    of_generator = make(Adam(generator.parameters(), lr=0.01), generator)
    of_judge = make(Adam(judge.parameters(), lr=0.01), judge)
    for step in range(3):
        of_judge.zero_grad()
        for rank in ranks:
            x, _ = make_batch(rank, step)
            fake = generator(x).detach()
            (share * ((judge(x) - 1) ** 2 + judge(fake) ** 2).mean()).backward()
        of_judge.step()
        of_generator.zero_grad()
        for rank in ranks:
            x, _ = make_batch(rank, step)
            (share * ((judge(generator(x)) - 1) ** 2).mean()).backward()
        of_generator.step()
        if make is by_hvd:
            of_judge.synchronize()
    return torch.cat([weights(generator), weights(judge)])


@looped("wrap", [by_fl, by_hvd])
def test_a_generator_and_a_discriminator_may_have_the_same_names(wrap: Wrap) -> None:
    """https://github.com/horovod/horovod/issues/2559: each network gets the average of its own gradients."""
    expected = play(lambda optimizer, model: optimizer, range(WORLD), 1 / WORLD)
    assert_equals(local.run(lambda rank: play(wrap, [rank], 1.0), WORLD), expected)


# ---- states that one rank has loaded --------------------------------------------------------------------------------

OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-5),
    lambda p: Adam(p, lr=0.1),
    lambda p: Adagrad(p, lr=0.1),
]


@looped("make", OPTIMIZERS)
@looped("wrap", [by_fl, by_hvd])
@looped("wrapped_first", [True, False])
def test_all_ranks_get_the_options_and_the_state_that_rank_0_has_loaded(
    make: Callable[[Any], Optimizer], wrap: Wrap, wrapped_first: bool
) -> None:
    """Training continues on all ranks as it would on rank 0.

    https://github.com/horovod/horovod/issues/526: the learning rate is the saved one on every rank.
    https://github.com/horovod/horovod/issues/392: Adam's counts, which are no momenta, are broadcast as well.
    https://github.com/horovod/horovod/issues/1774: rank 0 does not diverge, though it alone has loaded a state.
    https://github.com/horovod/horovod/issues/1725: a frozen parameter has no state, and needs none.
    """

    def frozen() -> Any:
        model = make_model()
        model[0].bias.requires_grad_(False)
        return model

    before = frozen()
    optimizer = make(before.parameters())
    train(before, optimizer, 0, range(100, 103))
    optimizer.param_groups[0]["lr"] = 0.01
    saved = copy.deepcopy({"model": before.state_dict(), "optimizer": optimizer.state_dict()})

    def body(rank: int) -> Tensor:
        model = frozen()
        optimizer = make(model.parameters())
        if wrapped_first:
            optimizer = wrap(optimizer, model)
        if rank == 0:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        if wrap is by_hvd:
            hvd.init()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        else:
            fl.broadcast_parameters(model.state_dict())
            fl.broadcast_optimizer_state(optimizer)
        if not wrapped_first:
            optimizer = wrap(optimizer, model)
        assert optimizer.param_groups[0]["lr"] == 0.01
        train(model, optimizer, rank, range(3))
        return weights(model)

    expected = averaged(before, optimizer, WORLD, range(3))
    assert_equals(local.run(body, WORLD), expected)


# ---- DDP's hook: one job of two processes ---------------------------------------------------------------------------


class Layers(nn.Module):
    """Two layers; ``run`` says what is done with them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.run: Callable[..., Tensor] = run
        fill(self)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        return self.run(self, x, *how)


def batch(rank: int, step: int) -> Tensor:
    return gradient(96, 9000 + 10 * step + rank).view(4, 24)


def one_layer(net: Any, x: Tensor, first: bool = True) -> Any:
    return net.first(x) if first else net.second(x)


def recomputed(net: Any, x: Tensor) -> Any:
    hidden = checkpoint(net.first, x, use_reentrant=False).relu()
    return x + checkpoint(net.second, hidden, use_reentrant=False)


def summed(run: Callable[..., Tensor], calls: list[tuple[Any, ...]]) -> list[Tensor | None]:
    """Return what one process computes for all ranks."""
    net = Layers(run)
    for step, how in enumerate(calls):
        for rank in range(WORLD):
            (net(batch(rank, step), *how) ** 2).mean().div(WORLD).backward()
    return [p.grad for p in net.parameters()]


def assert_gradients(model: nn.Module, expected: list[Tensor | None]) -> None:
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, atol=1e-6, rtol=1e-5)


def unused_by_all(rank: int, folder: str) -> None:
    """https://github.com/pytorch/pytorch/issues/128949: what is used has the average, what no rank uses rests.

    That is so with an optimizer of ours, and with the hook if DDP finds unused parameters. If it does not, the hook
    refuses to save its state and names the parameters: gradients and weights are a rank's own.
    """
    net = Layers(one_layer)
    optimizer = fl.DistributedOptimizer(SGD(net.parameters(), lr=1.0), net)
    (net(batch(rank, 0)) ** 2).mean().backward()
    optimizer.step()
    assert_gradients(net, summed(one_layer, [(True,)]))
    optimizer.close()
    model = DistributedDataParallel(Layers(one_layer), find_unused_parameters=True)
    hook = fl.ddp.register(model, codec="raw")
    (model(batch(rank, 0)) ** 2).mean().backward()
    assert_gradients(model, summed(one_layer, [(True,)]))
    hook.close()
    model = DistributedDataParallel(Layers(one_layer))
    hook = fl.ddp.register(model, codec="raw")
    (model(batch(rank, 0)) ** 2).mean().backward()
    for call in (hook.state_dict, hook.close):
        with pytest.raises(fl.UsageError, match="no gradient of 'second.weight', 'second.bias'.*find_unused_param"):
            call()
    hook.close()


def used_before_the_last_pass(rank: int, folder: str) -> None:
    """https://github.com/pytorch/pytorch/issues/69031: each layer has the average of both passes."""
    model = DistributedDataParallel(Layers(one_layer), find_unused_parameters=True)
    hook = fl.ddp.register(model, codec="raw")
    with model.no_sync():
        (model(batch(rank, 0), True) ** 2).mean().backward()
    (model(batch(rank, 1), False) ** 2).mean().backward()
    assert_gradients(model, summed(one_layer, [(True,), (False,)]))
    hook.close()


def accumulated_on_a_static_graph(rank: int, folder: str) -> None:
    """https://github.com/huggingface/accelerate/issues/3679: gradients of all passes are averaged in every step.

    The first pass of all must not be within ``no_sync``: an error says so, where torch has an internal one.
    """
    model = DistributedDataParallel(Layers(recomputed), static_graph=True)
    hook = fl.ddp.register(model, codec="raw")
    with model.no_sync(), pytest.raises(fl.UsageError, match=r"first backward.*without no_sync\(\)"):
        model(batch(rank, 0))
    (model(batch(rank, 0)) ** 2).mean().backward()
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            (model(batch(rank, 0)) ** 2).mean().backward()
        (model(batch(rank, 1)) ** 2).mean().backward()
        assert_gradients(model, summed(recomputed, [(), ()]))
    hook.close()


def in_turn(net: Any, x: Tensor) -> Any:
    return net.second(net.first(x).tanh())


def slope(net: Any, x: Tensor) -> Any:
    """Return the gradient of what checkpointed layers compute, which does not depend on the last bias."""
    x.requires_grad_()
    energy = checkpoint(net.second, checkpoint(net.first, x, use_reentrant=False).tanh(), use_reentrant=False)
    return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def averages_of(run: Callable[..., Tensor], loss: Callable[[Any, int], Tensor]) -> list[Tensor | None]:
    """Return the gradients of the mean loss of all ranks."""
    net = Layers(run)
    for rank in range(WORLD):
        loss(net, rank).div(WORLD).backward()
    return [p.grad for p in net.parameters()]


def penalized(rank: int, folder: str) -> None:
    """https://github.com/pytorch/pytorch/issues/47562: ranks diverged, as a penalty leaves out the last bias.

    With an optimizer of ours the others are averages; the hook refuses to save its state, and names the bias.
    """

    def penalty(model: Any, rank: int) -> Tensor:
        x = batch(rank, 0).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean()

    net = Layers(in_turn)
    optimizer = fl.DistributedOptimizer(SGD(net.parameters(), lr=1.0), net)
    penalty(net, rank).backward()
    assert_gradients(net, averages_of(in_turn, penalty))
    optimizer.close()
    for finds, remedy in ((False, "find_unused_parameters=True"), (True, "depend on all outputs")):
        model = DistributedDataParallel(Layers(in_turn), find_unused_parameters=finds)
        hook = fl.ddp.register(model, codec="raw")
        penalty(model, rank).backward()
        with pytest.raises(fl.UsageError, match=f"no gradient of 'second.bias'.*{remedy}"):
            hook.close()


def differentiated(rank: int, folder: str) -> None:
    """https://github.com/pytorch/pytorch/issues/63812: ``create_graph=True``, which DDP refuses to this day.

    https://github.com/pytorch/pytorch/issues/24005: gradients of checkpointed layers within ``forward``.
    """

    def loss(model: Any, rank: int) -> Tensor:
        return (model(batch(rank, 0)) ** 2).mean()

    for run, how in ((in_turn, {"create_graph": True}), (slope, {})):
        expected = averages_of(run, loss)
        net = Layers(run)
        optimizer = fl.DistributedOptimizer(SGD(net.parameters(), lr=1.0), net)
        loss(net, rank).backward(**how)
        assert_gradients(net, expected)
        optimizer.close()
    model = DistributedDataParallel(Layers(slope), find_unused_parameters=True)
    hook = fl.ddp.register(model, codec="raw")
    loss(model, rank).backward()
    assert_gradients(model, expected)
    hook.close()


def with_ddp(rank: int, world: int, folder: str) -> None:
    jobs = (unused_by_all, used_before_the_last_pass, accumulated_on_a_static_graph, penalized, differentiated)
    for job in jobs:
        print(job.__name__)
        job(rank, folder)


@pytest.mark.medium
def test_jobs_with_the_hook(tmp_path: Path) -> None:
    run_ranks(with_ddp, WORLD, str(tmp_path))


# ---- the backend: one job of two processes --------------------------------------------------------------------------


def column(x: Tensor) -> Tensor:
    """Return a column with the values of ``x``, whose elements are not neighbours in memory."""
    wide = torch.full((x.numel(), 2), -7, dtype=x.dtype)
    wide[:, 0] = x
    return wide[:, 0]


def scattered(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/24836: each rank gets the elements of the view, not those between."""
    out = torch.zeros(3)
    dist.scatter(out, [torch.linspace(0, 5, 6)[::2] + 10 * i for i in range(WORLD)] if rank == 0 else None)
    assert out.tolist() == [10 * rank + i for i in (0, 2, 4)]


def strided_calls(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/192920: broadcast, reduce and scatter keep to the view."""
    x = column(torch.arange(4.0) + 10 * rank)
    dist.broadcast(x, 1)
    assert x.tolist() == [10, 11, 12, 13]
    x = column(torch.arange(4.0) + 10 * rank)
    dist.reduce(x, 0)
    assert rank or x.tolist() == [10, 12, 14, 16]
    x = column(torch.zeros(4))
    dist.scatter(x, [column(torch.arange(4.0) + 10 * i) for i in range(WORLD)] if rank == 1 else None, 1)
    assert x.tolist() == [10 * rank + i for i in range(4)]


def sent_transposed(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/62283: the receiver has the sender's matrix, whatever the strides."""
    matrix = torch.arange(16, dtype=torch.int32).view(4, 4)
    if rank == 0:
        dist.send(matrix.T, 1, tag=128)
    else:
        got = torch.zeros(4, 4, dtype=torch.int32)
        dist.recv(got, 0, tag=128)
        assert torch.equal(got, matrix.T)


def gathered(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/74809: the elements of a transposed matrix arrive in their places."""
    matrix = torch.arange(10.0).view(2, 5).T + 100 * rank
    outs = [torch.zeros(5, 2) for _ in range(WORLD)]
    dist.gather(matrix, outs if rank == 1 else None, 1)
    assert rank == 0 or all(torch.equal(out, torch.arange(10.0).view(2, 5).T + 100 * i) for i, out in enumerate(outs))


def gathered_with_a_gradient(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/73515: the gradient of a sum, which is a view, is reduced as well."""
    x = torch.full((3,), float(rank), requires_grad=True)
    every = all_gather(x)
    (torch.stack(every) * torch.arange(1.0, WORLD + 1).view(-1, 1)).sum().backward()
    assert [each.tolist() for each in every] == [[i] * 3 for i in range(WORLD)]
    assert x.grad is not None and x.grad.tolist() == [WORLD * (rank + 1)] * 3


def of_types(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/89197: bools, which gloo refused, are gathered and broadcast.

    https://github.com/pytorch/pytorch/issues/84525: outputs of another type, in which garbage arrived, are refused.
    """
    mine = torch.tensor([True, rank == 1])
    every = [torch.zeros(2, dtype=torch.bool) for _ in range(WORLD)]
    dist.all_gather(every, mine)
    assert [each.tolist() for each in every] == [[True, False], [True, True]]
    dist.broadcast(mine, 1)
    assert mine.tolist() == [True, True]
    with pytest.raises((TypeError, ValueError), match="same type|identical type|dtype"):
        dist.all_gather([torch.zeros(3) for _ in range(WORLD)], torch.ones(3, dtype=torch.float16))


def in_changing_groups(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/145376: a group of all ranks follows a split of some.

    https://github.com/pytorch/pytorch/issues/25390: each rank makes only its own groups, which change.
    """
    world = dist.group.WORLD
    assert world is not None
    world.split_group([0])
    for ranks in ([0, 1], [rank], [1, 0]):
        group = dist.new_group(ranks, use_local_synchronization=len(ranks) == 1)
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3.0 if len(ranks) == 2 else rank + 1] * 3


def compiled(rank: int) -> None:
    """DDP broadcasts within the second compiled forward, when it lays its buckets out again."""
    model: Any = torch.compile(DistributedDataParallel(Layers(in_turn)), backend="eager")
    for step in range(2):
        (model(batch(rank, step)) ** 2).mean().backward()


def with_the_backend(rank: int, world: int, folder: str) -> None:
    """Also https://github.com/pytorch/pytorch/issues/55967: a program may begin again with the same store."""
    store = dist.FileStore(f"{folder}/store", world)
    for policy in (None, {"min_bytes": 0, "rules": [{"codec": "zip"}]}):
        dist.init_process_group("fusionlayer", store=store, rank=rank, world_size=world, pg_options=policy)
        jobs = (scattered, strided_calls, sent_transposed, gathered, gathered_with_a_gradient)
        for job in (*jobs, of_types, in_changing_groups, compiled):
            print(job.__name__, policy)
            job(rank)
        dist.destroy_process_group()


@pytest.mark.medium
def test_jobs_with_the_backend(tmp_path: Path) -> None:
    run_ranks(with_the_backend, WORLD, str(tmp_path), backend=None)
