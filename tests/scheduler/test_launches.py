"""What a step costs the host of a device: how many kernels it launches, and that it waits for none of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusionlayer import codecs, native
from fusionlayer.base.plan import Bucket, Slot
from fusionlayer.codecs import TensorState
from fusionlayer.collectives import get, halves
from fusionlayer.observe.timeline import Timeline
from fusionlayer.scheduler.ahead import AheadBuffer
from fusionlayer.scheduler.buffers import BufferSettings, FlatBuffer
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.scheduler.test_streams import Echo
from tests.synthetic import gradient

DEVICE, CPU = torch.device("meta"), torch.device("cpu")
TIMELINE = Timeline(None, 0)
PER_LAUNCH = {"_foreach_copy_": 64, "_foreach_zero_": 110}  # tensors that a kernel of torch takes at most


class Launches(TorchDispatchMode):
    """Counts the kernels that torch's operations would launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.allocations = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach"):
            self.count += -(-len(args[0]) // PER_LAUNCH[name])
        elif name.startswith("empty"):
            self.allocations += 1
        elif not func.is_view:
            self.count += 1
        return func(*args, **kwargs or {})


def bucket_of(numels: Sequence[int], gap: int, dtype: str = "float32", codec: str = "raw") -> Bucket:
    slots, offset = [], 0
    for i, numel in enumerate(numels):
        slots.append(Slot(f"w{i}", numel, offset))
        offset += numel + gap
    return Bucket(tuple(slots), offset, dtype, codec)


def flat_buffer(bucket: Bucket, device: torch.device, all_reduce: Callable[..., None]) -> FlatBuffer:
    codec = codecs.get("raw", header=False)
    return FlatBuffer(
        bucket,
        codec,
        BufferSettings(1 / 3, 1.0, device, TIMELINE),
        all_reduce=all_reduce,
        residual=None,
        encloses=False,
    )


def run(buffer: FlatBuffer | AheadBuffer, gradients: Sequence[Tensor], transport: Transport) -> None:
    for i, value in enumerate(gradients):
        buffer.put(f"w{i}", value, 0)
    buffer.run(transport, 0)
    buffer.take()


def test_packing_takes_a_handful_of_launches() -> None:
    """300 tensors, scaled, with gaps between them, are copied, scaled and cleared between."""
    at: list[int] = []

    def body(transport: Transport) -> None:
        bucket = bucket_of([33] * 300, gap=95)
        buffer = flat_buffer(bucket, DEVICE, lambda *_, **__: at.append(launches.count))
        gradients = [torch.empty(3, 11, device=DEVICE) for _ in range(300)]
        run(buffer, gradients, transport)  # makes the flat tensor
        with launches:
            run(buffer, gradients, transport)

    launches = Launches()
    over_threads(1, body)
    assert 0 < at[-1] <= 10, "launches to pack"
    assert launches.count - at[-1] <= 5, "launches to unpack"


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packing_by_few_launches_gives_the_bits_of_packing_one_by_one(dtype: torch.dtype) -> None:
    numels = [5, 1, 70, 33]
    bucket = bucket_of(numels, gap=3, dtype=str(dtype).removeprefix("torch."))
    gradients = [gradient(numel, i, dtype) for i, numel in enumerate(numels)]

    def packed(transport: Transport, device: torch.device, given: Sequence[Tensor]) -> Tensor:
        flats: list[Tensor] = []
        buffer = flat_buffer(bucket, CPU, lambda x, *_, **__: flats.append(x.clone()))
        buffer._make_flat().fill_(9)
        buffer._device = device  # where it packs as on a device, with values to compare
        run(buffer, [value.clone() for value in given], transport)
        return flats[0].view(torch.uint8)

    def body(transport: Transport) -> None:
        for given in (gradients, [*gradients[:2], gradient(70, 2), gradients[3]]):
            one_by_one, at_once = (packed(transport, device, given) for device in (CPU, DEVICE))
            assert torch.equal(one_by_one, at_once)
            flat = at_once.view(dtype)
            assert flat[:5].any() and not flat[5:8].any()

    over_threads(1, body)


@looped("verb", [Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, bool, int])
def test_the_stand_in_shows_whoever_waits(verb: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        verb(torch.empty(1, device=DEVICE))


BY_THRESHOLD = ["fl_accumulate", "fl_choose_threshold", "fl_sparse_encode"]


@pytest.mark.parametrize(
    "name, options, verbs",
    [
        ("topk", {}, ["fl_accumulate", "fl_choose_largest", "fl_sparse_encode"]),
        ("topk", {"density": 1.0}, ["fl_accumulate", "fl_sparse_encode"]),
        ("topk", {"reuse": 3, "slack": 1.5}, BY_THRESHOLD),
        *((name, {}, BY_THRESHOLD) for name in ("dgc", "gaussiank", "redsync", "redsync_trim", "sidco")),
        ("sidco", {"distribution": "generalized_pareto", "reuse": 3}, BY_THRESHOLD),
        ("dgc", {"momentum": 0.9}, ["fl_accumulate_momentum", *BY_THRESHOLD[1:]]),
        ("dgc", {"clip_norm": 1.0}, ["fl_magnitude_stats", *BY_THRESHOLD]),
        ("chunked_topk", {}, ["fl_encode"]),
        ("randomk", {}, ["fl_accumulate", "fl_choose_drawn", "fl_sparse_encode"]),
    ],
)
def test_a_sparse_step_waits_for_nothing(
    name: str, options: dict[str, Any], verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numels = [3000, 2000, 1000]
    called: list[str] = []
    monkeypatch.setattr(native, "call", lambda verb, *_: called.append(verb))

    def body(transport: Transport) -> None:
        codec = codecs.get(name, header=False, **options)
        buffer = AheadBuffer(
            *(bucket_of(numels, 0, codec=name), codec, BufferSettings(1 / 2, 1.0, DEVICE, TIMELINE)),
            index=0,
            gather=lambda *_: called.append("gather"),
            states={f"w{i}": TensorState(torch.empty(numel, device=DEVICE)) for i, numel in enumerate(numels)},
            rank=0,
            size=2,
        )
        for _ in range(2):
            run(buffer, [torch.empty(numel, device=DEVICE) for numel in numels], transport)

    over_threads(1, body)
    assert called == 2 * (verbs * 3 + ["gather"] + ["fl_decode_sum"] * 3)


class Eight(Echo):
    """Rank 0 of eight; nothing is sent, as nothing is there."""

    size = 8


@pytest.mark.parametrize(
    "collective, verbs",
    [
        (lambda x, every, codec, transport: get("two_shot")(x, codec, transport), ["encode", "recode", "decode"]),
        (lambda x, every, codec, transport: get("one_shot")(x, codec, transport), ["encode", "decode_sum"]),
        (lambda x, every, codec, transport: halves.all_gather(x, every, codec, transport), ["encode", "decode"]),
        (
            lambda x, every, codec, transport: halves.reduce_scatter(every, x, codec, transport),
            ["encode"] * 8 + ["decode_sum"],
        ),
    ],
    ids=["two_shot", "one_shot", "all_gather", "reduce_scatter"],
)
def test_the_messages_of_all_ranks_are_decoded_by_one_launch_into_memory_that_is_kept(
    collective: Callable[..., None], verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(native, "call", lambda verb, *_: called.append(verb.removeprefix("fl_")))
    transport = Eight(None, True)  # type: ignore[arg-type]
    x, every = torch.empty(4096, device=DEVICE), torch.empty(8, 4096, device=DEVICE)
    launches = Launches()
    for _ in range(2):
        called.clear()
        launches.allocations = 0
        with launches:
            collective(x, every, codecs.get("int8").bare, transport)
        assert called == verbs
    assert launches.allocations == 0


def test_payloads_lie_in_memory_that_is_kept() -> None:
    def body(transport: Transport) -> list[int]:
        sizes = (("incoming", 300), ("outgoing", 300), ("incoming", 200), ("incoming", 400), ("incoming", 300))
        given = [transport.scratch(name, nbytes, DEVICE) for name, nbytes in sizes]
        assert [x.numel() for x in given] == [nbytes for _, nbytes in sizes]
        memory = [x.untyped_storage()._cdata for x in given]
        return [memory.index(each) for each in memory]

    assert over_threads(1, body) == [[0, 1, 0, 3, 3]]


def test_pieces_of_rows_are_large_on_a_device_alone() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    for rows, dtype, elements in ((8, bf16, 4 << 20), (2, f32, 8 << 20), (64, f32, 1 << 20)):
        assert halves._piece(halves.SUITABLE, torch.empty(9, dtype=dtype, device=DEVICE), rows) == elements
        assert halves._piece(halves.SUITABLE, torch.empty(9, dtype=dtype), rows) == 1 << 20
