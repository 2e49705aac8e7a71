"""What torch's profilers show of compressed calls."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from fusionlayer import backend
from tests.harness import run_ranks

pytestmark = pytest.mark.medium

RULES = {"min_bytes": 0, "rules": [{"codec": "int8", "op": list(backend.OPS)}]}
SHOWN = [
    ("fusionlayer:all_reduce", [[3, 4]]),
    ("fusionlayer:reduce_scatter", [[6], [6]]),
    ("fusionlayer:all_gather", [[5]]),
    ("fusionlayer:all_to_all", [[2, 7]]),
]


def call_all(world: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3, 4), group=group)
    dist.reduce_scatter(torch.ones(6), [torch.ones(6) for _ in range(world)], group=group)
    dist.all_gather([torch.ones(5) for _ in range(world)], torch.ones(5), group=group)
    dist.all_to_all_single(torch.ones(world, 7), torch.ones(world, 7), group=group)


def look(rank: int, world: int) -> tuple[list[tuple[str, list[list[int]]]], set[bool]]:
    """Return names and shapes of this rank's events, and whether they are asynchronous."""
    group = dist.new_group(pg_options=RULES)
    call_all(world, group)  # without a profiler
    with profile(record_shapes=True) as seen:
        call_all(world, group)
    with profile() as ended:
        if rank == 0:
            late = dist.all_reduce(torch.ones(8), group=group, async_op=True)
    dist.barrier()
    if rank > 0:  # only now is rank 0's call able to end
        late = dist.all_reduce(torch.ones(8), group=group, async_op=True)
    late.wait()
    assert ended.function_events is not None
    events = [event for event in seen.function_events or [] if event.name.startswith(("fusionlayer:", "gloo:"))]
    return [(event.name, event.input_shapes) for event in events], {event.is_async for event in events}


def test_a_compressed_call_is_one_asynchronous_event_with_the_shapes_of_its_inputs() -> None:
    for shown, asynchronous in run_ranks(look, 2, backend="fusionlayer"):
        assert shown == SHOWN and asynchronous == {True}
