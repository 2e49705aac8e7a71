"""Shares in an engine: every way to a plan gives its buckets the shares, and the sums are those of equal shares."""

from dataclasses import replace

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import Bucket, FusionPlan, Slot
from fusionlayer.transport import Transport
from tests.ranks import on_threads

from .engines import MODEL, gradients, make_engine, run_step

WORLD, SHARES, OWN = 3, (2, 1, 0), (0, 0, 1)
PLAN = FusionPlan.build([MODEL[:3], MODEL[3:]], WORLD, "int", {}, "two_shot", 128)


def shares_in(plan: FusionPlan | None) -> set[tuple[int, ...]]:
    assert plan is not None
    return {bucket.shares for bucket in plan.buckets}


@on_threads(WORLD)
def test_sums_are_those_of_equal_shares_in_every_plan(transport: Transport) -> None:
    """In a plan that was learned, given, switched to and enrolled with."""
    equally = make_engine(transport.duplicate(), error_feedback=False)
    engine = make_engine(transport, error_feedback=False, shares=SHARES)
    for step in range(4):
        if step == 1:
            engine.switch(PLAN)
        elif step == 2:
            engine.switch(replace(PLAN, buckets=tuple(replace(bucket, shares=OWN) for bucket in PLAN.buckets)))
        elif step == 3:
            engine.enrol(MODEL, "the test says so", codec=codecs.get("int8"), plan=PLAN)
        if step == 1:
            equally.switch(PLAN)
        values = run_step(engine, gradients(transport.rank, step))
        equal_values = run_step(equally, gradients(transport.rank, step))
        assert shares_in(engine.plan) == {OWN if step == 2 else SHARES}
        assert shares_in(equally.plan) == {()}
        assert all(torch.equal(values[name], equal_values[name]) for name in values)
    engine.close()
    equally.close()


@on_threads(WORLD)
def test_buckets_that_the_caller_fuses_have_shares(transport: Transport) -> None:
    bucket = Bucket((Slot("w0", 300, 0),), 300, "float32", "int", {}, "two_shot")
    engine = make_engine(transport, MODEL[:1], shares=SHARES)
    for step in range(2):
        flat = gradients(transport.rank, step)["w0"]
        engine.submit_bucket(0, bucket, flat, step, lambda: None)
        engine.synchronize()
        assert engine.plan == FusionPlan((replace(bucket, shares=SHARES),), WORLD)
    engine.close()


@on_threads(WORLD)
def test_shares_of_another_collective_are_refused(transport: Transport) -> None:
    ring = replace(PLAN.buckets[0], algorithm="ring", shares=SHARES)
    plan = replace(PLAN, buckets=(ring, PLAN.buckets[1]))
    with pytest.raises(ConfigError, match=r"plan: bucket 0: shares=\[2, 1, 0\] with algorithm 'ring'"):
        make_engine(transport, plan=plan)
