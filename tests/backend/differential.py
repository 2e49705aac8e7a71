"""Random calls of torch.distributed, made on two groups whose results and errors must be the same."""

import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
REDUCTIONS = (*SUMS, *SUMS, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


class Case:
    """One call: what all ranks know of it, and this rank's values."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.draw = random.Random(seed)
        self.rank, self.size = rank, size
        self.op = self.draw.choice(sorted(OPS))
        self.dtype = self.draw.choice((*FLOATS, *FLOATS, *DTYPES))
        self.shape = tuple(self.draw.choice((1, 2, 3, 7, 64, 300)) for _ in range(self.draw.choice((1, 1, 2))))
        self.async_op = self.draw.random() < 0.5
        self.reduction = self.draw.choice(REDUCTIONS)
        self.wrong = self.draw.random() < 0.1
        self.root = self.draw.randrange(size)
        self.values = torch.Generator().manual_seed(seed * 100 + rank)

    def tensor(self, *shape: int) -> Tensor:
        """Small integers of the case's type: their sums are exact in any order."""
        return torch.randint(0, 4, shape or self.shape, generator=self.values).to(self.dtype)

    def finish(self, work: Any) -> None:
        assert (work is not None) == self.async_op, work
        if work is not None:
            if self.draw.random() < 0.3:
                work.wait(timedelta(seconds=180))
            else:
                work.wait()

    def __str__(self) -> str:
        wrong = ", wrong" if self.wrong else ""
        return f"{self.op} {self.dtype} {self.shape} {self.reduction} async={self.async_op} of {self.size}{wrong}"


def all_reduce(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    case.finish(dist.all_reduce(x, case.reduction, group, case.async_op))
    return [x]


def all_reduce_transposed(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor(5, 2).t()
    x = x if case.wrong else x.contiguous()
    case.finish(dist.all_reduce(x, case.reduction, group, case.async_op))
    return [x]


def coalesced_sums(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    xs = [case.tensor(), case.tensor(5), case.tensor(2, 3)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x, group=group)
    manager.wait()
    return xs


def reduce_scatter(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    xs = [case.tensor() for _ in range(case.size + case.wrong)]
    out = torch.zeros_like(xs[0])
    case.finish(dist.reduce_scatter(out, xs, case.reduction, group, case.async_op))
    return [out]


def reduce_scatter_single(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor(case.size * case.shape[0] + case.wrong, *case.shape[1:])
    out = torch.zeros_like(x[: case.shape[0]])
    case.finish(dist.reduce_scatter_tensor(out, x, case.reduction, group, case.async_op))
    return [out]


def all_gather(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    outs = [torch.zeros_like(x) for _ in range(case.size + case.wrong)]
    case.finish(dist.all_gather(outs, x, group, case.async_op))
    return outs


def all_gather_single(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    out = torch.zeros(case.size * x.shape[0] + case.wrong, *x.shape[1:], dtype=x.dtype)
    case.finish(dist.all_gather_into_tensor(out, x, group, case.async_op))
    return [out]


def gather_in_place(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    out = torch.zeros(case.size * case.shape[0], *case.shape[1:], dtype=case.dtype)
    mine = out.view(case.size, *case.shape)[case.rank].copy_(case.tensor())
    case.finish(dist.all_gather_into_tensor(out, mine, group, case.async_op))
    return [out]


def coalesced_gathers(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    xs = [case.tensor(), case.tensor(5)]
    outs = [torch.zeros(case.size * x.shape[0], *x.shape[1:], dtype=x.dtype) for x in xs]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x, group)
    manager.wait()
    return outs


def all_to_all_single(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor(case.size * case.shape[0] + case.wrong, *case.shape[1:])
    out = torch.zeros_like(x)
    case.finish(dist.all_to_all_single(out, x, None, None, group, case.async_op))
    return [out]


def uneven_all_to_all(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    counts = [[case.draw.randrange(4) * case.shape[0] for _ in range(case.size)] for _ in range(case.size)]
    sends, recvs = counts[case.rank], [theirs[case.rank] for theirs in counts]
    x = case.tensor(sum(sends) + case.wrong, *case.shape[1:])
    out = torch.zeros(sum(recvs), *case.shape[1:], dtype=x.dtype)
    case.finish(dist.all_to_all_single(out, x, recvs, sends, group, case.async_op))
    return [out]


def all_to_all(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    xs = [case.tensor() for _ in range(case.size + case.wrong)]
    outs = [torch.zeros_like(x) for x in xs]
    case.finish(dist.all_to_all(outs, xs, group, case.async_op))
    return outs


def ring(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x, out = case.tensor(), torch.zeros(case.shape, dtype=case.dtype)
    following, previous = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    if case.size > 1:
        receives = dist.irecv(out, group=group, group_src=previous, tag=3)
        sends = dist.isend(x, group=group, group_dst=following, tag=3)
        receives.wait()
        sends.wait()
    return [out]


def batch(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x, outs = case.tensor(), [torch.zeros(case.shape, dtype=case.dtype) for _ in range(case.size)]
    others = [peer for peer in range(case.size) if peer != case.rank]
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer in others]
    ops += [dist.P2POp(dist.irecv, outs[peer], group=group, group_peer=peer) for peer in others]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return outs


def from_anyone(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    if case.rank == 0 and case.size > 1:
        for _ in range(case.size - 1):
            source = dist.recv(x, group=group)
            assert source in dist.get_process_group_ranks(group)
        return []  # the last comer's
    if case.size > 1:
        dist.send(x, group=group, group_dst=0)
    return [x]


def broadcast(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    case.finish(dist.broadcast(x, group=group, group_src=case.root, async_op=case.async_op))
    return [x]


def reduce(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    reduction = dist.ReduceOp.SUM if case.reduction == dist.ReduceOp.AVG else case.reduction
    case.finish(dist.reduce(x, group=group, group_dst=case.root, op=reduction, async_op=case.async_op))
    return [x] if case.rank == case.root else []


def gather_and_scatter(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x, out = case.tensor(), torch.zeros(case.shape, dtype=case.dtype)
    every = [torch.zeros_like(x) for _ in range(case.size)] if case.rank == case.root else None
    dist.gather(x, every, group=group, group_dst=case.root)
    dist.scatter(out, every, group=group, group_src=case.root)
    return [out, *(every or [])]


def barrier(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    x = case.tensor()
    work = dist.all_reduce(x, group=group, async_op=True)
    case.finish(dist.barrier(group, case.async_op))
    work.wait()
    return [x]


Op = Callable[[Case, dist.ProcessGroup], list[Tensor]]
OPS: dict[str, Op] = {
    op.__name__: op
    for op in (
        *(all_reduce, all_reduce_transposed, coalesced_sums, reduce_scatter, reduce_scatter_single, all_gather),
        *(all_gather_single, gather_in_place, coalesced_gathers, all_to_all_single, uneven_all_to_all, all_to_all),
        *(ring, batch, from_anyone, broadcast, reduce, gather_and_scatter, barrier),
    )
}


def outcome(seed: int, group: dist.ProcessGroup) -> tuple[str, list[Tensor], str]:
    """Return what case ``seed`` is, its results on ``group``, and its error."""
    case = Case(seed, dist.get_rank(group), dist.get_world_size(group))
    try:
        return str(case), OPS[case.op](case, group), ""
    except AssertionError:
        raise
    except Exception as error:
        told = re.sub(r"\[F\d+ \S+ ", "", str(error).split("\n")[0])  # when it was
        return str(case), [], f"{type(error).__name__}: {told}"
