"""The contract that Horovod's users know: class, names, hooks, the order of calls, and what a wrong order says."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import loss_of, make_model, reference, train, weights
from tests.loops import looped
from tests.ranks import on_ranks


def sgd(model: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(model.parameters(), lr=lr, momentum=0.9)


def wrap(model: nn.Module, **options: Any) -> Any:
    return fl.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    loss_of(model, rank, step).backward()


@on_ranks(2)
def test_result_is_the_same_object_and_class_with_its_state(rank: int) -> None:
    model = make_model()
    plain = Adam(model.parameters(), lr=0.01)
    backward(model, 0)
    plain.step()
    plain.zero_grad()
    moments = plain.state[model[0].weight]["exp_avg"].clone()
    optimizer = fl.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, Adam) and type(optimizer).__name__ == "Adam"
    assert optimizer is plain
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, rank, range(1))
    assert optimizer.state[model[0].weight]["step"] == 2


@on_ranks(2)
def test_names_are_checked(rank: int) -> None:
    model = make_model()
    named = list(model.named_parameters())
    for given, text in [
        (named[:-1], "parameter 3 of group 0, shape (5,), is not in named_parameters"),
        ([("w", p) for _, p in named], "'w' more than once"),
        (list(model.parameters()), "(name, parameter) pairs"),
        ([*named, ("extra",)], "(name, parameter) pairs"),
        ([*named, (3, nn.Parameter(torch.zeros(1)))], "(name, parameter) pairs"),
        ([*named, ("0._orig_mod.weight", nn.Parameter(torch.zeros(1)))], "'0.weight' more than once"),
    ]:
        with pytest.raises(ValueError) as error:
            fl.DistributedOptimizer(sgd(model), given)
        assert isinstance(error.value, fl.ConfigError)
        assert text in str(error.value)
    more = [*named, ("of another model", nn.Parameter(torch.zeros(1)))]
    fl.DistributedOptimizer(sgd(model), more)


class Compiled(nn.Module):
    """Has the names of a module that ``torch.compile`` returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


def blockwise(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(Compiled(module) for module in model))  # type: ignore[attr-defined]


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@looped("first, then", [(blockwise, as_it_is), (Compiled, blockwise)])
@looped("sync", [None, fl.Local.averaging(every=2)])
@on_ranks(2)
def test_names_and_states_do_not_depend_on_what_is_compiled(rank: int, first: Any, then: Any, sync: Any) -> None:
    """Training that goes on with other blocks compiled has the bits of training without a break."""

    def make(how: Any, **options: Any) -> tuple[nn.Module, Any]:
        model = how(make_model())
        return model, wrap(model, **{"codec": "int4", "error_feedback": True, "sync": sync, **options})

    model, optimizer = make(first)
    train(model, optimizer, rank, range(4))
    names = {name for bucket in optimizer.fusion_plan.buckets for name in bucket.names}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    saved = copy.deepcopy([p.data for p in model.parameters()]), copy.deepcopy(optimizer.state_dict())
    plan = optimizer.fusion_plan if sync is None else None
    train(model, optimizer, rank, range(4, 8))
    optimizer.close()
    again, resumed = make(then, plan=plan, **({"codec": None} if plan else {}))
    for p, value in zip(again.parameters(), saved[0], strict=True):
        p.data.copy_(value)
    resumed.load_state_dict(saved[1])
    train(again, resumed, rank, range(4, 8))
    assert torch.equal(weights(again), weights(model))


@on_ranks(2)
def test_parameters_without_names_are_known_by_their_place(rank: int) -> None:
    """https://github.com/horovod/horovod/issues/2670: parameters of several groups had one name."""
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = fl.DistributedOptimizer(SGD(groups, lr=0.1))
    train(model, optimizer, rank, range(1))
    names = {name for bucket in optimizer.fusion_plan.buckets for name in bucket.names}
    assert names == {f"allreduce.noname.{i}.{j}" for i in (0, 1) for j in (0, 1)}


@looped(
    "options, text",
    [
        ({"op": "mean"}, "fusionlayer.Average or fusionlayer.Sum"),
        ({"op": fl.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"codec": "int5"}, "did you mean 'int"),
        ({"codec": "int8", "bitz": 4}, "bitz"),
        ({"codec": fl.codecs.get("int8"), "bits": 4}, "give the codec's name"),
        ({"algorithm": "no_such"}, "two_shot"),
        ({"planner": "no_such"}, "wfbp"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": [["0.weight"]]}, "groups[0]"),
    ],
)
@on_ranks(2)
def test_options_that_cannot_be_used_are_refused_with_what_can(rank: int, options: dict[str, Any], text: str) -> None:
    with pytest.raises(fl.ConfigError) as error:
        wrap(make_model(), **options)
    assert text in str(error.value)


@on_ranks(2)
def test_parameter_in_two_groups_is_refused(rank: int) -> None:
    model = make_model()
    with pytest.raises(fl.ConfigError, match="'0.weight' is in groups 0 and 1"):
        wrap(model, groups=[[model[0].weight], [model[2].bias, model[0].weight]])


@on_ranks(2)
def test_failed_wrapping_leaves_the_optimizer_as_it_was(rank: int) -> None:
    model = make_model()
    plain = sgd(model)
    with pytest.raises(fl.ConfigError):
        fl.DistributedOptimizer(plain, codec="no_such")
    assert type(plain) is SGD
    train(model, plain, 0, range(2))
    assert torch.equal(weights(model), reference(1, 2, lambda p: SGD(p, lr=0.1, momentum=0.9)))


@on_ranks(2)
def test_more_backward_passes_than_declared(rank: int) -> None:
    for passes in (1, 2):
        model = make_model()
        optimizer = wrap(model, backward_passes_per_step=passes)
        for _ in range(passes):
            backward(model, rank)
        with pytest.raises(AssertionError, match=f"more than {passes} times .*backward_passes_per_step") as error:
            backward(model, rank)
        assert isinstance(error.value, fl.UsageError)
        optimizer.step()  # and after a step all is well again
        optimizer.zero_grad()
        for _ in range(passes):
            backward(model, rank)
        optimizer.step()


@looped("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_between_backward_and_step(rank: int, set_to_none: bool) -> None:
    model = make_model()
    optimizer = wrap(model)
    before = weights(model)
    for clear in (optimizer.zero_grad, model.zero_grad):
        backward(model, rank, 5)
        clear(set_to_none=set_to_none)
        optimizer.step()
        assert torch.equal(weights(model), before), "as without fusionlayer"
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
    assert torch.equal(weights(model), reference(2, 2, lambda p: SGD(p, lr=0.1, momentum=0.9)))
    optimizer.close()
    optimizer = wrap(model, overlap_forward=model)
    backward(model, rank)
    with pytest.raises(fl.UsageError, match=r"zero_grad\(\) was called after backward\(\) but before step\(\)"):
        optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    optimizer.close()


@on_ranks(2)
def test_a_backward_that_fails_may_be_made_again(rank: int) -> None:
    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    model = make_model()
    optimizer, handle = wrap(model), model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(model, rank, 5)
    handle.remove()
    with pytest.raises(fl.UsageError, match=r"as after an error in backward, after synchronize\(\)"):
        optimizer.zero_grad()
    optimizer.synchronize()
    train(model, optimizer, rank, range(2))
    assert torch.equal(weights(model), reference(2, 2, lambda p: SGD(p, lr=0.1, momentum=0.9)))


@on_ranks(2)
def test_zero_grad_within_an_accumulation_starts_it_anew(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    backward(model, rank, 5)
    optimizer.zero_grad()
    for _ in range(2):
        (loss_of(model, rank, 0) / 2).backward()
    optimizer.step()
    expected = reference(2, 1, lambda p: SGD(p, lr=0.1, momentum=0.9))
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-7)


def test_clipping_with_a_parameter_that_one_rank_does_not_use() -> None:
    """Reading the parameter groups reduces what there is, also where a rank has no gradient of something."""

    def rank_main(rank: int) -> tuple[float, Tensor]:
        model = make_model()
        optimizer = wrap(model)
        (loss_of(model, rank, 0) if rank else model[0].weight.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
        optimizer.step()
        return float(norm), weights(model)

    (norm, first), (other_norm, second) = local.run(rank_main, 2)
    assert norm == other_norm
    assert torch.equal(first, second)


def test_step_after_synchronize_warns_and_does_not_reduce_twice() -> None:
    def rank_main(rank: int) -> None:
        model = make_model()
        optimizer = wrap(model, op=fl.Sum)
        backward(model, rank)
        optimizer.synchronize()
        reduced = model[0].weight.grad.clone()
        optimizer.step()
        assert torch.equal(model[0].weight.grad, reduced)
        assert optimizer.reducer.engine.step == 1
        optimizer.zero_grad()
        backward(model, rank)
        optimizer.step()
        assert optimizer.reducer.engine.step == 2

    with pytest.warns(UserWarning, match=r"step\(\) called without optimizer\.skip_synchronize\(\)") as caught:
        local.run(rank_main, 2)
    assert {warning.filename for warning in caught} == {__file__}


@on_ranks(2)
def test_skip_synchronize_without_synchronize_is_refused(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model, overlap_forward=model)
    backward(model, rank)
    with pytest.raises(fl.UsageError, match=r"call synchronize\(\) first"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.step()
    optimizer.close()


@on_ranks(2)
def test_step_hooks_run_once_also_after_loading_state(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    train(model, optimizer, rank, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, range(1, 2))
    assert len(seen) == 2
    assert torch.equal(seen[1], model[0].weight.grad), "a pre-hook sees the reduced gradient"


@pytest.mark.filterwarnings("error")
@looped("before", [True, False])
@on_ranks(2)
def test_learning_rate_scheduler_made_before_or_after(rank: int, before: bool) -> None:
    """Rank 1 has no gradient in the last step."""
    model = make_model()
    optimizer: Optimizer = sgd(model)
    if before:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    optimizer = fl.DistributedOptimizer(optimizer, model.named_parameters())
    if not before:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    alone = make_model()
    plain = sgd(alone)
    for step in range(3):
        for each in (optimizer, plain):
            each.zero_grad()
        for peer in range(2 - step // 2):
            (loss_of(alone, peer, step) * 0.5).backward()
            if peer == rank:
                backward(model, rank, step)
        optimizer.step()
        plain.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        scheduler.step()
        plain.param_groups[0]["lr"] *= 0.5
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.1 * 0.5**3
    torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-7)


@on_ranks(1)
def test_scheduler_before_the_first_step_still_warns(rank: int) -> None:
    scheduler = StepLR(wrap(make_model()), 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@on_ranks(2)
def test_wrapping_the_same_parameters_twice_is_refused_until_the_first_is_closed(rank: int) -> None:
    """https://github.com/horovod/horovod/issues/3077: several optimizers of one model, for different epochs."""
    model = make_model()
    first = wrap(model)
    for again in (first, sgd(model)):
        with pytest.raises(fl.ConfigError, match="'0.weight' belongs to a DistributedOptimizer already"):
            fl.DistributedOptimizer(again, model.named_parameters())
    first.close()
    first.close()
    second = wrap(model)
    train(model, second, rank, range(2))
    assert torch.equal(weights(model), reference(2, 2, lambda p: SGD(p, lr=0.1, momentum=0.9)))


@on_ranks(2)
def test_closed_optimizer_is_a_plain_one(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    optimizer.close()
    train(model, optimizer, 0, range(2))
    assert torch.equal(weights(model), reference(1, 2, lambda p: SGD(p, lr=0.1, momentum=0.9)))


def test_dropped_optimizer_takes_its_hooks_and_thread_along() -> None:
    threads: list[threading.Thread] = []

    def rank_main(rank: int) -> None:
        model = make_model()
        optimizer = wrap(model)
        train(model, optimizer, rank, range(1))
        threads.append(optimizer.reducer.engine.lanes.all[0].worker._thread)
        fl.transport.local.current().barrier()
        del optimizer
        gc.collect()
        second = wrap(model)
        train(model, second, rank, range(1))

    local.run(rank_main, 2)
    assert len(threads) == 2
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive()


@on_ranks(2)
def test_copies_and_pickles_are_of_the_state_only(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model, codec="int4", error_feedback=True)
    train(model, optimizer, rank, range(1))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(fl.UsageError, match="state_dict"):
            copied(optimizer)
    state = optimizer.state_dict()
    assert torch.equal(
        pickle.loads(pickle.dumps(state))["fusionlayer"]["residuals"]["0.weight"],
        copy.deepcopy(state)["fusionlayer"]["residuals"]["0.weight"],
    )
    copy.deepcopy(model)
    pickle.dumps(model)


@on_ranks(2)
def test_parameters_on_two_devices_are_refused(rank: int) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(fl.ConfigError, match=r"\['cpu', 'meta'\]"):
        fl.DistributedOptimizer(SGD(parameters, lr=0.1))
    with pytest.raises(fl.ConfigError, match="no device"):
        fl.DistributedOptimizer(SGD([torch.zeros(2)], lr=0.1))


def test_a_job_that_has_failed_keeps_nothing() -> None:
    """What is left of it for later calls, its error, must not keep the program's frames, and so its model."""

    def fail(rank: int) -> weakref.ref[nn.Module]:
        model = make_model()
        made = wrap(model, codec="int8")
        if rank == 1:
            made.close()
        else:
            with suppress(fl.TransportError):
                backward(model, rank)
                made.step()
            with suppress(fl.TransportError):
                made.step()
        return weakref.ref(model)

    kept = local.run(fail, 2)
    gc.collect()
    assert [model() for model in kept] == [None, None]
