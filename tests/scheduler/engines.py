"""A small model, and engines for it on ranks that are threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.plan import TensorInfo
from fusionlayer.collectives import AllReduce
from fusionlayer.collectives._base import registry
from fusionlayer.scheduler import Engine, planners
from fusionlayer.transport import Transport
from tests.synthetic import gradient

MODEL = [TensorInfo(f"w{i}", numel, "float32", 4) for i, numel in enumerate((300, 5, 128, 1000, 1, 777))]


def make_engine(transport: Transport, tensors: list[TensorInfo] = MODEL, **options: Any) -> Engine:
    """Return an engine that owns ``transport``: int8, three buckets for ``MODEL``, unless ``options`` say otherwise."""
    options.setdefault("codec", codecs.get("int8"))
    options.setdefault("planner", planners.get("horovod", threshold=4096))
    options.setdefault("device", torch.device("cpu"))
    return Engine(tensors, transport, **options)


def gradients(rank: int, step: int, tensors: list[TensorInfo] = MODEL) -> dict[str, Tensor]:
    """Return this rank's gradients of a step, flat, by name."""
    return {
        tensor.name: gradient(tensor.numel, 100 * rank + 10 * step + i, getattr(torch, tensor.dtype))
        for i, tensor in enumerate(tensors)
    }


SHAPES = {"image": (4, 3, 5, 2), "sliced": (40,), "scalar": (), "empty": (0, 3)}
KINDS = {"float32": 4, "bfloat16": 2, "float16": 2}


def of_layouts(*more: str) -> list[TensorInfo]:
    """Return tensors of all types that ``views`` lays out, and flat ones of the names in ``more``."""
    shapes = SHAPES | dict.fromkeys(more, (20,))
    return [
        TensorInfo(f"{name} {dtype}", torch.Size(shape).numel(), dtype, size)
        for name, shape in shapes.items()
        for dtype, size in KINDS.items()
    ]


def views(rank: int, step: int, tensors: list[TensorInfo]) -> dict[str, Tensor]:
    """Return gradients whose memory is laid out as their names say, that of images otherwise on each rank."""
    made = gradients(rank, step, tensors)
    for name, flat in made.items():
        if name.startswith("image"):
            image = flat.view(SHAPES["image"])
            made[name] = image.contiguous(memory_format=torch.channels_last) if rank else image
        elif name.startswith("sliced"):
            made[name] = torch.stack([flat, flat], 1)[:, 1]
        elif name.startswith("of another type"):
            made[name] = flat.to(torch.bfloat16 if flat.dtype == torch.float32 else torch.float32)
        else:
            made[name] = flat.view(SHAPES[name.rpartition(" ")[0]])
    return made


def exact_sum(world: int, step: int, tensors: list[TensorInfo] = MODEL) -> dict[str, Tensor]:
    """Return the f64 sum over ranks of their ``gradients``."""
    every = [gradients(rank, step, tensors) for rank in range(world)]
    return {name: torch.stack([given[name].double() for given in every]).sum(0) for name in every[0]}


def run_step(engine: Engine, values: dict[str, Tensor], shift: int = 0) -> dict[str, Tensor]:
    """Submit all ``values``, starting at number ``shift`` of them, and return them with their results."""
    names = list(values)
    for name in names[shift:] + names[:shift]:
        engine.submit(name, values[name])
    engine.synchronize()
    return values


@contextmanager
def collective_named(name: str, function: Callable[..., None]) -> Iterator[None]:
    """Let ``function`` be the collective ``name`` for a while."""
    as_collective: AllReduce = function
    registry.add(name, lambda: as_collective)
    try:
        yield
    finally:
        registry.remove(name)
