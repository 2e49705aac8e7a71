"""What codecs lose, measured while training runs: the metric, the warning, and another codec where it is too much."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.observe import counts, metrics
from fusionlayer.scheduler.compression_error import EVERY, FIRST, LIMIT, relative_error
from fusionlayer.transport import local
from tests.tiers import needs

LENGTH, STEPS = 128, FIRST + 3


class Model(nn.Module):
    """Two parameters whose gradients are given, each in a bucket of its own."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        for name in (f"{prefix}even", f"{prefix}uneven"):
            self.register_parameter(name, nn.Parameter(torch.zeros(LENGTH)))


def gradients(rank: int, step: int, outlier: float) -> list[torch.Tensor]:
    """Return both; on rank 1 one value of the second is ``outlier``."""
    chance = torch.Generator().manual_seed(1000 * rank + step)
    even, uneven = torch.randn(2, LENGTH, generator=chance)
    if rank == 1:
        uneven[5] = outlier
    return [even, uneven]


class Trained(NamedTuple):
    """Weights and last averages, the codecs of the plan, and the metrics while it ran."""

    tensors: list[torch.Tensor]
    codecs: list[str]
    metrics: dict[str, float]


def trained(outlier: float, steps: int = STEPS, prefix: str = "", **options: Any) -> Callable[[int], Trained]:
    """Return what a rank does."""

    def body(rank: int) -> Trained:
        model = Model(prefix)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = fl.DistributedOptimizer(sgd, model, codec="int4", groups=2, **options)
        for step in range(steps):
            optimizer.zero_grad()
            given = gradients(rank, step, outlier)
            sum((p * g).sum() for p, g in zip(model.parameters(), given, strict=True)).backward()
            averages = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        plan = optimizer.reducer.engine.plan
        found = {name: bucket.codec for bucket in plan.buckets for name in bucket.names}
        seen = metrics.read()
        optimizer.close()
        weights = [p.detach() for p in model.parameters()]
        return Trained(weights + averages, [found[f"{prefix}even"], found[f"{prefix}uneven"]], seen)

    return body


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_bucket_with_an_outlier_falls_back_on_all_ranks_in_one_step(caplog: pytest.LogCaptureFixture) -> None:
    one, other = local.run(trained(1e4, fallback="raw"), 2)
    assert one.codecs == other.codecs == ["int", "raw"]
    assert all(map(torch.equal, one.tensors, other.tensors))
    exact = sum(gradients(rank, STEPS - 1, 1e4)[1] for rank in range(2)) / 2
    assert torch.equal(one.tensors[3], exact)
    warned, fell = warnings(caplog)
    assert warned.startswith("rank 1: bucket ") and "(uneven) loses 1.0" in warned and "more than 0.8" in warned
    assert fell.startswith("bucket ") and "uses raw" in fell and "instead of int" in fell


def test_without_a_fallback_there_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    for feedback in (True, False):
        caplog.clear()
        one, other = local.run(trained(1e4, EVERY + STEPS, error_feedback=feedback), 2)
        assert one.codecs == ["int", "int"] and all(map(torch.equal, one.tensors, other.tensors))
        (warned,) = warnings(caplog)
        assert warned.startswith("rank 1: bucket ") and "(uneven) loses" in warned


def test_a_run_without_outliers_neither_warns_nor_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"fallback": "raw"}, {"error_feedback": False}, {"feedback_bits": 8}):
        one, _ = local.run(trained(1.0, **options), 2)
        assert one.codecs == ["int", "int"] and not warnings(caplog)


def test_the_error_is_a_metric_of_each_bucket() -> None:
    # Names of its own: engines of other tests may not be gone yet.
    _, _, seen = local.run(trained(1.0, prefix="measured "), 2)[0]
    errors = {tuple(name.split("/")[2:]): value for name, value in seen.items() if name.startswith("compression_error")}
    assert 0.05 < errors["int", "measured even"] < 0.3 and 0.05 < errors["int", "measured uneven"] < 0.3


@needs("prometheus_client")
def test_prometheus_gets_the_labels() -> None:
    from prometheus_client import metrics_core

    labels = ("bucket", "3"), ("codec", "int4"), ("tensor", "a.weight")
    two = [counts.Labelled("compression_error", labels, value) for value in (0.1, 0.2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "_labelled", [lambda: two])
        families = {family.name: family for family in metrics._Collector(metrics_core).collect()}
        assert metrics.read()["compression_error/3/int4/a.weight"] == 0.2
    (sample,) = families["fusionlayer_compression_error"].samples
    assert sample.labels == dict(labels) and sample.value == 0.2


def test_the_error_leaves_out_the_largest_values() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    lost = 0.1 * x
    x[7] = 1e6
    assert float(relative_error(x, lost)) == pytest.approx(0.1, rel=1e-3)
    assert float(relative_error(torch.zeros(10), torch.zeros(10))) == 0
    assert float(relative_error(torch.ones(1), torch.full((1,), 0.5))) == 0.5


def test_no_codec_that_trains_without_feedback_warns_on_gradients_with_heavy_tails() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.distributions.StudentT(3.0).sample((1 << 14,))
    for name in codecs.names():
        codec = codecs.get(name)
        if not codec.needs_feedback:
            back = codec.decompress(codec.compress(x), x.numel())
            assert float(relative_error(x, x - back)) < LIMIT, name


def test_what_does_not_go_with_a_fallback_is_refused() -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            fl.DistributedOptimizer(torch.optim.SGD(Model().parameters(), 0.1), **options)

    def body(rank: int) -> None:
        refused("fallback='raw' with codec 'auto'", codec="auto", fallback="raw")
        refused("unknown codec 'in8'", codec="int4", fallback="in8")
        refused("a fallback, which measure", codec="int4", fallback="raw", sync=fl.Local(every=4))

    local.run(body, 2)
