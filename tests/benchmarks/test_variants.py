"""Names of variants: what they stand for, and what is none."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from benchmarks.training.methods import select
from benchmarks.variants import Variant
from fusionlayer.base.plan import FusionPlan
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads


@looped(
    "name, complaint",
    [
        ("dgcc", "unknown codec 'dgcc'; did you mean 'dgc'?"),
        ("dgc+safusoin", "unknown word 'safusoin'; did you mean 'safusion'?"),
        ("dgc+density=2", "density=2"),
        ("dynamiq+algorithm=rin", "did you mean 'ring'?"),
        ("dgc+algorithm=gather+algorithm=two_sho", "two_sho"),
        ("dgc+densty=0.1", "densty"),
    ],
)
def test_what_is_no_variant_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("?", r"\?")):
        Variant.parse(name)
    with pytest.raises(ValueError, match="unknown method 'dgcc'" if name == "dgcc" else complaint.replace("?", r"\?")):
        select([name])


def test_a_variant_wraps_an_optimizer() -> None:
    def plan(transport: Transport) -> FusionPlan:
        model = nn.Linear(4, 2)
        optimizer = Variant.parse("topk+behind+single").wrap(SGD(model.parameters(), 0.1), model)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        found: FusionPlan = optimizer.fusion_plan  # type: ignore[attr-defined]
        return found

    for found in over_threads(2, plan):
        (bucket,) = found.buckets
        assert (bucket.codec, bucket.algorithm, bucket.ahead) == ("topk", "one_shot", False)


def test_a_variant_that_sends_momentum_brings_its_optimizer() -> None:
    def codecs(transport: Transport) -> list[str]:
        model = nn.Linear(4, 2)
        variant = Variant.parse("onebit+freeze_step=1+warmup_codec=bf16")
        optimizer = variant.wrap(AdamW(model.parameters(), 0.1, betas=(0.8, 0.9)), model)
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        found = []
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            found.append(optimizer.fusion_plan.buckets[0].codec)  # type: ignore[attr-defined]
        return found

    assert over_threads(2, codecs) == [["bf16", "onebit"]] * 2
