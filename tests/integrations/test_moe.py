"""Dispatch and combine of experts' tokens, with ranks that are threads."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, PlanMismatch
from fusionlayer.parallel.moe import Dispatcher, Experts
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

WORLDS = (1, 2, 3, 4)
WIDTH, HIDDEN, PER_RANK, CHOSEN = 24, 40, 2, 2


def values(stream: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return gradient(torch.Size(shape).numel(), stream).view(shape).to(dtype)


def tokens_of(rank: int) -> int:
    """Return how many tokens a rank has: another number on each, none on rank 1."""
    return 0 if rank == 1 else 37 + 5 * rank


def make_expert(number: int, dtype: torch.dtype) -> nn.Module:
    expert = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(expert.parameters()):
            parameter.copy_(values(50 + 10 * number + i, *parameter.shape))
    return expert


def choices(rank: int, experts: int) -> Tensor:
    """Return (tokens, CHOSEN) experts, most of them the first two, the last never."""
    n = tokens_of(rank)
    first = torch.arange(n) * 7 % 5 % max(1, experts - 1)
    second = (first + 1 + torch.arange(n) % 3) % max(1, experts - 1)
    return torch.stack([torch.where(torch.arange(n) % 2 == 0, 0, first), second], 1)


def inputs(rank: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    n = tokens_of(rank)
    weights = values(3000 + rank, n, CHOSEN, dtype=dtype).abs() + 0.1
    return values(2000 + rank, n, WIDTH, dtype=dtype), weights, choices(rank, experts)


def dense(experts: list[nn.Module], x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Return the mixture without sorting or sending anything."""
    total = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        share = (weights * (indices == number)).sum(1, keepdim=True)
        total = total + share * expert(x)
    return total


@looped("average", [True, False])
@looped("world", WORLDS)
def test_without_loss_values_and_gradients_are_those_of_one_process(world: int, average: bool) -> None:
    dtype, count = torch.float64, world * PER_RANK
    whole = [make_expert(number, dtype) for number in range(count)]
    given = [inputs(rank, count, dtype) for rank in range(world)]
    leaves = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, w, _ in given]
    expected = [dense(whole, x, w, given[rank][2]) for rank, (x, w) in enumerate(leaves)]
    for rank, result in enumerate(expected):
        result.backward(values(4000 + rank, *result.shape, dtype=dtype))

    def body(transport: Transport) -> None:
        rank = transport.rank
        mine = range(rank * PER_RANK, (rank + 1) * PER_RANK)
        layer = Experts([make_expert(n, dtype) for n in mine], Dispatcher(transport, "raw"), average=average)
        x, weights, indices = inputs(rank, count, dtype)
        x.requires_grad_()
        weights.requires_grad_()
        # Leading dimensions are kept.
        y = layer(x.unsqueeze(0), weights.unsqueeze(0), indices.unsqueeze(0)).squeeze(0)
        torch.testing.assert_close(y, expected[rank])
        y.backward(values(4000 + rank, *y.shape, dtype=dtype))
        torch.testing.assert_close(x.grad, leaves[rank][0].grad)
        torch.testing.assert_close(weights.grad, leaves[rank][1].grad)
        for number, expert in zip(mine, layer.experts, strict=True):
            for theirs, ours in zip(whole[number].parameters(), expert.parameters(), strict=True):
                assert theirs.grad is not None and ours.grad is not None, "also of an expert without tokens"
                torch.testing.assert_close(ours.grad, theirs.grad / (world if average else 1))

    over_threads(world, body)


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("codec", ["zip", "auto"])
@looped("world", WORLDS)
@on_threads()
def test_zipped_has_the_bits_of_raw(transport: Transport, codec: str, world: int, dtype: torch.dtype) -> None:
    count = world * PER_RANK
    results = []
    for name in ("raw", codec):
        mine = range(transport.rank * PER_RANK, (transport.rank + 1) * PER_RANK)
        layer = Experts([make_expert(n, dtype) for n in mine], Dispatcher(transport, name))
        x, weights, indices = inputs(transport.rank, count, dtype)
        x.requires_grad_()
        weights.requires_grad_()
        for _ in range(8 if name == "auto" else 1):  # both forms, and the one that is chosen
            for leaf in (x, weights, *layer.parameters()):
                leaf.grad = None
            y = layer(x, weights, indices)
            y.backward(values(4000 + transport.rank, *y.shape, dtype=dtype))
            results.append([y.detach(), x.grad, weights.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one is not None and two is not None and torch.equal(one, two)


def test_gradcheck() -> None:
    """Numerical derivatives; all ranks move their equal inputs alike, so results are summed over ranks."""

    def body(transport: Transport) -> bool:
        dispatcher = Dispatcher(transport, "raw")

        def there_and_back(x: Tensor) -> Tensor:
            arrived, route = dispatcher.dispatch(x, [2 + transport.rank, 3 - transport.rank])
            return dispatcher.combine(arrived.square(), route)

        x = values(1, 5, 3, dtype=torch.float64).requires_grad_()
        return torch.autograd.gradcheck(there_and_back, (x,)) and torch.autograd.gradgradcheck(there_and_back, (x,))

    assert over_threads(2, body) == [True, True]


class TestDispatcher:
    def test_rows_go_where_counts_send_them_and_come_back_in_order(self) -> None:
        def body(transport: Transport) -> None:
            rank, size = transport.rank, transport.size
            dispatcher = Dispatcher(transport, "zip")
            counts = [[(rank + to + expert) % 3 for expert in range(2)] for to in range(size)]
            flat = [(to, expert) for to in range(size) for expert in range(2) for _ in range(counts[to][expert])]
            rows = torch.tensor([[100 * rank + 10 * to + expert, i] for i, (to, expert) in enumerate(flat)])
            rows = rows.view(-1, 2).float()
            arrived, route = dispatcher.dispatch(rows, torch.tensor(counts))
            assert route.counts.tolist() == [[(s + rank + e) % 3 for e in range(2)] for s in range(size)]
            expected = [
                100 * s + 10 * rank + e for s in range(size) for e in range(2) for _ in range((s + rank + e) % 3)
            ]
            assert arrived[:, 0].tolist() == expected
            assert route.received == tuple(route.counts.sum(1).tolist()) and sum(route.sent) == len(rows)
            assert torch.equal(dispatcher.combine(arrived, route), rows)

        for world in WORLDS:
            over_threads(world, body)

    def test_each_direction_has_its_codec(self) -> None:
        def body(transport: Transport) -> None:
            dispatcher = Dispatcher(transport, "int", gradient_codec="bf16", bits=8)
            x = values(transport.rank, 4, WIDTH).requires_grad_()
            y, _ = dispatcher.dispatch(x, [2, 2])
            away, stays = (slice(2, 4), slice(0, 2)) if transport.rank == 0 else (slice(0, 2), slice(2, 4))
            sender = 1 - transport.rank
            theirs = values(sender, 4, WIDTH)[2 * transport.rank : 2 * transport.rank + 2]
            int8 = fl.codecs.get("int", bits=8)
            part = y.detach()[2 * sender : 2 * sender + 2]
            assert torch.equal(part, int8.decompress(int8.compress(theirs), theirs.shape))
            y.backward(values(9, 4, WIDTH))
            assert x.grad is not None
            incoming = values(9, 4, WIDTH)[2 * transport.rank : 2 * transport.rank + 2]
            assert torch.equal(x.grad[away], incoming.bfloat16().float())
            assert torch.equal(x.grad[stays], incoming)  # what stays is not encoded

        over_threads(2, body)

    def test_bytes_are_counted_in_both_directions(self) -> None:
        def body(transport: Transport) -> None:
            dispatcher = Dispatcher(transport, "raw")
            x = values(0, 6, WIDTH).requires_grad_()
            y, route = dispatcher.dispatch(x, [3, 3])
            assert dispatcher.bytes_sent == 3 * WIDTH * 4
            dispatcher.combine(y, route).sum().backward()
            assert dispatcher.bytes_sent == 4 * 3 * WIDTH * 4

        over_threads(2, body)

    def test_a_copied_model_shares_it(self) -> None:
        def body(transport: Transport) -> None:
            layer = Experts([nn.Linear(3, 3)], Dispatcher(transport, "int8"))
            twin = copy.deepcopy(layer)
            assert twin.dispatcher is layer.dispatcher and twin.experts[0] is not layer.experts[0]

        over_threads(2, body)

    def test_what_cannot_be_is_refused(self) -> None:
        def body(transport: Transport) -> None:
            dispatcher = Dispatcher(transport, "zip")
            x = torch.zeros(4, 3)
            for counts, text in (
                ([4], "got counts"),
                ([3, 2], "add up to 4"),
                ([-1, 5], "from 0 on"),
                ([[[4]]], "exp"),
            ):
                with pytest.raises(ConfigError, match=text):
                    dispatcher.dispatch(x, counts)
            with pytest.raises(ConfigError, match="expert parallelism with zip.*float64 rows; expected float32"):
                dispatcher.dispatch(x.double(), [2, 2])
            _, route = dispatcher.dispatch(x, [2, 2])
            with pytest.raises(ConfigError, match="combine got 3 rows; 4 were dispatched"):
                dispatcher.combine(x[:3], route)
            with pytest.raises(ConfigError, match="expert parallelism got 1 as group"):
                Dispatcher(1)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="did you mean 'int8'"):
                Dispatcher(transport, "int88")

        over_threads(2, body)

    @looped("what", ["codec", "width", "type"])
    def test_ranks_that_differ_are_named(self, what: str) -> None:
        def body(transport: Transport) -> None:
            odd = transport.rank == 1
            with pytest.raises(PlanMismatch) as error:
                dispatcher = Dispatcher(transport, "int8" if what == "codec" and odd else "raw")
                x = torch.zeros(3, 5 if what == "width" and odd else 4)
                dispatcher.dispatch(x.half() if what == "type" and odd else x, [1, 1, 1])
            assert error.value.ranks == (1,)
            if what != "codec":
                assert "have another shape or type" in str(error.value)

        over_threads(3, body)


class TestExperts:
    def layer(self, transport: Transport, **how: Any) -> Experts:
        return Experts([nn.Linear(4, 4), nn.Linear(4, 4)], Dispatcher(transport, "raw"), **how)

    def test_what_cannot_be_is_refused(self) -> None:
        def body(transport: Transport) -> None:
            layer = self.layer(transport)
            x, weights, indices = torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.long)
            with pytest.raises(ConfigError, match=r"weights \(3, 1\) and indices \(3, 2\)"):
                layer(x, weights[:, :1], indices)
            with pytest.raises(ConfigError, match=r"tokens of shape \(2, 4\)"):
                layer(x[:2], weights, indices)
            for wrong in (-1, 4):
                with pytest.raises(ConfigError, match="expected 0 to 3"):
                    layer(x, weights, indices + wrong)
            with pytest.raises(ConfigError, match="at least one"):
                Experts([], layer.dispatcher)

        over_threads(2, body)

    def test_ranks_with_other_numbers_of_experts_are_named(self) -> None:
        def body(transport: Transport) -> None:
            dispatcher = Dispatcher(transport, "raw")
            with pytest.raises(PlanMismatch, match="the number of experts on each rank"):
                Experts([nn.Linear(2, 2)] * (1 + transport.rank), dispatcher)

        over_threads(2, body)

    def test_the_router_s_gradients_are_what_weights_deserve(self) -> None:
        """Whatever travels coarsely, gradients of the weights are exact for the results that came back."""

        def body(transport: Transport) -> None:
            layer = Experts([nn.Linear(4, 4)], Dispatcher(transport, "int4", gradient_codec="int4"))
            x, indices = values(transport.rank, 6, 4), torch.arange(6).view(6, 1) % 2
            weights = torch.full((6, 1), 0.5, requires_grad=True)
            y = layer(x, weights, indices)
            grad = values(7, 6, 4)
            y.backward(grad)
            torch.testing.assert_close(weights.grad, (grad * y.detach() / 0.5).sum(1, keepdim=True))

        over_threads(2, body)
