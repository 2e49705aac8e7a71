"""Calls on tensors whose memory is irregular give what they give on contiguous copies, compressed or not."""

from __future__ import annotations

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


def room(like: Tensor, layout: Layout) -> Tensor:
    """Return an output for as many elements as ``like`` has."""
    return layout(torch.full((like.numel(),), -7.0))


def in_place(name: str, *args: Any) -> Callable[..., list[Tensor]]:
    def call(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
        getattr(group, name)([x], *args).wait()
        return [x]

    return call


def options(kind: str, root: int) -> Any:
    made = getattr(dist, kind)()
    made.rootRank = root
    return made


def all_gather(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    outs = [room(x, layout) for _ in range(WORLD)]
    group.allgather([outs], [x]).wait()
    return outs


def all_gather_single(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = layout(torch.zeros(x.numel() * WORLD))
    group._allgather_base(out, x).wait()
    return [out]


def all_gathers(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    outs = [layout(torch.zeros(x.numel() * WORLD)) for _ in range(2)]
    group.allgather_into_tensor_coalesced(outs, [x, x]).wait()
    return outs


def gather(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    outs = [[room(x, layout) for _ in range(WORLD)]] if rank == 1 else []
    group.gather(outs, [x], options("GatherOptions", 1)).wait()
    return outs[0] if outs else []


def scatter(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = room(x, layout)
    group.scatter([out], [[x, x]] if rank == 0 else [], options("ScatterOptions", 0)).wait()
    return [out]


def reduce_scatter(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = room(x, layout)
    group.reduce_scatter([out], [[x, x]], dist.ReduceScatterOptions()).wait()
    return [out]


def reduce_scatter_single(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = layout(torch.zeros(x.numel() // WORLD))
    group._reduce_scatter_base(out, x, dist.ReduceScatterOptions()).wait()
    return [out]


def reduce_scatters(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    outs = [layout(torch.zeros(x.numel() // WORLD)) for _ in range(2)]
    group.reduce_scatter_tensor_coalesced(outs, [x, x], dist.ReduceScatterOptions()).wait()
    return outs


def all_to_all(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    outs = [room(x, layout) for _ in range(WORLD)]
    group.alltoall(outs, [x, x]).wait()
    return outs


def all_to_all_single(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = room(x, layout)
    group.alltoall_base(out, x, [], []).wait()
    return [out]


def coalesced(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    xs = [x, layout(x.flatten() * 1)]
    group.allreduce_coalesced(xs).wait()
    return xs


def swap(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = room(x, layout)
    works = [group.send([x], 1 - rank, 3), group.recv([out], 1 - rank, 3)]
    for work in works:
        work.wait()
    return [out]


def batch(rank: int, group: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    out = room(x, layout)
    ops = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, out, 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


IN_PLACE = [in_place("allreduce"), in_place("broadcast", options("BroadcastOptions", 1)), coalesced]
IN_PLACE += [in_place("reduce", options("ReduceOptions", 1))]
GATHERS = [all_gather, all_gather_single, all_gathers, gather]
OTHERS = [scatter, reduce_scatter, reduce_scatter_single, reduce_scatters, all_to_all, all_to_all_single, swap, batch]


def compare(rank: int, world: int) -> list[str]:
    """Return what differs from the same call on contiguous tensors."""
    group: Any = dist.new_group(pg_options=POLICY)
    plain: Any = dist.new_group(backend="gloo")
    wrong = []
    cases = [(call, layout, layout) for call, layout in itertools.product(IN_PLACE, OUTPUTS)]
    cases += [(call, INPUTS[i % 6], OUTPUTS[i % 4]) for call in GATHERS + OTHERS for i in range(6)]
    for numel, (call, given, taken) in itertools.product((16, 4096), cases):
        x = given(values(numel, numel + rank))
        same = x.clone(memory_format=torch.contiguous_format).resolve_neg()
        got, want = call(rank, group, x, taken), call(rank, plain, same, contiguous)
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            wrong.append(f"{call.__name__} {numel} from {given.__name__} to {taken.__name__}")
    assert backend.traffic(group).calls.total() > 50
    return wrong


def refuse(rank: int, world: int) -> None:
    group: Any = dist.new_group(pg_options=POLICY)
    for numel in (4, 4096):
        for out in (torch.zeros(1).expand(numel), torch.zeros(numel).as_strided((numel - 1, 2), (1, 1))):
            calls: list[Callable[[], Any]] = [
                partial(group.allreduce, [out]),
                partial(group.recv, [out], 1 - rank, 0),
                partial(group.scatter, [out], [], options("ScatterOptions", 0)),
                partial(dist.all_reduce, out, group=group),
            ]
            for call in calls:
                with pytest.raises(UsageError, match=r"an output of shape \(.* has elements that share memory"):
                    call()

    complex_column = torch.full((6, 2), 1 + rank * 1j)[:, 1].conj()
    group.broadcast([complex_column], options("BroadcastOptions", 1)).wait()
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


@pytest.mark.medium
def test_outputs_whose_elements_share_memory_are_refused() -> None:
    run_ranks(refuse, WORLD, backend="fusionlayer")


@pytest.mark.short
def test_regular_tensors_are_not_copied() -> None:
    x, sparse, copies = torch.ones(2, 3), torch.eye(2).to_sparse(), Copies("call")
    given = copies.update([[x, sparse], []])
    assert given[0][0] is x and given[0][1] is sparse and not copies
    assert copies.read(x.t()) is not x and copies
