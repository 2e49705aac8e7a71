"""Operations by name with several scales that are pending at once: each gets its own, fused or not."""

from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor

from fusionlayer.coordination.central import fits, hand_out, to_bytes
from fusionlayer.coordination.execution import OperationPart, execute
from fusionlayer.coordination.matching import Matcher
from fusionlayer.coordination.operation import Operation
from fusionlayer.coordination.requests import Request, Response, Signature
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads

WORLD = 3
SCALES = (1.0, 0.5, 4.0)
# Powers of two and small integers: every order of scaling and summing gives these bits.
CASES = [
    (f"{op} {dtype} {before} {after} {copy}", op, dtype, before, after)
    for op, dtype, before, after, copy in product(("Sum", "Max"), ("float32", "float64"), SCALES, SCALES, range(2))
]


def given(rank: int, number: int, dtype: str) -> Tensor:
    return torch.arange(5, dtype=getattr(torch, dtype)) * (rank + 1) + 8 * number


def expected(number: int, op: str, dtype: str, before: float, after: float) -> Tensor:
    every = torch.stack([given(rank, number, dtype) * before for rank in range(WORLD)])
    return (every.sum(0) if op == "Sum" else every.amax(0)) * after


def operations(rank: int, kind: str = "allreduce") -> list[Operation]:
    made = []
    for number, (name, op, dtype, before, after) in enumerate(CASES):
        x = given(rank, number, dtype)
        signature = Signature(kind, 0, (dtype,), ((5,),), "cpu", op, before, after)
        made.append(Operation(100 * rank + number, (0, kind, name), name, signature, [x]))
    return made


def groups(every: list[list[Operation]], travels: bool) -> list[dict[int, Response]]:
    """Return what the ranks are told to run when all ask for all operations, each in another order."""
    matcher = Matcher(WORLD, fusion_bytes=1 << 20)
    for rank, mine in enumerate(every):
        shifted = mine[7 * rank :] + mine[: 7 * rank]
        matcher.take(
            rank,
            [
                Request(o.handle, o.key[2], o.signature, (), to_bytes(o.tensors) if travels else None)
                for o in (shifted if rank % 2 else shifted[::-1])
            ],
        )
    found = []
    while (responses := matcher.next_responses()) is not None:
        found.append(responses)
    return found


def scales_of(operation: Operation) -> tuple[object, ...]:
    return operation.signature.op, operation.signature.prescale, operation.signature.postscale


@looped("travels", [False, True], ids=["messages", "with the requests"])
def test_operations_of_several_scales_are_pending_at_once(travels: bool) -> None:
    every = [operations(rank) for rank in range(WORLD)]
    assert all(fits(o.signature, o.tensors, WORLD) for o in every[0])
    told = groups(every, travels)
    assert all(set(each) == set(range(WORLD)) for each in told)

    def body(transport: Transport) -> None:
        mine = {o.handle: o for o in every[transport.rank]}
        for each in told:
            response = each[transport.rank]
            chosen = [mine[item.handle] for item in response.items if item.handle is not None]
            assert len({scales_of(o) for o in chosen}) == 1, "operations of different scales were fused"
            if travels:
                assert response.code == "take"
                hand_out(chosen, response.items, response.data)
            else:
                parts = [OperationPart(o, item) for o, item in zip(chosen, response.items, strict=True)]
                execute(parts, transport, range(WORLD), lambda _: nullcontext())
        for number, (name, *how) in enumerate(CASES):
            (result,) = every[transport.rank][number].result
            assert torch.equal(result, expected(number, *how)), name

    over_threads(WORLD, body)
    kinds = len({scales_of(o) for o in every[0]}) * (2 if travels else 1)  # what the coordinator sums has one type
    assert len(told) == kinds, "operations of equal scales were not fused"


@looped("field, value", [("prescale", 0.25), ("postscale", 0.25), ("op", "Min")])
def test_ranks_that_scale_otherwise_are_told_so(field: str, value: object) -> None:
    """Of the operations that are pending only the one that differs fails."""
    every = [operations(rank) for rank in range(WORLD)]
    odd = every[1][4]
    odd.signature = odd.signature._replace(**{field: value})
    told = groups(every, False)
    failed = [each for each in told if each[0].code == "fail"]
    assert len(failed) == 1 and f"{field} " in failed[0][0].why.text and "rank 1" in failed[0][0].why.text
    assert {rank: response.items[0].handle for rank, response in failed[0].items()} == {0: 4, 1: 104, 2: 204}
    assert sum(len(each[0].items) for each in told if each[0].code == "execute") == len(CASES) - 1
