"""A sharded optimizer: what an unsharded one does when nothing is compressed, and what compression may change."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.collectives import halves
from fusionlayer.sharded.sharded import ShardedOptimizer
from fusionlayer.training.weights import Weights
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

SDP4BIT = {"weights": "sdp4bit"}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model that begins with the same weights each time; 4,805 of them, in tensors of odd sizes."""
    model = nn.Sequential(nn.Linear(21, 61), nn.Tanh(), nn.Linear(61, 53), nn.Tanh(), nn.Linear(53, 4)).to(dtype)
    for i, p in enumerate(model.parameters()):
        p.data.copy_(gradient(p.numel(), i, dtype).view_as(p))
    return model


def give_gradients(model: nn.Module, rank: int, step: int) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = gradient(p.numel(), 1000 * step + 100 * rank + i + 7, p.dtype).view_as(p)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    transport: Transport, steps: int, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[ShardedOptimizer, nn.Module]:
    model = make_model(dtype)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, group=transport, **options)
    for step in range(steps):
        give_gradients(model, transport.rank, step)
        optimizer.step()
    return optimizer, model


@on_threads(3)
def test_padding_stays_zero(transport: Transport) -> None:
    """A rotation spreads gradients into the padding of the last part; as weights they would widen its blocks."""
    optimizer, _ = train(transport, 2, {"weights": "qwd", "gradients": "tlq_hs"})
    (part,) = optimizer._parts
    filled = min(max(0, len(flat(make_model())) - transport.rank * len(part.main)), len(part.main))
    assert (filled < len(part.main)) is (transport.rank == 2)
    assert part.main[:filled].count_nonzero() == filled and not part.main[filled:].any()


@looped("world", [1, 2, 5])
@looped(
    "make",
    [
        lambda params, make=torch.optim.AdamW: (params, make, {"lr": 1e-2}),
        lambda params, make=torch.optim.SGD: (params, make, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 1e-2}),
    ],
    ids=["AdamW", "SGD"],
)
def test_uncompressed_it_does_what_the_optimizer_does(make: Callable[[Any], Any], world: int) -> None:
    plain = make_model()
    params, kind, options = make(plain.parameters())
    reference = kind(params, **options)
    for step in range(5):
        means = [torch.zeros_like(p) for p in plain.parameters()]
        for rank in range(world):
            give_gradients(plain, rank, step)
            for mean, p in zip(means, plain.parameters(), strict=True):
                assert p.grad is not None
                mean += p.grad * (1 / world)
        for mean, p in zip(means, plain.parameters(), strict=True):
            p.grad = mean
        reference.step()

    def body(transport: Transport) -> Tensor:
        model = make_model()
        optimizer = ShardedOptimizer(model.parameters(), kind, group=transport, **options)
        for step in range(5):
            give_gradients(model, transport.rank, step)
            optimizer.step()
        return flat(model)

    for got in over_threads(world, body):
        torch.testing.assert_close(got, flat(plain), rtol=1e-5, atol=1e-6)


@looped("dtype", [torch.float32, torch.bfloat16])
def test_changes_of_weights_lose_no_bit(dtype: torch.dtype) -> None:
    """Step by step the weights of a run that sends them whole, by fewer bytes in bf16."""

    def body(transport: Transport, weights: str) -> tuple[list[Tensor], int]:
        optimizer, model = train(transport, 0, {"weights": weights}, dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
        trace, before = [], transport.bytes_sent
        for step in range(10):
            give_gradients(model, transport.rank, step)
            optimizer.step()
            trace.append(flat(model).clone())
        return trace, transport.bytes_sent - before

    raw, delta = (over_threads(3, lambda transport, w=w: body(transport, w)) for w in ("raw", "delta"))
    for (expected, more), (got, less) in zip(raw, delta, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(expected, got, strict=True))
        assert less < (0.8 if dtype is torch.bfloat16 else 1) * more, (less, more)


@looped("dtype, world, per_node", [(torch.float32, 4, 2), (torch.bfloat16, 8, 4), (torch.bfloat16, 4, 4)])
def test_copies_stay_equal_and_near_the_weights(dtype: torch.dtype, world: int, per_node: int) -> None:
    """40 steps of SDP4Bit: the same bits on every rank, and off by no more than a step of what quantises a change."""

    def body(transport: Transport) -> tuple[Tensor, bool]:
        small = []
        optimizer, model = train(transport, 0, SDP4BIT, dtype)
        (part,) = optimizer._parts
        for step in range(40):
            give_gradients(model, transport.rank, step)
            before = part._own.float().clone()
            optimizer.step()
            main = part.main.detach()
            drift, change = (float((main - copies).abs().max()) for copies in (part._own, before))
            rounding = 1.01 * float(main.abs().max()) * torch.finfo(dtype).eps
            small.append(drift <= change / 14 + rounding)  # codes are change / 7 apart
        return flat(model), all(small)

    results = over_threads(world, body, ranks_per_node=per_node)
    assert not torch.equal(results[0][0], flat(make_model(dtype)))
    for weights, small in results:
        assert torch.equal(weights.view(torch.uint8), results[0][0].view(torch.uint8)) and small


@looped("gradients", ["raw", "zip", "int8", "tlq"])
def test_gradients_of_bf16_are_averaged_in_f32(gradients: str) -> None:
    """A sum of few of them needs more bits than bf16 has. The values are such that messages lose nothing of them."""

    def body(transport: Transport) -> Tensor:
        w = nn.Parameter(torch.ones(1536, dtype=torch.bfloat16))
        optimizer = fl.ShardedOptimizer([w], torch.optim.SGD, gradients=gradients, group=transport, lr=0.1)
        w.grad = torch.full((1536,), 127 / 128 * 2.0**transport.rank, dtype=torch.bfloat16)
        optimizer.step()
        (part,) = optimizer._parts
        grad = part.main.grad
        assert grad is not None and grad.dtype is torch.float32
        return grad[: part._filled].clone()

    exact = torch.tensor(127 / 128 * (1 + 2 + 4) / 3)
    for got in over_threads(3, body):
        assert (got - exact).abs().max() < 2.0**-20


def test_differences_lose_orders_less_than_weights() -> None:
    """The error of what ranks compute with, relative to the weights (SDP4Bit, figure 4)."""

    def body(transport: Transport) -> list[float]:
        errors = []
        for weights in ("qw", "qwd"):
            optimizer, _ = train(transport, 20, {"weights": weights})
            (part,) = optimizer._parts
            main = part.main.detach()
            errors.append(float((part._own - main).square().sum() / main.square().sum()))
        return errors

    for direct, differences in over_threads(2, body):
        assert 100 * differences < direct


@looped("weights", ["raw", "qwd"])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_written_into_the_model_count(dtype: torch.dtype, weights: str) -> None:
    def body(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        model = make_model().to(dtype)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, group=transport, weights=weights)
        give_gradients(model, transport.rank, 0)
        optimizer.step()
        written = flat(model) * 0.5
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        (state,) = optimizer.state_dict().values()
        (saved,) = state["weights"]
        optimizer.step()
        return written, flat(model), saved

    results = over_threads(2, body)
    written = results[0][0]
    for _, after, _ in results:
        torch.testing.assert_close(after, written, rtol=0, atol=0)
    saved = torch.cat([saved for _, _, saved in results])[: written.numel()]
    torch.testing.assert_close(saved.to(dtype), written, rtol=0, atol=0)


def test_states_of_others_are_refused() -> None:
    def body(transport: Transport) -> dict[str, Any]:
        return train(transport, 1, {})[0].state_dict()

    first, second = over_threads(2, body)
    model = make_model()
    alone = ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=fl.transport.local.alone())
    with pytest.raises(fl.ConfigError, match="rank 1 of 2; this is rank 0 of 1.*same rank"):
        alone.load_state_dict(second)
    with pytest.raises(fl.ConfigError, match=r"parts of \[\d+\] elements, expected \[\d+\]"):
        alone.load_state_dict({"rank 0 of 1": {**first["rank 0 of 2"], "weights": [torch.zeros(3)]}})


def test_groups_and_schedulers_work_as_in_any_optimizer() -> None:
    def body(transport: Transport) -> tuple[Tensor, Tensor]:
        model = make_model()
        *most, bias = model.parameters()
        groups = [{"params": most}, {"params": [bias], "lr": 0.5, "weight_decay": 0.0}]
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, lr=0.1, weight_decay=0.1, group=transport)
        assert isinstance(optimizer, torch.optim.Optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        start = bias.detach().clone()
        give_gradients(model, 0, 0)
        assert bias.grad is not None
        expected = start - 0.5 * bias.grad
        optimizer.step()
        torch.testing.assert_close(bias.detach(), expected)
        schedule.step()
        stopped = flat(model)
        give_gradients(model, 0, 1)
        optimizer.step(lambda: 1.0)
        return stopped, flat(model)

    for stopped, after in over_threads(2, body):
        assert torch.equal(stopped, after)


def give_some(model: nn.Module, rank: int, step: int, world: int) -> None:
    """Give gradients to a part of the parameters: in each step some have none on any rank, and some on one rank only.

    The first step leaves out most of them, so that their optimizer state begins in a later step.
    """
    give_gradients(model, rank, step)
    for i, p in enumerate(model.parameters()):
        if (step == 0 and i > 1) or (i + step) % 3 == 0 or ((i + step) % 3 == 1 and rank != step % world):
            p.grad = None


@looped("world", [1, 3])
@looped("clip", [False, True])
@looped("options", [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_skips_unused_parameters_as_on_one_process(options: dict[str, Any], clip: bool, world: int) -> None:
    """A parameter that no rank uses does not move; its momentum waits. If some ranks use it, others count as zeros."""
    plain = make_model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, **options)
    for step in range(7):
        sums: list[Tensor | None] = [None for _ in plain.parameters()]
        for rank in range(world):
            give_some(plain, rank, step, world)
            for i, p in enumerate(plain.parameters()):
                if p.grad is not None:
                    was = sums[i]
                    sums[i] = p.grad / world if was is None else was + p.grad / world
        assert None in sums
        for p, total in zip(plain.parameters(), sums, strict=True):
            p.grad = total
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()

    def body(transport: Transport) -> Tensor:
        model = make_model()
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, group=transport, **options)
        for step in range(7):
            optimizer.zero_grad()
            give_some(model, transport.rank, step, world)
            without = [p for p in model.parameters() if p.grad is None]
            if clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            assert all(p.grad is None for p in without)
        return flat(model)

    for got in over_threads(world, body):
        torch.testing.assert_close(got, flat(plain), rtol=1e-5, atol=1e-6)


@looped("world, frozen", [(2, False), (3, True)])
@looped("weights, gradients", [("raw", "raw"), ("qwd", "tlq_hs"), ("qw", "int8")])
@looped("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@on_threads()
def test_a_parameter_that_no_rank_uses_keeps_values_and_state(
    transport: Transport, kind: Any, weights: str, gradients: str, frozen: bool, world: int
) -> None:
    """To the bit, also where codecs lose some, on the rank that owns it and in the copies of others."""
    model = make_model()
    options: dict[str, Any] = {"weights": weights, "gradients": gradients, "lr": 1e-2, "weight_decay": 0.5}
    optimizer = ShardedOptimizer(model.parameters(), kind, group=transport, **options)
    (part,) = optimizer._parts
    marks = [torch.zeros_like(part._replica) for _ in model.parameters()]  # 1 where a parameter has its elements
    for mark, view in zip(marks, part._views, strict=True):
        mark[view.storage_offset() : view.storage_offset() + view.numel()] = 1
    for step in range(4):
        unused = [2, 3] if step == 1 else [0, 4] if step else [1, 2]
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(not (frozen and i in unused))
        optimizer.zero_grad()
        give_gradients(model, transport.rank, step)
        for i, p in enumerate(model.parameters()):
            p.grad = None if i in unused else p.grad
        mine = torch.stack([marks[i].view_as(part._rows)[transport.rank] for i in unused]).sum(0).bool()
        state = optimizer._inner.state[part.main]
        kept = {"main": part.main.detach(), **{key: x for key, x in state.items() if x.shape == part.main.shape}}
        before = {key: x[mine].clone() for key, x in kept.items()}
        copies = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for key, x in kept.items():
            assert torch.equal(x[mine], before[key]), (step, key)
        if step == 0:  # states that begin in this step hold nothing of weight decay
            begun = [x for key, x in state.items() if x.shape == part.main.shape and key not in kept]
            assert not any(x[mine].any() for x in begun)
        moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), copies, strict=True)]
        assert not any(moved[i] for i in unused), (step, moved)
        assert weights != "raw" or sum(moved) == 4  # codes that are coarse beside an update may hold a weight


@on_threads(2)
def test_a_rank_without_gradients_uses_none_for_the_look_for_overflows(transport: Transport) -> None:
    """What GradScaler needs to see there is no gradient of the step, and is gone after it."""
    model = make_model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, weight_decay=0.5, group=transport)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # a scaler that has scaled nothing refuses to unscale
    last = [*model.parameters()][-1]
    last.grad = torch.ones_like(last) if transport.rank else None
    before = [p.detach().clone() for p in model.parameters()]

    def _unscale_grads_() -> int:
        return len(optimizer.param_groups)  # not a scaler's, so it is no call of all ranks

    assert transport.rank or _unscale_grads_() == 1
    scaler.step(optimizer)
    moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
    assert moved == [False] * 5 + [True]
    assert all(p.grad is None for p in [*model.parameters()][:-1])


def test_bits_on_the_wire() -> None:
    """SDP4Bit's payloads between two nodes of two ranks, counted: 4.25 bits for gradients, 4.0156 for weights."""
    numel = 1 << 18

    def body(transport: Transport) -> tuple[int, int]:
        _ = transport.nodes
        counts = [0]
        exchange = transport.exchange

        def count(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            counts[-1] += sum(x.numel() for to, (x, _) in messages.items() if to // 2 != transport.rank // 2)
            exchange(messages)

        transport.exchange = count  # type: ignore[method-assign,assignment]
        out = torch.empty(numel // 4)
        halves.reduce_scatter(torch.ones(4, numel // 4), out, codecs.get("tlq_hs").bare, transport)
        counts.append(0)
        halves.all_gather(out, torch.empty(4, numel // 4), Weights.of("qwd").codec, transport)
        return counts[0], counts[1]

    found = over_threads(4, body, ranks_per_node=2)
    # Of two nodes each sends half of the payload: (nodes - 1) / nodes.
    assert sum(gradients for gradients, _ in found[:2]) == 0.5 * numel * 4.25 / 8
    assert sum(weights for _, weights in found[:2]) == 0.5 * numel * 4.015625 / 8


def test_what_cannot_be_sharded_is_refused() -> None:
    alone = fl.transport.local.alone()

    def make(params: Any, kind: Any = torch.optim.SGD, **options: Any) -> ShardedOptimizer:
        return ShardedOptimizer(params, kind, lr=0.1, group=alone, **options)

    w = nn.Parameter(torch.ones(3))
    with pytest.raises(fl.ConfigError, match="LBFGS looks at whole tensors.*AdamW"):
        make([w], torch.optim.LBFGS)
    with pytest.raises(fl.ConfigError, match="expected one type.*a group for each"):
        make([w, nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    with pytest.raises(fl.ConfigError, match="needs no gradient"):
        make([nn.Parameter(torch.ones(3), requires_grad=False)])
    with pytest.raises(fl.ConfigError, match="sparse codec.*DistributedOptimizer"):
        make([w], gradients="topk")
    with pytest.raises(fl.ConfigError, match="sparse weights.*'qwd'"):
        make([w], weights="topk")
    with pytest.raises(fl.ConfigError, match="weights=onebit.*'qwd'"):
        make([w], weights="onebit")
    with pytest.raises(fl.ConfigError, match="unknown codec 'qwdd'"):
        make([w], weights="qwdd")
    with pytest.raises(fl.ConfigError, match="weights=sdp4bit names gradients too, as tlq_hs, next to.*weights=qwd"):
        make([w], weights="sdp4bit", gradients="int8")
    with pytest.raises(fl.ConfigError, match="gradients=zero.. names weights too.*gradients=qgz"):
        make([w], gradients="zero++")
    embedding = nn.Embedding(2, 3, sparse=True)
    sharded = make(embedding.parameters())
    with pytest.raises(fl.UsageError, match="parameter 0: its gradient is sparse.*sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
    del sharded
    optimizer = make([w])
    with pytest.raises(fl.UsageError, match="when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.param_groups.append({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(fl.UsageError, match="has 2 groups, not the 1"):
        optimizer.step()
    optimizer.param_groups.pop()
    with pytest.raises(fl.UsageError, match="cannot be copied or pickled; copy or save its state_dict"):
        copy.deepcopy(optimizer)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    with pytest.raises(fl.UsageError, match="has 2 parameters, not the 1"):
        optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    w.data = torch.ones(3)
    with pytest.raises(fl.UsageError, match=r"other memory.*model\.to"):
        optimizer.step()


@on_threads(3)
def test_parameters_that_are_frozen_later_do_not_move(transport: Transport) -> None:
    """Neither by weight decay nor by moments, on no rank; the others move on."""
    optimizer, model = train(transport, 2, {})
    frozen = [model[0].bias, model[2].weight]
    before = [p.detach().clone() for p in model.parameters()]
    give_gradients(model, transport.rank, 2)
    for p in frozen:
        p.requires_grad_(False)
        p.grad = None
    optimizer.step()
    moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, False, True, True, True]


@on_threads(2)
def test_ranks_that_disagree_are_told(transport: Transport) -> None:
    with pytest.raises(fl.PlanMismatch, match="parameters or codecs of a ShardedOptimizer"):
        weights = "qwd" if transport.rank else "qw"
        ShardedOptimizer(make_model().parameters(), torch.optim.SGD, weights=weights, group=transport)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = gradient(4 * 21, 77 + 10 * step + rank).view(4, 21)
    return model(x).square().mean()


def sgd(model: nn.Module, transport: Transport) -> ShardedOptimizer:
    return ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, group=transport)


@looped("scaled", [False, True])
@looped("world, norm_type", [(1, 2.0), (3, 2.0), (3, 1.0), (2, float("inf"))])
def test_clipping_is_that_of_averaged_gradients(world: int, norm_type: float, scaled: bool) -> None:
    """The norms and weights of one process that averages, clips and steps."""
    plain = make_model()
    reference, expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        reference.zero_grad()
        for rank in range(world):
            (loss_of(plain, rank, step) / world).backward()
        expected.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)))
        reference.step()

    def body(transport: Transport) -> tuple[list[float], Tensor]:
        model = make_model()
        optimizer, scaler, norms = sgd(model, transport), GradScaler("cpu", init_scale=1024.0, enabled=scaled), []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, transport.rank, step)).backward()
            scaler.unscale_(optimizer)
            norms.append(float(optimizer.clip_grad_norm_(0.01, norm_type)))
            scaler.step(optimizer)
            scaler.update()
        return norms, flat(model)

    results = over_threads(world, body)
    for norms, got in results:
        assert norms == results[0][0] and norms == pytest.approx(expected, rel=1e-4) and min(norms) > 0.01
        torch.testing.assert_close(got, flat(plain), rtol=1e-5, atol=1e-6)


@looped("scaled", [False, True])
@looped("wrong", ["clip", "clip one", "noise"])
@on_threads(2)
def test_a_gradient_that_was_changed_after_backward_is_refused(transport: Transport, wrong: str, scaled: bool) -> None:
    model = make_model()
    optimizer, scaler = sgd(model, transport), GradScaler("cpu", init_scale=4.0, enabled=scaled)
    scaler.scale(loss_of(model, transport.rank, 0)).backward()
    scaler.unscale_(optimizer)
    if wrong == "noise":
        assert model[2].weight.grad is not None
        model[2].weight.grad += 0.1
    else:
        nn.utils.clip_grad_norm_(model.parameters() if wrong == "clip" else model[2].weight, 1e9)
    name = "group 0, parameter 0" if wrong == "clip" else "group 0, parameter 2"
    for call in (lambda: scaler.step(optimizer), lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(fl.UsageError, match=rf"{name}, .*clip_grad_norm_\(\) of the ShardedOptimizer"):
            call()
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5  # a new tensor: the user's own gradient
    optimizer.step()


@on_threads(2)
def test_backward_after_clipping_is_refused(transport: Transport) -> None:
    model = make_model()
    optimizer = sgd(model, transport)
    for step in range(2):
        loss_of(model, transport.rank, step).backward()
        optimizer.clip_grad_norm_(1.0)
    loss_of(model, transport.rank, 2).backward()
    with pytest.raises(fl.UsageError, match=r"parameter \d: backward has changed its gradient after clip_grad_norm_"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, transport.rank, 2).backward()
    optimizer.step()


@looped("clip", [False, True])
@looped("world", [2, 3])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_with_one_scale(world: int, clip: bool) -> None:
    """Also where a rank has no gradient in the step, and where two ranks overflow."""

    def train_scaled(transport: Transport, steps: list[int], overflows: dict[int, list[int]]) -> tuple[Tensor, float]:
        model = make_model()
        optimizer, scaler = sgd(model, transport), GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, transport.rank, step)
            if transport.rank in overflows.get(step, []):
                loss = loss * float("inf")
            if (step, transport.rank) not in ((1, 0), (4, 0)):
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
        return flat(model), scaler.get_scale()

    overflows = {0: [world - 1], 1: [1], 3: [0, 1]}
    results = over_threads(world, lambda transport: train_scaled(transport, [*range(6)], overflows))
    expected = over_threads(world, lambda transport: train_scaled(transport, [2, 4, 5], {}))
    for got, scale in results:
        assert scale == 128.0, "halved in steps 0, 1 and 3"
        torch.testing.assert_close(got, expected[0][0], rtol=1e-5, atol=1e-6)
        assert torch.equal(got, results[0][0])
