"""Calls on tensors whose memory is irregular give what they give on contiguous copies, compressed or not."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer import backend
from fusionlayer.backend.regular import Copies
from fusionlayer.base.errors import UsageError
from tests.harness import run_ranks
from tests.ranks import on_processes

# Sums of whole numbers are exact, and the codec is lossless: results are compared bit for bit.
POLICY = {"min_bytes": 2048, "rules": [{"codec": "zip", "op": list(backend.OPS)}]}
WORLD = 2

Layout = Callable[[Tensor], Tensor]


def columns(x: Tensor) -> Tensor:
    wide = x.new_zeros(x.numel() // 4, 8)
    wide[:, 1::2] = x.view(-1, 4)
    return wide[:, 1::2]


def transposed(x: Tensor) -> Tensor:
    return x.view(-1, 4).t().contiguous().t()


def negated(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag.view(-1, 4)


def contiguous(x: Tensor) -> Tensor:
    return x.clone().view(-1, 4)


def expanded(x: Tensor) -> Tensor:
    return x[:4].expand(x.numel() // 4, 4)


def windows(x: Tensor) -> Tensor:
    return x.as_strided((x.numel() // 4, 4), (1, 1))


OUTPUTS: list[Layout] = [columns, transposed, negated, contiguous]
INPUTS: list[Layout] = [*OUTPUTS, expanded, windows]


def values(numel: int, seed: int) -> Tensor:
    return torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(seed)).float()


def rooted(kind: str, root: int) -> Any:
    made = getattr(dist, kind)()
    made.rootRank = root
    return made


def batch(group: Any, rank: int, x: Tensor, outs: list[Tensor]) -> list[dist.Work]:
    ops = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, outs[0], 1 - rank, group)]
    return dist.batch_isend_irecv(ops)


# How many outputs a call has, 0 for one in place, how many times the elements of its input each has, and its start.
SCATTER: Any = dist.ReduceScatterOptions()
CALLS: dict[str, tuple[int, float, Callable[..., Any]]] = {
    "all_reduce": (0, 1, lambda g, rank, x, outs: g.allreduce(outs[:1])),
    "coalesced": (0, 1, lambda g, rank, x, outs: g.allreduce_coalesced(outs)),
    "broadcast": (0, 1, lambda g, rank, x, outs: g.broadcast(outs[:1], rooted("BroadcastOptions", 1))),
    "reduce": (0, 1, lambda g, rank, x, outs: g.reduce(outs[:1], rooted("ReduceOptions", 1))),
    "all_gather": (2, 1, lambda g, rank, x, outs: g.allgather([outs], [x])),
    "all_gather_single": (1, 2, lambda g, rank, x, outs: g._allgather_base(outs[0], x)),
    "all_gathers": (2, 2, lambda g, rank, x, outs: g.allgather_into_tensor_coalesced(outs, [x, x])),
    "gather": (2, 1, lambda g, rank, x, outs: g.gather([outs] * rank, [x], rooted("GatherOptions", 1))),
    "scatter": (1, 1, lambda g, rank, x, outs: g.scatter(outs, [[x, x]] * (1 - rank), rooted("ScatterOptions", 0))),
    "reduce_scatter": (1, 1, lambda g, rank, x, outs: g.reduce_scatter(outs, [[x, x]], SCATTER)),
    "reduce_scatter_single": (1, 0.5, lambda g, rank, x, outs: g._reduce_scatter_base(outs[0], x, SCATTER)),
    "reduce_scatters": (2, 0.5, lambda g, rank, x, outs: g.reduce_scatter_tensor_coalesced(outs, [x, x], SCATTER)),
    "all_to_all": (2, 1, lambda g, rank, x, outs: g.alltoall(outs, [x, x])),
    "all_to_all_single": (1, 1, lambda g, rank, x, outs: g.alltoall_base(outs[0], x, [], [])),
    "swap": (1, 1, lambda g, rank, x, outs: [g.send([x], 1 - rank, 3), g.recv(outs, 1 - rank, 3)]),
    "batch": (1, 1, batch),
}


def call(name: str, group: Any, rank: int, x: Tensor, layout: Layout) -> list[Tensor]:
    count, times, start = CALLS[name]
    outs = [layout(torch.full((int(times * x.numel()),), -7.0)) for _ in range(count)]
    outs = outs or [x, layout(x.flatten() * 1)]
    works = start(group, rank, x, outs)
    for work in works if isinstance(works, list) else [works]:
        work.wait()
    return outs


def compare(rank: int, world: int) -> list[str]:
    """Return what differs from the same call on contiguous tensors."""
    group: Any = dist.new_group(pg_options=POLICY)
    plain: Any = dist.new_group(backend="gloo")
    wrong = []
    cases = [(name, layout, layout) for name, (count, *_) in CALLS.items() if not count for layout in OUTPUTS]
    cases += [(name, INPUTS[i], OUTPUTS[i % 4]) for name, (count, *_) in CALLS.items() if count for i in range(6)]
    for numel, (name, given, taken) in itertools.product((16, 4096), cases):
        x = given(values(numel, numel + rank))
        same = x.clone(memory_format=torch.contiguous_format).resolve_neg()
        got, want = call(name, group, rank, x, taken), call(name, plain, rank, same, contiguous)
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            wrong.append(f"{name} {numel} from {given.__name__} to {taken.__name__}")
    assert backend.traffic(group).calls.total() > 50
    return wrong


@pytest.mark.medium
@on_processes(WORLD, backend="fusionlayer")
def test_outputs_whose_elements_share_memory_are_refused(rank: int, world: int) -> None:
    group: Any = dist.new_group(pg_options=POLICY)
    for numel in (4, 4096):
        for out in (torch.zeros(1).expand(numel), torch.zeros(numel).as_strided((numel - 1, 2), (1, 1))):
            calls: list[Callable[[], Any]] = [
                partial(group.allreduce, [out]),
                partial(group.recv, [out], 1 - rank, 0),
                partial(group.scatter, [out], [], rooted("ScatterOptions", 0)),
                partial(dist.all_reduce, out, group=group),
            ]
            for call in calls:
                with pytest.raises(UsageError, match=r"an output of shape \(.* has elements that share memory"):
                    call()

    complex_column = torch.full((6, 2), 1 + rank * 1j)[:, 1].conj()
    group.broadcast([complex_column], rooted("BroadcastOptions", 1)).wait()
    assert torch.equal(complex_column.resolve_conj(), torch.full((6,), 1 - 1j))
    with torch.inference_mode():
        x = torch.ones(6, 2)
    work = group.allreduce([x[:, 0]])
    assert work.wait() and work.is_success() and work.get_future().wait()[0].data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.tensor([[2.0, 1.0]] * 6)), "an inference tensor, written outside inference mode"


@pytest.mark.medium
def test_irregular_tensors_give_what_contiguous_ones_give() -> None:
    wrong = run_ranks(compare, WORLD, backend="fusionlayer")
    assert wrong == [[], []]


def test_regular_tensors_are_not_copied() -> None:
    x, sparse, copies = torch.ones(2, 3), torch.eye(2).to_sparse(), Copies("call")
    given = copies.update([[x, sparse], []])
    assert given[0][0] is x and given[0][1] is sparse and not copies
    assert copies.read(x.t()) is not x and copies
