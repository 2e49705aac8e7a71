"""What scripts written for Horovod lean on, one function for each: every rank calls all of them in the same order."""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
import fusionlayer.torch as hvd

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def behaviour(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a rank has; small whole numbers, so that sums are exact in every type."""
    values = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(rank))
    return values.to(dtype)


def total(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([of(r, *shape, dtype=dtype) for r in range(size)]).sum(0).to(dtype)


@behaviour
def who_am_i(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert 0 <= hvd.local_rank() < hvd.local_size() == size
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ccl_built() or hvd.ddl_built() or hvd.rocm_built())
    assert hvd.mpi_threads_supported() in (True, False) and hvd.cuda_built() in (True, False) and hvd.nccl_built() >= 0


@behaviour
def what_is_begun_needs_no_wait(rank: int, size: int) -> None:
    for polling in range(size):
        begun = [hvd.allreduce_async(of(rank, 3), name=f"begun.{i}", op=hvd.Sum) for i in range(3)]
        while rank == polling and not all(hvd.poll(handle) for handle in begun):
            time.sleep(0.001)
        assert all(torch.equal(hvd.synchronize(handle), total(size, 3)) for handle in begun)


@behaviour
def allreduce_of_every_type(rank: int, size: int) -> None:
    for dtype in (*INTEGERS, *FLOATS):
        x = of(rank, 5, 3, dtype=dtype)
        given = x.clone()
        expected = total(size, 5, 3, dtype=dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), expected)
        assert torch.equal(x, given)
        average = hvd.allreduce(x)
        assert average.dtype == dtype and average.shape == x.shape
        if dtype.is_floating_point:
            torch.testing.assert_close(average, expected / size)
        else:
            assert torch.equal(average, torch.div(expected, size, rounding_mode="trunc"))
        assert hvd.allreduce_(x, op=hvd.Sum) is x and torch.equal(x, expected)
    flags = torch.tensor([rank == 0, True, False])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, True, False]


@behaviour
def allreduce_of_every_shape(rank: int, size: int) -> None:
    for shape in ((), (0,), (1,), (3, 0, 2), (17,), (2, 3, 4, 5), (70_001,)):
        assert torch.equal(hvd.allreduce(of(rank, *shape), op=hvd.Sum), total(size, *shape))
    wide = of(rank, 6, 4)
    for view, full in ((wide.t(), total(size, 6, 4).t()), (wide[::2], total(size, 6, 4)[::2])):
        assert not view.is_contiguous()
        assert torch.equal(hvd.allreduce(view, op=hvd.Sum), full)
    wide = of(rank, 6, 4)
    hvd.allreduce_(wide[:, 1], op=hvd.Sum)
    expected = of(rank, 6, 4)
    expected[:, 1] = total(size, 6, 4)[:, 1]
    assert torch.equal(wide, expected)


@behaviour
def other_reductions(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8):
        every = torch.stack([of(r, 40, dtype=dtype) for r in range(size)])
        x = of(rank, 40, dtype=dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Min), every.amin(0))
        assert torch.equal(hvd.allreduce(x, op=hvd.Max), every.amax(0))
        assert torch.equal(hvd.allreduce(x, op=hvd.Product), every.prod(0).to(dtype))
    flags = torch.tensor([rank == 0, True])
    assert hvd.allreduce(flags, op=hvd.Min).tolist() == [size == 1, True]


@behaviour
def scales(rank: int, size: int) -> None:
    x = of(rank, 9)
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(scaled, total(size, 9) * 2)
    torch.testing.assert_close(hvd.allreduce(x, prescale_factor=2.0), total(size, 9) * 2 / size)
    whole = hvd.allreduce(of(rank, 9, dtype=torch.int64) * 2, op=hvd.Sum, prescale_factor=0.5)
    assert torch.equal(whole, total(size, 9, dtype=torch.int64))


@behaviour
def the_old_way_to_say_average(rank: int, size: int) -> None:
    x = of(rank, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(hvd.allreduce(x, average=False), total(size, 4))
        torch.testing.assert_close(hvd.allreduce(x, average=True), total(size, 4) / size)
    with pytest.raises(ValueError, match="both op and average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op=77"):
        hvd.allreduce(x, op=77)


@behaviour
def handles(rank: int, size: int) -> None:
    x = of(rank, 8)
    handle = hvd.allreduce_async(x, name="handle", op=hvd.Sum)
    first = hvd.synchronize(handle)
    assert torch.equal(first, total(size, 8))
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)
    later = hvd.allreduce_async_(x, op=hvd.Sum)
    while not hvd.poll(later):
        pass
    assert hvd.synchronize(later) is x and torch.equal(x, first)


@behaviour
def a_tensor_that_changes_under_way_is_refused(rank: int, size: int) -> None:
    for begin in (hvd.allreduce_async_, hvd.allreduce_async, hvd.allgather_async, hvd.reducescatter_async):
        x = of(rank, 4 * size)
        handle = begin(x, name=begin.__name__)
        x.mul_(2)
        with pytest.raises(
            fl.UsageError, match=r"shape .* was changed between .*'.*_async_?' and its result; change it"
        ):
            hvd.synchronize(handle)
    x = of(rank, 5)
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    x.mul_(2)  # what poll() has told to be done may be used
    assert torch.equal(hvd.synchronize(handle), 2 * total(size, 5))
    parts = of(rank, 6).chunk(2)
    handles = [hvd.allreduce_async_(part, op=hvd.Sum) for part in parts]
    for part, handle in zip(parts, handles, strict=True):
        hvd.synchronize(handle)
        part.mul_(2)  # the other half is still under way
    assert torch.equal(torch.cat(parts), 2 * total(size, 6))
    weight = torch.ones(3, requires_grad=True)
    loss = (weight**2).sum()
    hvd.synchronize(hvd.allreduce_async_(weight.detach()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@behaviour
def names_in_any_order(rank: int, size: int) -> None:
    order = list(range(40))
    torch.manual_seed(0)
    order = [order[i] for i in torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist()]
    begun = {i: hvd.allreduce_async(of(rank + i, 3 + i), name=f"any.{i}", op=hvd.Sum) for i in order}
    for i in reversed(order):
        expected = torch.stack([of(r + i, 3 + i) for r in range(size)]).sum(0)
        assert torch.equal(hvd.synchronize(begun[i]), expected)


@behaviour
def names_again_and_again(rank: int, size: int) -> None:
    for shape in ((4,), (4,), (5,), (4,)):
        assert torch.equal(hvd.allreduce(of(rank, *shape), name="again", op=hvd.Sum), total(size, *shape))


@behaviour
def groups(rank: int, size: int) -> None:
    kinds = ((3, torch.float32), (4, torch.float64), (5, torch.float32), (0, torch.int32))
    given = [of(rank, n, dtype=dtype) for n, dtype in kinds]
    expected = [total(size, n, dtype=dtype) for n, dtype in kinds]
    for found in (
        hvd.grouped_allreduce(given, op=hvd.Sum, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum)),
        hvd.grouped_allreduce_([x.clone() for x in given], op=hvd.Sum),
    ):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    half = hvd.grouped_allreduce(given[:1], op=hvd.Average, prescale_factor=0.5)
    torch.testing.assert_close(half[0], expected[0] / size / 2)
    gathered = hvd.grouped_allgather([x[: min(rank, len(x))] for x in given[:2]])
    for found_rows, (n, dtype) in zip(gathered, kinds, strict=False):
        assert torch.equal(found_rows, torch.cat([of(r, n, dtype=dtype)[: min(r, n)] for r in range(size)]))
    scattered = hvd.grouped_reducescatter(given[:2], op=hvd.Sum)
    for piece, whole in zip(scattered, expected, strict=False):
        assert torch.equal(piece, rows_of(whole, rank, size))
    with pytest.raises(ValueError, match="no tensors"):
        hvd.grouped_allreduce([])


def rows_of(x: Tensor, rank: int, size: int) -> Tensor:
    each, rest = divmod(len(x), size)
    bounds = [0]
    for r in range(size):
        bounds.append(bounds[-1] + each + (r < rest))
    start, stop = list(pairwise(bounds))[rank]
    return x[start:stop]


@behaviour
def allgather_of_ragged_rows(rank: int, size: int) -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        for rows in (lambda r: 3, lambda r: r, lambda r: 0, lambda r: (r + 1) % 2):
            found = hvd.allgather(of(rank, rows(rank), 2, dtype=dtype))
            assert torch.equal(found, torch.cat([of(r, rows(r), 2, dtype=dtype) for r in range(size)]))
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == list(range(size))
    assert hvd.allgather(of(rank, 4, 3).t()).shape == (3 * size, 4)
    many = [hvd.allgather_async(of(rank + i, 1 + (rank + i) % 5), name=f"ragged.{i}") for i in range(20)]
    for i, handle in enumerate(many):
        expected = torch.cat([of(r + i, 1 + (r + i) % 5) for r in range(size)])
        assert torch.equal(hvd.synchronize(handle), expected)


@behaviour
def broadcasts(rank: int, size: int) -> None:
    for root in range(size):
        x = of(rank, 4, 3)
        assert torch.equal(hvd.broadcast(x, root), of(root, 4, 3))
        assert torch.equal(x, of(rank, 4, 3))
        assert hvd.broadcast_(x, root, name="in place") is x and torch.equal(x, of(root, 4, 3))
        wide = of(rank, 4, 3)
        hvd.broadcast_(wide.t(), root)
        assert torch.equal(wide, of(root, 4, 3))
    begun = [hvd.broadcast_async_(x, size - 1) for x in (of(rank, 3), of(rank, 5).double(), of(rank, 2).bool())]
    assert [hvd.synchronize(h).dtype for h in begun] == [torch.float32, torch.float64, torch.bool]
    with pytest.raises(ValueError, match="root_rank=99"):
        hvd.broadcast(of(rank, 1), 99)


@behaviour
def alltoalls(rank: int, size: int) -> None:
    even = hvd.alltoall(of(rank, 2 * size, 3))
    assert isinstance(even, Tensor)
    assert torch.equal(even, torch.cat([of(r, 2 * size, 3)[2 * rank : 2 * rank + 2] for r in range(size)]))
    splits = torch.tensor([(rank + to) % 3 for to in range(size)])
    uneven, received = hvd.alltoall(of(rank, int(splits.sum()), 2), splits)
    assert received.dtype == splits.dtype and received.tolist() == [(r + rank) % 3 for r in range(size)]
    pieces = []
    for r in range(size):
        start = sum((r + to) % 3 for to in range(rank))
        whole = of(r, sum((r + to) % 3 for to in range(size)), 2)
        pieces.append(whole[start : start + (r + rank) % 3])
    assert torch.equal(uneven, torch.cat(pieces))
    out, counts = hvd.synchronize(hvd.alltoall_async(of(rank, size)))
    assert counts.tolist() == [1] * size and len(out) == size
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(of(rank, 3), [1] * (size + 1))


@behaviour
def reducescatters(rank: int, size: int) -> None:
    for rows in (size, 2 * size + 1, 1, 0):
        x = of(rank, rows, 3)
        assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), rows_of(total(size, rows, 3), rank, size))
        torch.testing.assert_close(hvd.reducescatter(x), rows_of(total(size, rows, 3) / size, rank, size))
    half = hvd.synchronize(hvd.reducescatter_async(of(rank, 4), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
    torch.testing.assert_close(half, rows_of(total(size, 4) * 1.5, rank, size))
    largest = hvd.reducescatter(of(rank, 5, dtype=torch.int32), op=hvd.Max)
    every = torch.stack([of(r, 5, dtype=torch.int32) for r in range(size)])
    assert torch.equal(largest, rows_of(every.amax(0), rank, size))
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(torch.tensor(1.0))


@behaviour
def sparse_sums(rank: int, size: int) -> None:
    def sparse(r: int) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([list(range(r + 1)), [r] * (r + 1)]), of(r, r + 1), (5, 6))

    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        begun = hvd.sparse_allreduce_async(sparse(rank), name="sparse", op=op)
        expected = sum((sparse(r).to_dense() for r in range(size)), torch.zeros(5, 6))
        found = begun()
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), expected * factor)
    with pytest.raises(ValueError, match="sparse"):
        hvd.sparse_allreduce_async(of(rank, 3), "dense", hvd.Sum)


@behaviour
def gradients_flow(rank: int, size: int) -> None:
    def leaf(*shape: int) -> Tensor:
        return of(rank, *shape).requires_grad_()

    def gradient(x: Tensor) -> Tensor:
        assert x.grad is not None
        return x.grad

    x = leaf(3)
    (hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert gradient(x).tolist() == [sum(range(1, size + 1))] * 3
    x, y = leaf(3), leaf(2)
    torch.cat(hvd.grouped_allreduce([x, y])).sum().backward()
    torch.testing.assert_close(torch.cat([gradient(x), gradient(y)]), torch.ones(5))
    x = leaf(rank + 1, 2)
    (hvd.allgather(x) * (rank + 1)).sum().backward()
    torch.testing.assert_close(gradient(x), torch.full((rank + 1, 2), sum(range(1, size + 1)) / size))
    x = leaf(3)
    (hvd.broadcast(x, 0) * (rank + 1)).sum().backward()
    torch.testing.assert_close(gradient(x), torch.full((3,), sum(range(1, size + 1)) / size if rank == 0 else 0.0))
    x = leaf(size * 2)
    (hvd.alltoall(x) * (rank + 1)).sum().backward()
    assert gradient(x).tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
    x = leaf(size + 1)
    (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum().backward()
    each = torch.cat([rows_of(torch.ones(size + 1), r, size) * (r + 1) for r in range(size)])
    torch.testing.assert_close(gradient(x), each * size)


@behaviour
def compressed_sums(rank: int, size: int) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    every = torch.stack([torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(size)])
    for compression, bound in (
        (hvd.Compression.none, 1e-6),
        (hvd.Compression.fp16, 1e-2),
        (hvd.Compression.bf16, 5e-2),
        (hvd.Compression.int8, 0.1),
        (hvd.Compression.int4, 1.0),
        (hvd.Compression.zip, 1e-6),
    ):
        found = hvd.allreduce(x, compression=compression)
        assert found.dtype == torch.float32
        assert (found - every.mean(0)).abs().max() < bound
        alike = hvd.allgather(found.view(1, -1))
        assert all(torch.equal(row, found) for row in alike)
    sparse = hvd.allreduce(x, compression=hvd.Compression.topk(0.01), op=hvd.Sum)
    assert 0 < sparse.count_nonzero() <= 50 * size
    small, ctx = hvd.Compression.fp16.compress(x)
    assert small.dtype == torch.float16 and hvd.Compression.fp16.decompress(small, ctx).dtype == torch.float32
    whole = 5001 * torch.arange(3)  # which f16 has not
    assert hvd.allreduce(whole, compression=hvd.Compression.fp16, op=hvd.Sum).tolist() == [0, 5001 * size, 10002 * size]
    with pytest.raises(AttributeError, match="int8"):
        hvd.Compression.nothing_of_the_kind  # noqa: B018
    with pytest.raises(ValueError, match="codecs carry sums"):
        hvd.allreduce(x, compression=hvd.Compression.int8, op=hvd.Max)


@behaviour
def differences_are_told_to_all(rank: int, size: int) -> None:
    if size == 1:
        return
    last = rank == size - 1
    wrong: dict[str, Callable[[], object]] = {
        "shapes": lambda: hvd.allreduce(of(rank, 3 + last), name="wrong"),
        "dtypes": lambda: hvd.allreduce(of(rank, 3).to(torch.float64 if last else torch.float32), name="wrong"),
        "op": lambda: hvd.allreduce(of(rank, 3), name="wrong", op=hvd.Max if last else hvd.Sum),
        "prescale": lambda: hvd.allreduce(of(rank, 3), name="wrong", prescale_factor=1.0 + last),
        "root": lambda: hvd.broadcast(of(rank, 3), int(last), name="wrong"),
        "shapes ": lambda: hvd.allgather(of(rank, 3, 2 + last), name="wrong"),
        "dtypes  ": lambda: hvd.grouped_allreduce([of(rank, 3)] * (1 + last), name="wrong"),
        "dtypes ": lambda: hvd.alltoall(of(rank, size).to(torch.int32 if last else torch.int64), name="wrong"),
    }
    for what, call in wrong.items():
        with pytest.raises(hvd.HorovodInternalError, match=rf"wrong.*rank 0 has {what.strip()}"):
            call()
    assert torch.equal(hvd.allreduce(of(rank, 3), name="wrong", op=hvd.Sum), total(size, 3))


@behaviour
def names_are_not_used_twice_at_once(rank: int, size: int) -> None:
    x = of(rank, 3)
    if rank == 0:
        first = hvd.allreduce_async(x, name="twice", op=hvd.Sum)
        if size > 1:
            with pytest.raises(ValueError, match="different names") as caught:
                hvd.allreduce_async(x, name="twice", op=hvd.Sum)
            assert not isinstance(caught.value, RuntimeError), "an elastic loop would go back to its last commit"
        hvd.barrier()
        assert torch.equal(hvd.synchronize(first), total(size, 3))
    else:
        hvd.barrier()
        assert torch.equal(hvd.allreduce(x, name="twice", op=hvd.Sum), total(size, 3))
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 has asked for it twice"):
            hvd.allreduce(x, name="twice", op=hvd.Sum)
    hvd.barrier()


@behaviour
def what_cannot_be_sent(rank: int, size: int) -> None:
    for x in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), [1.0]):
        with pytest.raises(ValueError, match="expected a dense tensor"):
            hvd.allreduce(x)


@behaviour
def averages_divide_the_sum(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for numel in (99, 1 << 15):  # with the requests, and as a message
            x = torch.arange(1, numel + 1, dtype=dtype)
            assert torch.equal(hvd.allreduce(x, postscale_factor=2.0), x * size * (2 / size)), "as Horovod, to the bit"
    rows = torch.arange(1, 34 * size + 1, dtype=torch.float32)
    assert torch.equal(hvd.reducescatter(rows), (rows * size * (1 / size))[34 * rank : 34 * (rank + 1)])


@behaviour
def what_adasum_cannot_do(rank: int, size: int) -> None:
    for kind in (ValueError, RuntimeError):  # this library's kind, and Horovod's
        with pytest.raises(kind, match="Adasum needs whole tensors: use allreduce") as caught:
            hvd.reducescatter(of(rank, 4), op=hvd.Adasum)
        assert not isinstance(caught.value, hvd.HorovodInternalError)
    if size == 3:
        with pytest.raises(NotImplementedError, match="a number of ranks that is a power of two"):
            hvd.allreduce(of(rank, 4), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"splits of torch.float32; expected whole numbers"):
        hvd.alltoall(of(rank, size), torch.ones(size))


@behaviour
def sparse_adam_gets_rows_also_of_dense_sums(rank: int, size: int) -> None:
    after = []
    for sparse_as_dense in (False, True):
        table = nn.Embedding(9, 3, sparse=True, _weight=torch.ones(9, 3))
        adam = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(adam, table.named_parameters(), sparse_as_dense=sparse_as_dense)
        for step in range(2):
            optimizer.zero_grad()
            if rank < 2 or step:  # a rank without a gradient gets those of the others
                table(torch.tensor([rank, rank + 2 + step])).square().sum().backward()
            optimizer.step()
        after.append(table.weight.detach())
    torch.testing.assert_close(*after)
    changed = (after[0] != 1).any(1)
    assert changed[0] and not changed[8]


@behaviour
def some_ranks_have_more_data(rank: int, size: int) -> None:
    for i in range(3 + 2 * rank):
        living = [r for r in range(size) if i < 3 + 2 * r]
        mean = hvd.allreduce(torch.tensor([rank + 1.0]), name=f"uneven.{i}")
        torch.testing.assert_close(mean, torch.tensor([sum(r + 1.0 for r in living) / size]))
        rows = hvd.allgather(torch.tensor([[float(rank)]]), name=f"uneven.rows.{i}")
        assert rows.flatten().tolist() == living
        smallest = hvd.allreduce(torch.tensor([rank + 1]), name=f"uneven.min.{i}", op=hvd.Min)
        assert smallest.item() == living[0] + 1
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.barrier()
    if rank == 0:
        assert hvd.join() in range(size)
    else:
        if size > 1:
            # Rank 0 joins, sooner or later, and has no rows to give.
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 has joined"):
                hvd.reducescatter(of(rank, 4), name="uneven.scatter")
        hvd.join()


@behaviour
def process_sets(rank: int, size: int) -> None:
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.rank(), everyone.size()) == (0, rank, size) and everyone.included()
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(list(range(size)))
    for wrong in ([size], [0, 0], []):
        with pytest.raises(ValueError, match="expected different ranks from 0"):
            hvd.add_process_set(wrong)
    if size == 1:
        return
    members = [size - 1] if size < 3 else [2, 0]
    few = hvd.add_process_set(members)
    assert few.ranks == sorted(members) and few.size() == len(members)
    assert few.included() == (rank in members)
    if rank in members:
        assert few.rank() == sorted(members).index(rank)
        found = hvd.allreduce(of(rank, 5), op=hvd.Sum, process_set=few)
        assert torch.equal(found, torch.stack([of(r, 5) for r in members]).sum(0))
        assert torch.equal(hvd.broadcast(of(rank, 5), max(members), process_set=few), of(max(members), 5))
        assert hvd.allgather(torch.tensor([rank]), process_set=few).tolist() == sorted(members)
        assert len(hvd.alltoall(torch.ones(len(members)), process_set=few)) == len(members)
        hvd.reducescatter(of(rank, 5), process_set=few)
        hvd.barrier(process_set=few)
    else:
        with pytest.raises(ValueError, match="not in process set"):
            hvd.allreduce(of(rank, 5), process_set=few)
        with pytest.raises(ValueError, match="included"):
            few.rank()
    assert hvd.remove_process_set(few) and few.process_set_id is None and few.size() is None
    assert not hvd.remove_process_set(few) and not hvd.remove_process_set(everyone)
    with pytest.raises(ValueError, match="add_process_set"):
        hvd.allreduce(of(rank, 5), process_set=few)
    again = hvd.ProcessSet(members)
    assert hvd.add_process_set(again) is again
    hvd.remove_process_set(again)
    with pytest.raises(ValueError, match="whole numbers"):
        hvd.ProcessSet(["0"])


@behaviour
def optimizers(rank: int, size: int) -> None:
    for options in (
        {},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.int8},
    ):
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2))
        for i, p in enumerate(model.parameters()):
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        oracle = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2))
        oracle.load_state_dict(model.state_dict())
        plain = torch.optim.SGD(oracle.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(), **options
        )
        assert isinstance(optimizer, torch.optim.SGD)
        passes = int(options.get("backward_passes_per_step", 1))  # type: ignore[call-overload]
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            for i in range(passes):
                model(of(rank + 10 * step + i, 3, 4) / 7).pow(2).mean().backward()
                for r in range(size):
                    oracle(of(r + 10 * step + i, 3, 4) / 7).pow(2).mean().backward()
            if options.get("op") is not hvd.Sum:
                for p in oracle.parameters():
                    assert p.grad is not None
                    p.grad /= size
            optimizer.step()
            plain.step()
        close = 1e-5 if "compression" not in options else 0.02
        for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=close, rtol=close)
        if size > 1:
            model(of(rank, 3, 4)).sum().backward()
            with suppress(IndexError), pytest.raises(AssertionError, match="zero_grad"):
                for _ in range(passes - 1):
                    model(of(rank, 3, 4)).sum().backward()
                optimizer.zero_grad()
            optimizer.step()
        optimizer.set_backward_passes_per_step(1)  # type: ignore[attr-defined]
        optimizer.close()  # type: ignore[attr-defined]


@behaviour
def optimizers_of_process_sets(rank: int, size: int) -> None:
    alone = hvd.add_process_set([0]) if size > 1 else hvd.global_process_set
    model = nn.Linear(3, 1)
    hvd.broadcast_(model.weight.data, 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=alone)
    before = model.weight.detach().clone()
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.synchronize()  # type: ignore[attr-defined]
    with optimizer.skip_synchronize():  # type: ignore[attr-defined]
        optimizer.step()
    assert torch.equal(model.weight, before - (rank + 1.0))
    optimizer.close()  # type: ignore[attr-defined]
    if size > 1:
        hvd.remove_process_set(alone)
    by_codec = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), codec="int8")
    by_codec.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="op=Max"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Max)
    with pytest.raises(ValueError, match="adding_a_codec"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), compression=_Halves)
    with pytest.raises(ValueError, match="compression"):
        hvd.allreduce(torch.ones(1), compression="fp16")


class _Halves:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        return tensor * 2


@behaviour
def compressors_of_the_users_own(rank: int, size: int) -> None:
    assert torch.equal(hvd.allreduce(of(rank, 6), compression=_Halves, op=hvd.Sum), total(size, 6))


@behaviour
def nothing_is_left_over(rank: int, size: int) -> None:
    hvd.barrier()
    here = hvd.basics.session()
    assert here.pending == 0 and not here._table._running and not here._table._asked
    assert fl.is_initialized()
