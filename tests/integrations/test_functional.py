"""Collectives called directly on tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from fusionlayer.transport import local
from tests.loops import looped
from tests.ranks import on_processes, on_ranks
from tests.synthetic import gradient

# Codec, options, and a bound of the relative error of two encodings one after the other.
LOSSY: list[tuple[str, dict[str, Any], float]] = [
    ("bf16", {}, 0.01),
    ("int8", {}, 0.03),
    ("int4", {}, 0.3),
    ("int", {"bits": 4, "rounding": "stochastic"}, 0.6),
]
# Of 4, 3 and 5: side by side each pair of two comes up.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALGORITHMS = (None, "one_shot", "two_shot", "ring", "butterfly")
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0), (5, 7), (2, 3, 401)]


def of_shape(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numel = torch.Size(shape).numel()
    return gradient(numel, rank, dtype).view(shape)


def assert_same_on_all_ranks(mine: Tensor) -> None:
    seen = mine.contiguous().clone()
    fl.context.transport().broadcast(seen, 0)
    assert torch.equal(seen, mine)


def near(result: Tensor, expected: Tensor, bound: float) -> bool:
    return bool((result.float() - expected).norm() <= bound * expected.norm())


def check_all_reduce(rank: int, world: int) -> None:
    for shape in SHAPES:
        every = torch.stack([of_shape(shape, r) for r in range(world)])
        x = of_shape(shape, rank)
        assert fl.all_reduce(x) is x
        torch.testing.assert_close(x, every.mean(0))
        assert_same_on_all_ranks(x)
        torch.testing.assert_close(fl.all_reduce(of_shape(shape, rank), op=fl.Sum), every.sum(0))
        for (codec, options, bound), dtype, algorithm in zip(LOSSY * 5, DTYPES * 7, ALGORITHMS * 4, strict=False):
            x = fl.all_reduce(of_shape(shape, rank, dtype), codec, algorithm, **options)
            assert x.dtype == dtype and x.shape == shape
            assert near(x, every.mean(0), bound), (shape, dtype, codec)
            assert_same_on_all_ranks(x)

    strided = of_shape((5, 7), rank).t()
    fl.all_reduce(strided, "int8")
    expected = of_shape((5, 7), rank)
    fl.all_reduce(expected, "int8")
    assert strided.stride() == (1, 7) and near(strided.t(), expected, 0.02)
    leaf = of_shape((4,), rank).requires_grad_()
    torch.testing.assert_close(
        fl.all_reduce(leaf).detach(), torch.stack([of_shape((4,), r) for r in range(world)]).mean(0)
    )

    seen = [fl.all_reduce(of_shape((999,), rank), "int", bits=4, rounding="stochastic") for _ in range(2)]
    assert not torch.equal(*seen), "each call rounds by a seed of its own"


def check_other_types(rank: int, world: int) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = torch.tensor([[rank, 1], [7, 2]], dtype=dtype)
        assert fl.all_reduce(x, op=fl.Sum).tolist() == [[sum(range(world)), world], [7 * world, 2 * world]]
        with pytest.raises(fl.ConfigError, match=f"op=Average of a {dtype} tensor; expected floating point, or op=Sum"):
            fl.all_reduce(x)
    large = torch.tensor([2**53 + rank, -1])
    assert fl.all_reduce(large, op=fl.Sum).tolist() == [world * 2**53 + sum(range(world)), -world]
    x = torch.tensor([1.0 + rank * 2.0**-40], dtype=torch.float64)
    assert fl.all_reduce(x).item() == sum(1.0 + r * 2.0**-40 for r in range(world)) / world
    for call in (fl.all_gather, fl.reduce_scatter, fl.all_to_all):
        text = f"{call.__name__} got a torch.float64 tensor; expected float32, bfloat16 or float16: convert it"
        with pytest.raises(fl.ConfigError, match=text):
            call(torch.zeros(2, dtype=torch.float64))  # type: ignore[operator]


def check_gather_and_scatter(rank: int, world: int) -> None:
    def uneven(r: int) -> Tensor:
        return of_shape((2 * r, 3, 50), 10 + r)  # rank 0 has nothing

    every = torch.cat([uneven(r) for r in range(world)])
    assert torch.equal(fl.all_gather(uneven(rank)), every)
    for codec, options, bound in LOSSY:
        gathered = fl.all_gather(uneven(rank), codec, **options)
        assert near(gathered, every, bound)
        assert_same_on_all_ranks(gathered)
    assert fl.all_gather(torch.tensor(float(rank))).tolist() == list(range(world))
    assert fl.all_gather(torch.zeros(3, 0)).shape == (3 * world, 0)
    assert fl.all_gather(torch.zeros(0)).shape == (0,)
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(fl.all_gather(strided), strided.repeat(world, 1))

    whole = torch.stack([of_shape((3 * world, 70), 20 + r) for r in range(world)])
    mine = slice(3 * rank, 3 * rank + 3)
    torch.testing.assert_close(fl.reduce_scatter(whole[rank]), whole.mean(0)[mine])
    torch.testing.assert_close(fl.reduce_scatter(whole[rank], op=fl.Sum), whole.sum(0)[mine])
    torch.testing.assert_close(fl.reduce_scatter(whole[rank].t().contiguous().t()), whole.mean(0)[mine])
    for codec, options, bound in LOSSY:
        assert near(fl.reduce_scatter(whole[rank], codec, **options), whole.mean(0)[mine], bound)
    assert fl.reduce_scatter(torch.zeros(0, 5)).shape == (0, 5)
    for shape in [(), (world + 1, 2)]:
        with pytest.raises(fl.ConfigError, match="pad dimension 0"):
            fl.reduce_scatter(torch.zeros(shape))


def check_all_to_all(rank: int, world: int) -> None:
    def rows(source: int, to: int) -> int:
        return (source + 2 * to) % 3  # zeros among them

    def piece(source: int, to: int) -> Tensor:
        return of_shape((rows(source, to), 40), 100 * source + to)

    splits = [rows(rank, to) for to in range(world)]
    x = torch.cat([piece(rank, to) for to in range(world)])
    expected = torch.cat([piece(source, rank) for source in range(world)])
    assert torch.equal(fl.all_to_all(x, splits), expected)
    for codec, options, bound in LOSSY:
        assert near(fl.all_to_all(x, splits, codec, **options), expected, bound)
    even = torch.arange(2.0 * world).view(2 * world, 1) + 100 * rank
    result = fl.all_to_all(even)
    assert result.view(-1).tolist() == [100.0 * s + 2 * rank + i for s in range(world) for i in range(2)]
    assert fl.all_to_all(torch.zeros(0, 4)).shape == (0, 4)
    for bad, text in [([1] * (world + 1), "numbers that add up"), ([-1, 1] + [0] * (world - 2), "add up to 0")]:
        with pytest.raises(fl.ConfigError, match=text):
            fl.all_to_all(torch.zeros(0, 4), bad)
    with pytest.raises(fl.ConfigError, match="add up to"):
        fl.all_to_all(torch.zeros(world + 1, 2))
    with pytest.raises(fl.ConfigError):
        fl.all_to_all(torch.tensor(1.0), [1] + [0] * (world - 1))


def check_names(rank: int, world: int) -> None:
    x = torch.zeros(4)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: fl.all_reduce(x, "int88"), "did you mean 'int8'.*known: .*raw"),
        (lambda: fl.all_reduce(x, algorithm="two_shoot"), "did you mean 'two_shot'.*known: .*dense"),
        (lambda: fl.all_reduce(x, "int8", bitz=3), "bitz"),
        (lambda: fl.all_reduce(x, fl.codecs.get("int8"), bits=8), "give the codec's name"),
        (lambda: fl.all_reduce(x, "int8", "dense"), "choose another algorithm"),
        (lambda: fl.all_reduce(x, op="sum"), "fusionlayer.Average or fusionlayer.Sum"),
        (lambda: fl.all_gather(x, "int88"), "did you mean 'int8'"),
        (lambda: fl.reduce_scatter(x, op=None), "fusionlayer.Average or fusionlayer.Sum"),
        (lambda: fl.all_to_all(x, codec="int88"), "did you mean 'int8'"),
    ]
    for call, text in calls:
        with pytest.raises(fl.ConfigError, match=text):
            call()
    fl.all_reduce(x)  # and the ranks are still in step


def check_mismatches(rank: int, world: int) -> None:
    odd = rank == 1
    x = torch.zeros(6, 2)
    calls: list[Callable[[], Any]] = [
        lambda: fl.all_reduce(torch.zeros(5) if odd else x),
        lambda: fl.all_reduce(torch.zeros(2, 6) if odd else x),
        lambda: fl.all_reduce(x.double() if odd else x),
        lambda: fl.all_reduce(x, "int8" if odd else "int4"),
        lambda: fl.all_reduce(x, "int8", "one_shot" if odd else "two_shot"),
        lambda: fl.all_reduce(x, "int", bits=4, group_size=64 if odd else 128),
        lambda: fl.all_reduce(x, op=fl.Sum if odd else fl.Average),
        lambda: fl.all_gather(torch.zeros(6, 3) if odd else x),
        lambda: fl.reduce_scatter(torch.zeros(12, 2) if odd else x),
        lambda: fl.all_to_all(x.half() if odd else x, [6] + [0] * (world - 1)),
        lambda: fl.all_to_all(x, [6] + [0] * (world - 1)) if odd else fl.all_gather(x),
        lambda: fl.all_reduce(x) if odd else fl.all_gather(x),
        lambda: fl.broadcast_object("x") if odd else fl.all_to_all(x, [6] + [0] * (world - 1)),
        lambda: fl.broadcast_object("x", root_rank=rank % 2),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(fl.PlanMismatch) as error:
            call()
        expected = (1,) if number < len(calls) - 1 else tuple(r for r in range(world) if r % 2)
        assert error.value.ranks == expected, number
        assert f"on rank {rank}" in str(error.value)
    assert_same_on_all_ranks(fl.all_reduce(of_shape((9,), rank), "int8"))


CHECKS = [
    check_all_reduce,
    check_other_types,
    check_gather_and_scatter,
    check_all_to_all,
    check_names,
    check_mismatches,
]


@looped("check", CHECKS)
@looped("world", [2, 3])
def test_over_threads(check: Callable[[int, int], None], world: int) -> None:
    local.run(lambda rank: check(rank, world), world)


@on_ranks(1)
def test_one_rank(rank: int) -> None:
    x = of_shape((5, 7), 0)
    assert torch.equal(fl.all_reduce(x.clone()), x)
    assert torch.equal(fl.all_gather(x), x)
    assert torch.equal(fl.reduce_scatter(x), x)
    assert torch.equal(fl.all_to_all(x), x)
    assert near(fl.all_reduce(x.clone(), "int8"), x, 0.03)
    assert fl.broadcast_object("x") == "x"


def check_groups(rank: int, world: int) -> None:
    """Ranks 0 and 2 among themselves, while all call each other, too."""
    pair, everybody = dist.new_group([0, 2]), dist.new_group()
    if rank in (0, 2):
        x = torch.full((300,), float(rank))
        assert fl.all_reduce(x, "int8", group=pair)[0] == pytest.approx(1.0, rel=0.01)
        assert fl.all_gather(torch.tensor([float(rank)]), group=pair).tolist() == [0.0, 2.0]
        assert fl.broadcast_object(rank, root_rank=1, group=pair) == 2
    else:
        with pytest.raises(fl.UsageError, match="group"):
            fl.all_reduce(torch.zeros(3), group=pair)
    assert fl.all_reduce(torch.tensor([float(rank)]), op=fl.Sum, group=everybody).item() == 3.0
    assert fl.all_reduce(torch.tensor([float(rank)]), op=fl.Sum, group=dist.group.WORLD).item() == 3.0
    assert fl.all_reduce(torch.tensor([float(rank)]), op=fl.Sum).item() == 3.0


@pytest.mark.medium
@on_processes(3)
def test_over_processes(rank: int, world: int) -> None:
    for check in (check_all_reduce, check_all_to_all, check_mismatches):
        check(rank, world)
    check_groups(rank, world)
