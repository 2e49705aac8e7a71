"""Local steps: ranks train by themselves and sync after every H steps. A plain loop in torch says what comes out."""

import copy
import io
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.training.policies.gradient_noise import norm_of
from fusionlayer.transport import local
from tests.codecs import variants
from tests.integrations.training import CLASSES, FEATURES, fill, loss_of, make_model, train, weights
from tests.loops import looped
from tests.ranks import on_ranks
from tests.tiers import tiered


def sgd(parameters: Iterable[Any]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def make_pair(make: Callable[[Iterable[Any]], Optimizer] = sgd, **options: Any) -> tuple[nn.Sequential, Any]:
    model = make_model()
    return model, fl.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def same(results: list[Tensor]) -> Tensor:
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank} has other weights than rank 0"
    return results[0]


class Oracle:
    """What ``world`` ranks compute, in one thread and without fusionlayer."""

    def __init__(
        self,
        world: int,
        sync: fl.Local,
        make: Callable[[Iterable[Any]], Optimizer] = sgd,
        fragments: list[list[int]] | None = None,
    ) -> None:
        self.options = sync
        self.models = [make_model() for _ in range(world)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.anchors = [p.detach().clone() for p in make_model().parameters()]
        self.outer = SGD(self.anchors, lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)
        self.fragments = fragments or [[*range(len(self.anchors))]]
        self.steps = 0
        self.sent = 0
        self.under_way: list[tuple[int, dict[int, Tensor], list[list[Tensor]]]] = []
        self.own = self.shared = 0.0
        self.measured: Any = None
        self.reports: list[Any] = []

    def train(self, steps: Iterable[int]) -> None:
        every, count = self.options.every, len(self.fragments)
        departures = [(i + 1) * every // count for i in range(count)]
        for step in steps:
            factor = self.factor()
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                (group,) = optimizer.param_groups
                kept = {key: group[key] for key in ("lr", "weight_decay")}
                if "betas" in group:
                    group.update(lr=kept["lr"] * factor, weight_decay=kept["weight_decay"] / factor)
                train(model, optimizer, rank, [step])
                group.update(kept)
            self.steps += 1
            while self.under_way and self.under_way[0][0] == self.steps:
                self.land(*self.under_way.pop(0)[1:], self.options.alpha)
            if (self.steps - 1) % every + 1 in departures:
                averages = self.send()
                if self.options.delay:
                    sent = [[p.detach().clone() for p in model.parameters()] for model in self.models]
                    self.under_way.append((self.steps + self.options.delay, averages, sent))
                else:
                    self.land(averages, alpha=self.options.alpha)
                self.average_states()

    def factor(self) -> float:
        """Return by what local steps multiply learning rates, from the weights of each gradient in a difference."""
        world, every, after = len(self.models), self.options.every, self.options.after or 0
        if not self.own or self.options.momentum:
            return 1.0
        noise = (self.own - self.shared) * world / (world - 1)
        signal = max(0.0, self.own - noise)
        weights = [sum(0.1 * 0.9 ** (t - g) for t in range(max(g, 0), every)) for g in range(-500, every)]
        noise *= every**2 / sum(weight * weight for weight in weights)
        ratio = (signal + noise) / (signal + noise / world)
        share = (1 - 0.999**self.steps) / (1 - 0.999 ** (self.steps + after))
        return (1 - share + share * ratio) ** 0.5

    def average_states(self) -> None:
        for key, syncs in self.options.states.items():
            for i in range(len(self.anchors)) if self.sent % syncs == 0 else ():
                kept = [
                    o.state[list(m.parameters())[i]][key] for o, m in zip(self.optimizers, self.models, strict=True)
                ]
                average = sum((x * (1 / len(kept)) for x in kept), torch.zeros_like(kept[0]))
                for x in kept:
                    x.copy_(average)

    @torch.no_grad()
    def send(self) -> dict[int, Tensor]:
        members = list(zip(*(model.parameters() for model in self.models), strict=True))
        averages = {}
        fragment = self.fragments[self.sent % len(self.fragments)]
        for i in fragment:
            differences = ((self.anchors[i] - p) * (1 / len(members[i])) for p in members[i])
            averages[i] = sum(differences, torch.zeros_like(self.anchors[i]))
        self.sent += 1
        norms = [
            float(norm_of([self.anchors[i] - members[i][rank] for i in fragment])) for rank in range(len(members[0]))
        ]
        self.reports.append((norms, self.measured))
        self.measured = None
        return averages

    @torch.no_grad()
    def land(self, averages: dict[int, Tensor], sent: list[list[Tensor]] | None = None, alpha: float = 0.0) -> None:
        norms, reported = self.reports.pop(0)
        self.measured = norms, float(norm_of(averages.values()))
        if reported is not None:
            self.own = 0.9 * self.own + sum(norm * norm for norm in reported[0]) / len(norms)
            self.shared = 0.9 * self.shared + reported[1] ** 2
        for i, average in averages.items():
            self.anchors[i].grad = average
        self.outer.step()
        self.outer.zero_grad()
        for i in averages:
            for rank, model in enumerate(self.models):
                parameter = list(model.parameters())[i]
                learned = parameter - sent[rank][i] if sent and self.options.carry else 0
                parameter.copy_((parameter.lerp(self.anchors[i], 1 - alpha) if alpha else self.anchors[i]) + learned)


PRESETS = {
    "averaging": fl.Local.averaging(every=3),
    "diloco": fl.Local.diloco(every=2),
    "desloc": fl.Local.desloc(every=2, states={"exp_avg": 1, "exp_avg_sq": 3}),
}


@looped(
    "world, make, preset",
    [
        (2, sgd, "averaging"),
        (3, adamw, "averaging"),
        (3, sgd, "diloco"),
        (4, adamw, "diloco"),
        (2, adamw, "desloc"),
        (3, adamw, "desloc"),
    ],
)
def test_training_is_that_of_a_plain_loop(world: int, make: Any, preset: str) -> None:
    """Also between two syncs: gradients stay the rank's own."""
    sync = PRESETS[preset]

    def rank_main(rank: int) -> list[Tensor]:
        model, optimizer = make_pair(make, sync=sync)
        seen = []
        for step in range(8):
            train(model, optimizer, rank, [step])
            seen.append(weights(model))
        return seen

    found = local.run(rank_main, world)
    oracle = Oracle(world, sync, make)
    for step in range(8):
        oracle.train([step])
        for rank, model in enumerate(oracle.models):
            assert torch.equal(found[rank][step], weights(model)), f"rank {rank} after step {step}"
        synced = [torch.equal(found[0][step], found[rank][step]) for rank in range(1, world)]
        assert all(synced) if (step + 1) % sync.every == 0 else not any(synced)


STREAMS = {
    "one after the other": fl.Local(every=4, fragments=2),
    "late": fl.Local.diloco(every=3, delay=2),
    "under way at once": fl.Local.streaming(every=4, fragments=4, delay=2, alpha=0.25),
    "streaming": fl.Local.streaming(every=5, fragments=3, delay=3),
    "carried": fl.Local.overlapped(every=3, delay=2),
}


@looped("stream", STREAMS)
def test_fragments_arrive_while_ranks_train_on(stream: str) -> None:
    """After every step as a plain loop says; after ``synchronize()`` equal on all ranks. A state resumes everywhere."""
    sync = STREAMS[stream]

    def rank_main(rank: int) -> tuple[list[Tensor], list[list[int]]]:
        model, optimizer = make_pair(adamw, sync=sync)
        seen = []
        for step in range(9):
            train(model, optimizer, rank, [step])
            seen.append(weights(model))
            checkpoint = saved(model, optimizer)  # changes nothing
            optimizer.close() if step % 3 == 1 else None
            if step % 3 == 1:
                model, optimizer = make_pair(adamw, sync=sync)
                load(checkpoint, model, optimizer)
        optimizer.synchronize()
        seen.append(weights(model))
        names = [name for name, _ in model.named_parameters()]
        plan = optimizer.fusion_plan
        return seen, [
            [names.index(name) for b in plan.buckets if b.phase == phase for name in b.names]
            for phase in range(sync.fragments)
        ]

    found = local.run(rank_main, 3)
    fragments = found[0][1]
    assert sorted(sum(fragments, [])) == [0, 1, 2, 3] and all(fragments)
    oracle = Oracle(3, sync, adamw, fragments)
    for step in range(9):
        oracle.train([step])
        for rank, model in enumerate(oracle.models):
            assert torch.equal(found[rank][0][step], weights(model)), f"rank {rank} after step {step}"
    for _, averages, sent in oracle.under_way:
        oracle.land(averages, sent, sync.alpha)
    for _ in fragments:
        oracle.land(oracle.send())
    assert torch.equal(same([seen[-1] for seen, _ in found]), weights(oracle.models[0]))


WORLDS = [(codec, world) for codec in variants.defaults() for world in (2, 3)]
WORLDS += [(codec, 64) for codec in map(fl.codecs.get, ("raw", "int4", "topk"))]


@looped(
    "codec, world",
    tiered(WORLDS, lambda codec, world: variants.is_kind(codec) and world == 3, lambda codec, world: world < 64),
    ids=str,
)
def test_replicas_are_equal_after_every_sync(codec: Any, world: int) -> None:
    def rank_main(rank: int) -> list[Tensor]:
        model, optimizer = make_pair(codec=codec, sync=fl.Local.diloco(every=2), check_replicas=1)
        synced = []
        for step in range(4):
            train(model, optimizer, rank, [step])
            if step % 2:
                synced.append(weights(model))
        return synced

    first = weights(make_model())
    for results in zip(*local.run(rank_main, world), strict=True):
        assert not torch.equal(same(list(results)), first)


def saved(model: nn.Module, optimizer: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def load(data: bytes, model: nn.Module, optimizer: Any) -> None:
    checkpoint = torch.load(io.BytesIO(data), weights_only=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    model.load_state_dict(checkpoint["model"])


@looped("order", ["model, optimizer", "optimizer alone", "optimizer, model", "model, wrap, optimizer"])
@looped("anchored", [False, True])
@on_ranks(2)
def test_a_state_of_the_middle_of_a_round_is_the_rank_s_own_in_any_order(rank: int, anchored: bool, order: str) -> None:
    options = {"codec": "int4", "error_feedback": True, "sync": fl.Local.averaging(every=4)}

    def make(first: Any = None) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*make_model(), nn.BatchNorm1d(5))
        if first:
            model.load_state_dict(first)
        return model, fl.DistributedOptimizer(adamw(model.parameters()), model, **options)

    model, optimizer = make()
    train(model, optimizer, rank, range(6))
    with optimizer.anchored() if anchored else nullcontext():
        checkpoint = torch.load(io.BytesIO(saved(model, optimizer)), weights_only=True)
    train(model, optimizer, rank, range(6, 11))
    uninterrupted = weights(model), model[-1].running_mean.clone()
    optimizer.close()

    model, optimizer = make(checkpoint["model"] if order == "model, wrap, optimizer" else None)
    if order == "model, optimizer":
        model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if order == "optimizer, model":
        model.load_state_dict(checkpoint["model"])
        if anchored:
            with pytest.raises(fl.UsageError, match="load the model first, then the optimizer"):
                train(model, optimizer, rank, [6])
            return
    train(model, optimizer, rank, range(6, 11))
    assert torch.equal(weights(model), uninterrupted[0])
    assert torch.equal(model[-1].running_mean, uninterrupted[1])


@on_ranks(2)
def test_a_local_state_of_another_rank_is_refused_before_anything_is_changed(rank: int) -> None:
    model, optimizer = make_pair(adamw, sync=fl.Local.averaging(every=4))
    train(model, optimizer, rank, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    before = weights(model)
    other = {**state, "fusionlayer": {**state["fusionlayer"], "rank": 1 - rank}}
    for _ in range(2):
        with pytest.raises(fl.ConfigError, match=f"this is rank {rank} of 2"):
            optimizer.load_state_dict(other)
        assert torch.equal(weights(model), before)
        optimizer.load_state_dict(state)  # momenta differ over ranks, so another rank's are refused after it too


def matrices() -> nn.Sequential:
    """A model without biases: ``torch.optim.Muon`` takes matrices alone."""
    model = nn.Sequential(nn.Linear(FEATURES, 40, bias=False), nn.Tanh(), nn.Linear(40, CLASSES, bias=False))
    fill(model)
    return model


TRAINED: dict[str, tuple[fl.Local, Any, dict[str, Any]]] = {
    "streaming": (fl.Local.streaming(every=4, fragments=2, delay=2), adamw, {"codec": "int4", "error_feedback": True}),
    "muloco": (fl.Local.muloco(every=4), lambda p: torch.optim.Muon(p, lr=0.05), {}),
    "sparseloco": (fl.Local.sparseloco(every=4, codec_options={"density": 0.25}), adamw, {}),
    "desloc": (fl.Local.desloc(every=4, states={"exp_avg": 1, "exp_avg_sq": 2}), adamw, {"codec": "int8"}),
}


@looped("preset", TRAINED)
def test_presets_learn_and_go_on_from_the_middle_of_a_round(preset: str) -> None:
    """Loss falls; replicas are equal after each sync; error feedback is kept and resumed; a NaN of one reaches all."""
    sync, make, options = TRAINED[preset]

    def rank_main(rank: int) -> tuple[list[Tensor], float, float]:
        def pair() -> tuple[nn.Module, Any]:
            model = matrices()
            return model, fl.DistributedOptimizer(make(model.parameters()), model, sync=sync, **options)

        def loss() -> float:
            with optimizer.anchored(), torch.no_grad():
                return sum(loss_of(model, of, step).item() for of in range(3) for step in range(2))

        def go_on(steps: Iterable[int]) -> None:
            for step in steps:
                train(model, optimizer, rank, [step % 2])
                with optimizer.anchored():
                    anchors.append(weights(model))

        anchors: list[Tensor] = []
        model, optimizer = pair()
        before = loss()
        go_on(range(22))
        checkpoint = saved(model, optimizer)
        held = optimizer.state_dict()["fusionlayer"]
        assert any(map(Tensor.any, held["residuals"].values())), "what codecs have lost is kept"
        assert held["local"]["count"] == 2, "in the middle of a round"
        go_on(range(22, 40))
        optimizer.synchronize()
        anchors.append(weights(model))
        after = loss()

        optimizer.close()
        model, optimizer = pair()
        load(checkpoint, model, optimizer)
        go_on(range(22, 40))
        optimizer.synchronize()
        assert torch.equal(weights(model), anchors[40]), "resumed training is uninterrupted training"

        if rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
        train(model, optimizer, rank, [0])
        optimizer.synchronize()
        assert weights(model).isnan().any(), "a NaN of one rank reaches all"
        return anchors, before, after

    found = local.run(rank_main, 3)
    for results in zip(*(anchors for anchors, _, _ in found), strict=True):
        same(list(results))
    for _, before, after in found:
        assert after < 0.8 * before


@on_ranks(2)
def test_error_feedback_decays_before_each_sync(rank: int) -> None:
    """What a parameter that no longer moves still holds back halves with each sync, or goes."""
    model, optimizer = make_pair(codec="topk", density=0.2, sync=fl.Local(every=1, feedback_decay=0.5))
    train(model, optimizer, rank, [0])
    for _ in range(2):
        before = optimizer.state_dict()["fusionlayer"]["residuals"]
        optimizer.zero_grad()
        optimizer.param_groups[0].update(lr=0.0)
        train(model, optimizer, rank, [1])
        after = optimizer.state_dict()["fusionlayer"]["residuals"]
        for name, residual in after.items():
            kept = residual != 0
            assert torch.equal(residual[kept], before[name][kept] * 0.5), name
        assert any(residual.any() for residual in after.values())


@on_ranks(2)
def test_a_state_that_the_optimizer_does_not_keep_is_told(rank: int) -> None:
    for state in ("exp_av", "step"):
        model, optimizer = make_pair(adamw, sync=fl.Local.desloc(every=1, states={state: 2}))
        train(model, optimizer, rank, [0])
        with pytest.raises(fl.UsageError, match=f"states has '{state}', .* keeps exp_avg, exp_avg_sq, step"):
            train(model, optimizer, rank, [1])


@on_ranks(2)
def test_a_state_without_local_steps_begins_a_round_at_the_loaded_parameters(rank: int) -> None:
    """The model may be loaded before the optimizer or after it; a state that is broadcast brings anchors along."""
    other, plain = make_pair(lambda parameters: SGD(parameters, lr=0.05))
    train(other, plain, rank, range(2))
    checkpoint = saved(other, plain)
    plain.close()
    found = []
    for whole in (True, False):
        model, optimizer = make_pair(sync=fl.Local.diloco(every=2))
        if whole:
            train(model, optimizer, rank, range(3))
            load(checkpoint, model, optimizer)
        else:
            model.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True)["model"])
            if rank:
                fill(model, stream=5)
                train(model, optimizer, rank, range(3, 4))
            fl.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer.param_groups[0].update(lr=0.05, momentum=0)
            optimizer.state.clear()
            fl.broadcast_optimizer_state(optimizer)
        train(model, optimizer, rank, range(4, 6))
        found.append(weights(model))
    assert torch.equal(*found)


def test_a_rank_that_syncs_elsewhere_is_named_on_all() -> None:
    def rank_main(rank: int) -> tuple[int, ...]:
        model, optimizer = make_pair(sync=fl.Local.averaging(every=4))
        train(model, optimizer, rank, range(4))
        before = weights(model)
        with pytest.raises(fl.PlanMismatch, match=r"rank 0: 4, rank 2: 3; call synchronize\(\) in the same place") as e:
            train(model, optimizer, rank, range(4, 7))
            if rank == 2:
                optimizer.synchronize()
            train(model, optimizer, rank, [7])
        own = weights(model)
        with pytest.raises(fl.PlanMismatch, match="other numbers of local steps"):
            optimizer.step()
        assert torch.equal(weights(model), own) and not torch.equal(own, before), "the rank's own steps stay"
        return e.value.ranks

    assert local.run(rank_main, 3) == [(2,)] * 3


def test_options_that_differ_are_told_when_optimizers_are_made() -> None:
    def rank_main(rank: int, options: list[Any]) -> None:
        with pytest.raises(fl.PlanMismatch, match="rank 0 has sync=.*, rank 1 has sync="):
            make_pair(sync=options[rank])

    for options in ([None, fl.Local(every=2)], [fl.Local(every=2), fl.Local(every=3)]):
        local.run(lambda rank, options=options: rank_main(rank, options), 2)


def test_a_step_that_a_scaler_skips_on_one_rank_counts() -> None:
    """Rank 1's gradients overflow once: it syncs with the others all the same. Else the bits are GradScaler's."""

    def scaled(rank: int, model: nn.Module, optimizer: Optimizer, clip: bool) -> None:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (float("inf") if (rank, step) == (1, 0) else 1)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (512.0 if rank else 1024.0)

    def rank_main(rank: int, clip: bool, fused: bool) -> tuple[Tensor, Tensor]:
        found = []
        for sync in (fl.Local(every=4), fl.Local(every=5)):
            model, optimizer = make_pair(lambda p: AdamW(p, lr=0.01, fused=fused), sync=sync)
            scaled(rank, model, optimizer, clip)
            found.append(weights(model))
        alone = make_model()
        scaled(rank, alone, AdamW(alone.parameters(), lr=0.01, fused=fused), clip)
        assert torch.equal(found[1], weights(alone))
        return found[0], found[1]

    for clip, fused in ((False, False), (True, False), (False, True)):
        results = local.run(lambda rank, clip=clip, fused=fused: rank_main(rank, clip, fused), 2)
        torch.testing.assert_close(same([synced for synced, _ in results]), sum(own for _, own in results) / 2)


def grow(model: nn.Sequential, optimizer: Optimizer, step: int, stream: int) -> None:
    if step == 2:
        model[0].weight.requires_grad_(True)
    elif step == 4:
        model[2].weight.requires_grad_(False)
    elif step == 7:
        fill(model[3], stream)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.02})
    elif step == 8:
        model[2].weight.requires_grad_(True)


def begin() -> tuple[nn.Sequential, Optimizer]:
    model = nn.Sequential(*make_model(), nn.Linear(CLASSES, CLASSES))
    fill(model)
    model[0].requires_grad_(False)
    return model, adamw([*model[0].parameters(), *model[2].parameters()])


def test_parameters_come_and_go_between_syncs() -> None:
    """A frozen one takes along what it was trained since the last sync; an added one begins with rank 0's values."""
    sync = fl.Local(every=3, inner_lr_scale=1)

    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        model, plain = begin()
        optimizer = fl.DistributedOptimizer(plain, model.named_parameters(), sync=sync, check_replicas=1)
        for step in range(12):
            grow(model, optimizer, step, stream=rank)
            train(model, optimizer, rank, [step])
        return weights(model), model[0].bias.detach()

    found = local.run(rank_main, 3)
    models, optimizers = zip(*(begin() for _ in range(3)), strict=True)
    anchors = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    for step in range(12):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            grow(model, optimizer, step, stream=0)
            if step == 7:
                anchors.update({name: p.detach().clone() for name, p in model.named_parameters() if name[0] == "3"})
            train(model, optimizer, rank, [step])
        if step % 3 == 2:
            with torch.no_grad():
                for name, anchor in anchors.items():
                    members = [model.get_parameter(name) for model in models]
                    average = sum(((anchor - p) * (1 / 3) for p in members), torch.zeros_like(anchor))
                    anchor.sub_(average)
                    for p in members:
                        p.copy_(anchor)
    assert torch.equal(same([result for result, _ in found]), weights(models[0]))
    assert torch.equal(found[0][1], begin()[0][0].bias), "frozen from the beginning to the end"


def test_anchors_are_compared_at_syncs() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        model, optimizer = make_pair(sync=fl.Local(every=2), check_replicas=1)
        train(model, optimizer, rank, range(3))
        if rank == 1:
            optimizer.reducer.policy.local.anchors[model[2].bias].view(torch.int32)[3] ^= 1
        with pytest.raises(
            fl.ReplicaMismatch, match="1 of 4 parameters differ over ranks: '2.bias' on rank 1"
        ) as error:
            train(model, optimizer, rank, [3])
        return error.value.tensors

    assert local.run(rank_main, 3) == [("2.bias",)] * 3


def test_what_is_seen_between_syncs() -> None:
    """The rank's own parameters; the anchors within ``anchored()``; the synced ones after ``synchronize()``."""

    def rank_main(rank: int) -> list[Tensor]:
        model = nn.Sequential(make_model(), nn.BatchNorm1d(CLASSES))
        optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model, sync=fl.Local(every=3))
        with optimizer.anchored():
            start = weights(model)
        train(model, optimizer, rank, range(3))
        synced = weights(model)
        train(model, optimizer, rank, [3])
        own = weights(model)
        with optimizer.anchored():
            assert torch.equal(weights(model), synced)
        assert torch.equal(weights(model), own) and not torch.equal(own, synced)
        optimizer.synchronize()
        now = weights(model)
        optimizer.synchronize()  # nothing to do
        train(model, optimizer, rank, range(4, 6))
        assert optimizer.reducer.engine.step == 2, "a round begins with synchronize()"
        train(model, optimizer, rank, [6])
        assert optimizer.reducer.engine.step == 3
        with pytest.raises(fl.UsageError, match="clip them right after backward"), optimizer.skip_synchronize():
            pass
        return [start, synced, now, weights(model), model[1].running_mean]

    *equal, means = zip(*local.run(rank_main, 2), strict=True)
    for results in equal:
        same(list(results))
    assert not torch.equal(*means), "statistics of batches are the rank's own"


@on_ranks(1)
def test_one_rank_trains_as_without(rank: int) -> None:
    model, optimizer = make_pair(adamw, sync=fl.Local.diloco(every=2), codec="int4")
    train(model, optimizer, 0, range(5))
    optimizer.synchronize()
    with optimizer.anchored():
        pass
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    optimizer.load_state_dict(optimizer.state_dict())
    plain = make_model()
    train(plain, adamw(plain.parameters()), 0, range(5))
    assert torch.equal(weights(model), weights(plain))


def test_a_rank_that_has_joined_follows_the_others_syncs() -> None:
    """It brings what it has trained since the last sync to the first of them, and zeros to those after."""

    def rank_main(rank: int) -> Tensor:
        hvd.init()
        model = make_model()
        optimizer: Any = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), sync=fl.Local(every=2)
        )
        train(model, optimizer, rank, range(1 if rank == 1 else 4))
        assert hvd.join() != 1
        hvd.shutdown()
        return weights(model)

    found = same(local.run(rank_main, 3))
    oracle = Oracle(3, fl.Local(every=2))
    done = [0, 0, 0]
    for counts in ([2, 1, 2], [2, 0, 2]):
        for rank, count in enumerate(counts):
            train(oracle.models[rank], oracle.optimizers[rank], rank, range(done[rank], done[rank] + count))
            done[rank] += count
        oracle.land(oracle.send())
    assert torch.equal(found, weights(oracle.models[0]))


@looped(
    "options, told",
    [
        ({"sync": 4}, r"sync: got an int; expected fusionlayer.Local\(...\)"),
        ({"op": fl.Sum}, "op=SUM with sync"),
        ({"overlap_forward": nn.Linear(2, 2)}, "leave overlap_forward out"),
        ({"codec": "auto"}, "name a codec"),
        ({"planner": "safusion"}, "a planner that needs no costs"),
        ({"codec": "int4", "group_sise": 64}, "did you mean 'group_size'"),
        ({"sync": fl.Local(every=9, fragments=5)}, "at most 4 fragments"),
    ],
)
def test_arguments_that_do_not_fit_local_steps_are_refused(options: dict[str, Any], told: str) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(fl.ConfigError, match=told):
            make_pair(**{"sync": fl.Local(every=2), **options})

    for world in (1, 2):
        local.run(rank_main, world)


def test_a_preset_brings_its_codec_unless_another_is_given() -> None:
    muloco, sparseloco = fl.Local.muloco(), fl.Local.sparseloco()
    assert (muloco.codec, muloco.codec_options, muloco.error_feedback) == ("int", {"bits": 2}, True)
    assert fl.Local.muloco(codec="int4").codec_options == {}
    assert (sparseloco.codec, sparseloco.error_feedback, sparseloco.feedback_decay) == ("chunked_topk", True, 0.95)
    sync = fl.Local(every=1, codec="int", codec_options={"bits": 4, "group_size": 64}, error_feedback=True)

    def rank_main(rank: int, expected: dict[str, Any], **options: Any) -> None:
        model, optimizer = make_pair(sync=sync, **options)
        train(model, optimizer, rank, [0])
        bucket = optimizer.fusion_plan.buckets[0]
        assert {"codec": bucket.codec, **bucket.options}.items() >= expected.items()
        assert optimizer.state_dict()["fusionlayer"]["residuals"]

    local.run(lambda rank: rank_main(rank, {"codec": "int", "bits": 4, "group_size": 64}), 2)
    local.run(
        lambda rank: rank_main(rank, {"bits": 4, "group_size": 32, "hadamard": True}, group_size=32, hadamard=True), 2
    )
    local.run(lambda rank: rank_main(rank, {"codec": "topk", "density": 0.1}, codec="topk", density=0.1), 2)


@looped(
    "options, told",
    [
        ({"every": 0}, "every=0; expected a number of local steps between two syncs, at least 1"),
        ({"every": 2.0}, "every=2.0"),
        ({"every": True}, "every=True"),
        ({"every": "automatic"}, "every='automatic'; expected a number of local steps"),
        ({"lr": 0}, "lr=0; expected a number above 0"),
        ({"lr": "1"}, "lr='1'"),
        ({"momentum": 1.0}, "momentum=1.0; expected a number from 0 to below 1"),
        ({"alpha": 1}, "alpha=1; expected a number from 0"),
        ({"feedback_decay": 0}, "feedback_decay=0; expected a number above 0, at most 1"),
        ({"fragments": 0}, "fragments=0; expected a number of parts of the model"),
        ({"fragments": 3}, "fragments=3 and every=2; expected at most one a step"),
        ({"delay": -1}, "delay=-1; expected a number of local steps, at least 0"),
        ({"delay": 2}, "delay=2 and every=2; expected a smaller delay"),
        ({"inner_lr_scale": 0}, "inner_lr_scale=0; expected a number above 0, or 'auto'"),
        ({"states": "exp_avg"}, "states: got a str; expected keys of optimizer.state"),
        ({"states": {"exp_avg": 0}}, r"states\['exp_avg'\]=0; expected a number of syncs, at least 1"),
        ({"states": {"exp_avg": 1}, "delay": 1}, "states with fragments or a delay"),
        ({"carry": True}, "carry=True without a delay"),
        ({"carry": True, "delay": 1, "alpha": 0.5}, "carry=True with alpha=0.5; leave one of them out"),
        ({"carry": "yes", "delay": 1}, "carry: got a str; expected True or False"),
    ],
)
def test_options_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(fl.ConfigError, match=told):
        fl.Local(**{"every": 2, **options})


def test_the_code_of_the_page_trains() -> None:
    """What it validates, and what it ends with, has the same bits on all ranks."""

    class Loss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y.square().mean()

    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text()
    averaged, one_bit, loop, _ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    presets = re.findall(r"^\| `(fl\.Local\.\w+\(.*\))` \|", page, re.MULTILINE)
    assert len(presets) == 9
    wrappings = [one_bit, *(averaged.replace("fl.Local.averaging(every=4)", preset) for preset in presets)]

    def rank_main(rank: int) -> Tensor:
        seen: list[Tensor] = []
        data = torch.Generator().manual_seed(rank)
        loader = [torch.randn(4, 5, generator=data) for _ in range(102)]
        for wrapping in wrappings:
            model = Loss(nn.Linear(5, 2), nn.Linear(2, 1))
            names = {"fl": fl, "torch": torch, "model": model, "optimizer": AdamW(model.parameters(), lr=0.01)}
            names |= {"loader": loader, "validate": lambda model: seen.append(weights(model))}
            exec(wrapping + loop, names)
            seen.append(weights(model))
        return torch.stack(seen)

    assert same(local.run(rank_main, 2)).shape == (20, 15)
