"""A bit that flips between two processes is an error on every rank, for every front and kind of codec."""

import hashlib
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.optim import SGD

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.base.config import Config
from fusionlayer.parallel.moe import Dispatcher
from fusionlayer.parallel.tensor_parallel import Channel
from fusionlayer.transport import C10dTransport
from tests.flips import Flips
from tests.harness import outcomes_of, run_ranks
from tests.integrations.training import make_model, train, weights
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

SENDER, WORLD = 1, 3


def x(rank: int, *shape: int) -> Tensor:
    return gradient(torch.Size(shape).numel(), 77 + rank).view(shape)


def optimizer(rank: int, **options: Any) -> Tensor:
    model = make_model()
    made = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters(), planner="wfbp", **options)
    train(model, made, rank, range(2))
    made.close()
    return weights(model)


def sharded(rank: int) -> Tensor:
    model = make_model()
    made = fl.ShardedOptimizer(model.parameters(), SGD, weights="qwd", gradients="int8", lr=0.1)
    train(model, made, rank, range(2))
    return weights(model)


def large_sum(rank: int) -> Tensor:
    """A sum between nodes that is large enough for the ring."""
    total = x(rank, 300_000)
    fl.context.transport().all_reduce(total)
    return total


def tensor_parallel(rank: int) -> Tensor:
    return Channel(fl.context.transport(), "int8").reduce(x(rank, 64, 64))


def experts(rank: int) -> Tensor:
    dispatcher = Dispatcher(fl.context.transport(), "raw")
    arrived, route = dispatcher.dispatch(x(rank, 30, 16), [10, 10, 10])
    return dispatcher.combine(arrived, route)


def horovod(rank: int) -> Tensor:
    hvd.init()
    try:
        small = hvd.allreduce(x(rank, 100), name="small")
        large = hvd.allreduce(x(rank, 60_000), name="large")
        return torch.cat([small, large, hvd.allgather(x(rank, 200), name="all")])
    finally:
        hvd.shutdown()


def backend(rank: int) -> Tensor:
    group = dist.new_group(backend="fusionlayer", pg_options={"min_bytes": 0, "rules": [{"codec": "int8"}]})
    total = x(rank, 5000)
    try:
        dist.all_reduce(total, group=group)
    finally:
        dist.destroy_process_group(group)
    return total


CASES: dict[str, Callable[[int], Tensor]] = {
    "optimizer raw": lambda rank: optimizer(rank, codec="raw"),
    "optimizer int8": lambda rank: optimizer(rank, codec="int8"),
    "optimizer topk": lambda rank: optimizer(rank, codec="topk"),
    "optimizer powersgd": lambda rank: optimizer(rank, codec="powersgd", warmup_steps=0),
    "optimizer zip": lambda rank: optimizer(rank, codec="zip"),
    "optimizer dynamiq": lambda rank: optimizer(rank, codec="dynamiq"),
    "optimizer thc": lambda rank: optimizer(rank, codec="thc"),
    "optimizer ahead": lambda rank: optimizer(rank, codec="int8", ahead=True),
    "sharded": sharded,
    "all_reduce": lambda rank: fl.all_reduce(x(rank, 5000)),
    "large sum": large_sum,
    "all_gather": lambda rank: fl.all_gather(x(rank, 700), codec="int8"),
    "reduce_scatter": lambda rank: fl.reduce_scatter(x(rank, 3 * 700), codec="int8"),
    "all_to_all": lambda rank: fl.all_to_all(x(rank, 3 * 700)),
    "broadcast": lambda rank: torch.frombuffer(
        bytearray(fl.functional.broadcast_bytes(x(rank, 500).numpy().tobytes(), SENDER)), dtype=torch.uint8
    ),
    "tensor parallel": tensor_parallel,
    "experts": experts,
    "hvd": horovod,
    "backend": backend,
}


def run(rank: int, case: str, flips: Flips) -> tuple[str, str, tuple[int, ...]]:
    """Return how one run ended: the hash of its result, or text and ranks of its error."""
    torch.manual_seed(0)
    try:
        result = CASES[case](rank)
        flips.disarm()
        fl.context.transport().barrier()  # ranks that the damage did not reach learn of it in their next call
        return hashlib.sha256(result.detach().contiguous().numpy().tobytes()).hexdigest(), "", ()
    except (fl.FusionLayerError, RuntimeError) as error:
        return "", str(error), tuple(getattr(error, "ranks", ()))


def flip_bits(rank: int, world: int, folder: str, settings: str, cases: list[str], rounds: int) -> dict[str, list[Any]]:
    """Return for each case how it ended without a flip and then with one in each round, and whether a bit was flipped.

    With one round the bit is in the longest message.
    """
    path = Path(folder) / f"settings.{rank}.yaml"
    path.write_text(settings)
    os.environ["FUSIONLAYER_CONFIG"] = str(path)
    chosen = random.Random(5)
    found: dict[str, list[Any]] = {case: [] for case in cases}
    with Flips() as flips:
        for case in cases:
            lengths: list[int] = []
            for number in range(rounds + 1):
                fl.init()
                fl.context.transport().barrier()
                if not number or rank != SENDER:
                    flips.arm()
                elif rounds == 1:
                    # In the middle, and in the exponent if the message has floats.
                    flips.arm(bit=max(lengths) // 8 * 32 + 30, length=max(lengths))
                else:
                    at = chosen.randrange(len(lengths))
                    flips.arm(at, chosen.randrange(8 * lengths[at]))
                end = run(rank, case, flips)
                lengths = lengths or flips.lengths
                found[case].append((end, flips.done))
                flips.disarm()
                dist.barrier()
                fl.shutdown()
    return found


def assert_told_or_harmless(found: list[dict[str, list[Any]]], rounds: int) -> dict[str, int]:
    """See that every flip was an error that names the same two ranks on every rank, or changed nothing."""
    told = dict.fromkeys(found[0], 0)
    for case in found[0]:
        ends = [each[case] for each in found]
        assert all(end[0][0][0] for end in ends), (case, "without a flip", ends)
        for number in range(1, rounds + 1):
            now = [end[number][0] for end in ends]
            if all(end[number][0] == end[0][0] for end in ends):
                continue  # nothing has changed
            links = [re.search(f"from rank {SENDER} to rank ([02]) was damaged on its way", text) for _, text, _ in now]
            assert any(links) and all(text for _, text, _ in now), (case, now)
            # Where ranks fail while they make a connection, some learn only that a rank did not come.
            if rounds == 1:
                assert all(links), (case, now)
                if case != "hvd":  # Horovod's error has no ranks
                    assert all(len(ranks) == 2 and SENDER in ranks and ranks == now[0][2] for *_, ranks in now), repr(
                        now
                    )
            told[case] += 1
    return told


# A flip while ranks connect may leave one waiting until the deadline.
DEFAULT = "{ranks_per_node: 1, timeout: 8}"
# One of each way to the transport.
FAST = ["optimizer raw", "optimizer powersgd", "optimizer ahead", "sharded", "all_gather", "experts"]
FAST += ["tensor parallel", "hvd", "backend"]


def test_a_flipped_bit_is_told_on_every_rank(tmp_path: Path) -> None:
    """By default between nodes, which every rank is here."""
    found = run_ranks(flip_bits, WORLD, str(tmp_path), DEFAULT, FAST, 1)
    assert all(assert_told_or_harmless(found, 1).values())


def test_a_flipped_bit_in_a_large_sum_is_told_where_sums_are_checked(tmp_path: Path) -> None:
    settings = "{ranks_per_node: 1, checksum: true, timeout: 20}"
    found = run_ranks(flip_bits, WORLD, str(tmp_path), settings, ["large sum"], 1)
    assert all(assert_told_or_harmless(found, 1).values())


@exhaustive(guarded_by="tests/integrations/test_flips.py::test_a_flipped_bit_is_told_on_every_rank")
def test_any_bit_of_any_message(tmp_path: Path) -> None:
    """``benchmarks.faults`` has 30 rounds of each front; here are two of those that the fast tier leaves out."""
    cases = [case for case in CASES if case not in FAST]
    assert_told_or_harmless(run_ranks(flip_bits, WORLD, str(tmp_path), DEFAULT, cases, 2), 2)


@on_processes(2)
def test_who_has_checksums_is_agreed(rank: int, world: int) -> None:
    with pytest.raises(fl.PlanMismatch, match=r"checksum differs over ranks .*\[1\] differ.* rank 1: true"):
        C10dTransport(timeout=20, checksum=True if rank == SENDER else None)
    for node, checksum, checked in [(0, None, False), (0, True, True), (rank, None, True), (rank, False, False)]:
        transport = C10dTransport(timeout=20, node=str(node), checksum=checksum)
        assert transport.subset(range(world)).duplicate()._checked == {r for r in range(world) if checked and r != rank}


class DamagedStage(fl.pipeline.PipelineStage):
    """Flips a bit of each activation on its way."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.clone()
            op.tensor.view(-1).view(torch.uint8)[-1] ^= 2
        return ops


def run_pipeline(rank: int, world: int, codec: str) -> None:
    fl.init(settings=Config(checksum=True, timeout=20))
    stage = DamagedStage(nn.Linear(48, 48), rank, world, torch.device("cpu"), codec=codec, warmup_steps=codec == "int4")
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
    schedule.step(*([x(9, 8, 48)] if rank == 0 else []), **({"target": x(8, 8, 48)} if rank else {}))


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_flipped_bit_between_stages_is_told(codec: str) -> None:
    """Where torch moves the bytes, messages have headers; also those that travel uncompressed at first (int4)."""
    _, last = outcomes_of(run_pipeline, 2, codec)
    assert last.error[0] == "WireError" and "damaged on its way" in last.error[1], last
