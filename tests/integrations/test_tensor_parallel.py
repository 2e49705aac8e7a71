"""The operations of a tensor-parallel channel, with ranks that are threads."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError, PlanMismatch, UsageError
from fusionlayer.parallel.tensor_parallel import Channel
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults
from tests.collectives.conformance import same_everywhere
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

WORLDS = (1, 2, 3, 4)
BATCH, TOKENS, WIDTH, HIDDEN = 2, 12, 24, 48


def values(stream: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return gradient(torch.Size(shape).numel(), stream).view(shape).to(dtype)


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return values(1, HIDDEN, WIDTH, dtype=dtype), values(2, WIDTH, HIDDEN, dtype=dtype)


def perceptron(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(x, up)), down)


def parallel_perceptron(channel: Channel, x: Tensor, up: Tensor, down: Tensor, sequence: bool) -> Tensor:
    """Return the same of whole weights, of which this rank uses its part."""
    up, down = up.chunk(channel.size, 0)[channel.rank], down.chunk(channel.size, 1)[channel.rank]
    if sequence:
        return channel.reduce_scatter(perceptron(channel.gather(x, 1), up, down), 1)
    return channel.reduce(perceptron(channel.copy(x), up, down))


def differentiated(f: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return gradients for a gradient of ``f`` that is not the same everywhere."""
    f.backward(values(3, *f.shape, dtype=f.dtype))
    grads = [x.grad for x in inputs]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


@looped("world", WORLDS)
def test_without_loss_values_and_gradients_are_those_of_one_process(world: int) -> None:
    x, (up, down) = values(0, BATCH, TOKENS, WIDTH, dtype=torch.float64), weights(torch.float64)
    given = [t.clone().requires_grad_() for t in (x, up, down)]
    expected = perceptron(*given)
    gradients = differentiated(expected, *given)

    def body(transport: Transport) -> None:
        channel = Channel(transport, "raw")
        mine = [t.clone().requires_grad_() for t in (x, up, down)]
        y = parallel_perceptron(channel, *mine, sequence=False)
        torch.testing.assert_close(y, expected)
        in_, up_, down_ = differentiated(y, *mine)
        torch.testing.assert_close(in_, gradients[0])
        for grad, whole, dim in ((up_, gradients[1], 0), (down_, gradients[2], 1)):
            torch.testing.assert_close(grad.chunk(world, dim)[transport.rank], whole.chunk(world, dim)[transport.rank])

    over_threads(world, body)


@looped("world", WORLDS)
def test_without_loss_sequence_parallelism_is_the_same(world: int) -> None:
    x, (up, down) = values(0, BATCH, TOKENS, WIDTH, dtype=torch.float64), weights(torch.float64)
    given = x.clone().requires_grad_()
    expected = perceptron(given, up, down)
    incoming = values(3, *expected.shape, dtype=torch.float64)
    expected.backward(incoming)
    assert given.grad is not None
    gradient_of_x = given.grad

    def body(transport: Transport) -> None:
        channel = Channel(transport, "raw")

        def part(t: Tensor) -> Tensor:
            return t.chunk(world, 1)[transport.rank]

        mine = part(x).clone().requires_grad_()
        y = parallel_perceptron(channel, mine, up, down, sequence=True)
        torch.testing.assert_close(y, part(expected))
        y.backward(part(incoming))
        torch.testing.assert_close(mine.grad, part(gradient_of_x))
        whole = x.clone().requires_grad_()
        again = channel.join(channel.split(whole, -2), -2)
        torch.testing.assert_close(again, x)
        again.backward(incoming)
        torch.testing.assert_close(whole.grad, incoming)

    over_threads(world, body)


@looped("algorithm", ["one_shot", "two_shot"])
@on_threads(3)
def test_the_same_bits_everywhere_in_pieces_too(transport: Transport, algorithm: str) -> None:
    results = []
    for piece_bytes in (None, 512, 4096):
        channel = Channel(transport, "int", algorithm=algorithm, piece_bytes=piece_bytes, bits=4, group_size=32)
        x = values(10 + transport.rank, 5, 7, 33)
        total, every = channel.reduce(x), channel.gather(x, 0)
        assert same_everywhere(transport, total.view(-1)) and same_everywhere(transport, every.view(-1))
        results.append((total, every))
    for total, every in results[1:]:
        assert torch.equal(total, results[0][0]) and torch.equal(every, results[0][1])


@looped("codec", [codec for codec in defaults() if not codec.ahead], ids=str)
@looped("value", [float("nan"), float("inf")])
@on_threads(4)
def test_what_is_not_finite_reaches_every_rank(transport: Transport, codec: codecs.Codec, value: float) -> None:
    channel = Channel(transport, codec)
    x = values(transport.rank, 4, 6, 32)
    if transport.rank == 2:
        x[1, 3, 5] = value
    assert not channel.reduce(x)[1, 3, 5].isfinite()
    assert not channel.gather(x, 1)[1, 2 * 6 + 3, 5].isfinite()
    assert channel.reduce_scatter(x, 0).isfinite().all() == (transport.rank != 1)
    clean = values(transport.rank, 4, 6, 32)
    assert channel.reduce(clean).isfinite().all(), "it outlived its step"


@on_threads(2)
def test_shapes_strides_and_types(transport: Transport) -> None:
    channel = Channel(transport, "int8")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = values(transport.rank, 6, 4, 8).to(dtype).transpose(0, 1)
        assert channel.reduce(x).shape == (4, 6, 8) and channel.reduce(x).dtype == dtype
        assert channel.gather(x, 1).shape == (4, 12, 8)
        assert torch.equal(channel.gather(x, 1), channel.gather(x.contiguous(), -2))
        assert channel.reduce_scatter(x, 2).shape == (4, 6, 4)
        empty = x[:, :0]
        assert channel.reduce(empty).shape == channel.gather(empty, 1).shape == (4, 0, 8)
        assert channel.reduce_scatter(empty, 1).shape == (4, 0, 8)
        assert channel.reduce(x[0, 0, 0]).shape == ()


def test_bytes_are_those_of_the_codec() -> None:
    """A layer's forward and backward: two all-reduces or, with sequence parallelism, two of each half."""
    codec, world = codecs.get("int8").bare, 4
    numel = BATCH * TOKENS * WIDTH
    chunk = -(-numel // (world * codec.block)) * codec.block

    def body(transport: Transport) -> None:
        channel, _ = Channel(transport, codec), transport.nodes
        for sequence in (False, True):
            x = values(0, BATCH, TOKENS // world if sequence else TOKENS, WIDTH).requires_grad_()
            before = transport.bytes_sent
            parallel_perceptron(channel, x, *weights(torch.float32), sequence).sum().backward()
            piece = codec.wire(numel // world).capacity if sequence else codec.wire(chunk).capacity
            assert transport.bytes_sent - before == 2 * 2 * (world - 1) * piece

    over_threads(world, body)


@on_threads(2)
def test_ranks_that_disagree_are_told_before_anything_travels(transport: Transport) -> None:
    with pytest.raises(PlanMismatch, match="codec or options of tensor parallelism differs over ranks.*give every"):
        Channel(transport, "int8" if transport.rank else "int4")


@on_threads(2)
def test_what_cannot_be_is_refused(transport: Transport) -> None:
    lossy, lossless = Channel(transport, "int8"), Channel(transport, "raw")
    x = values(0, 4, 5)
    with pytest.raises(ConfigError, match="got a torch.float64 tensor; expected float32.*codec='raw' for float64"):
        lossy.reduce(x.double())
    with pytest.raises(ConfigError, match="got a torch.int64 tensor"):
        lossless.gather(x.long(), 0)
    with pytest.raises(ConfigError, match=r"dimension 1 of shape \(4, 5\) is cut over 2 ranks.*a multiple of 2"):
        lossy.reduce_scatter(x, 1)
    with pytest.raises(ConfigError, match=r"dimension 1 of shape \(4, 5\) is cut over 2 ranks"):
        lossless.split(x, -1)
    with pytest.raises(ConfigError, match=r"dim=2 of a tensor of shape \(4, 5\); expected 0 to 1"):
        lossy.gather(x, 2)
    with pytest.raises(ConfigError, match="algorithm='dense'; expected one_shot or two_shot"):
        Channel(transport, "int8", algorithm="dense")
    with pytest.raises(ConfigError, match="algorithm='two_shot'; expected None"):
        Channel(transport, "raw", algorithm="two_shot")
    with pytest.raises(ConfigError, match="piece_bytes=0; expected a number of bytes above 0"):
        Channel(transport, "int8", piece_bytes=0)
    with pytest.raises(ConfigError, match="got 'tp' as group; expected a process group"):
        Channel("tp", "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown codec 'int7'"):
        Channel(transport, "int7")
    assert lossy.reduce(x).shape == x.shape, "a refusal has cost the others"


@on_threads(2)
def test_equal_channels_have_one_name_that_lives_as_long_as_any_of_them(transport: Transport) -> None:
    first, other = Channel(transport, "int8"), Channel(transport, "int4")
    second = Channel(transport, "int8")
    assert first.name == second.name != other.name
    name = first.name
    third = Channel(transport, "int8")
    assert third.name == name
    del first, third
    assert second.reduce(torch.ones(3)).shape == (3,)
    del second
    with pytest.raises(UsageError, match="is gone; keep the Channel as long as"):
        torch.ops.fusionlayer.tp_all_reduce(torch.ones(3), name)
