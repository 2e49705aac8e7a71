"""Broadcasts of parameters, optimizer states and objects to all ranks, and allgathers of objects."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag
from torch.optim import LBFGS, Optimizer, SparseAdam

from ..base.errors import ConfigError, kind_of, require
from ..functional import pickled
from ..transport._announced import pass_on, take_in
from . import mpi_ops as ops
from .basics import rank, size
from .process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor], root_rank: int
) -> None:
    """Give every rank the root's values, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. Values that are not
            tensors are left alone.
        root_rank: the rank that sends its values.

    Raises:
        ConfigError: ``params`` is none of these.
        HorovodInternalError: names, shapes or types differ between ranks, or a peer failed.
    """
    pairs: list[tuple[str | None, Any]] = []
    if isinstance(params, Mapping):
        pairs += sorted(params.items(), key=lambda pair: str(pair[0]))
    else:
        # The items of a Sequential are modules, which hold the parameters.
        listed = isinstance(params, Iterable) and not isinstance(params, Tensor)
        pairs += [item if isinstance(item, tuple) else (None, item) for item in (params if listed else ())]
        if not listed or any(len(pair) != 2 or pair[0] is None and not isinstance(pair[1], Tensor) for pair in pairs):
            raise ConfigError(
                f"broadcast_parameters got {kind_of(params)}; give model.state_dict(), named_parameters() or "
                "parameters(), whose items are tensors or (name, tensor) pairs"
            )
    handles = [
        ops.broadcast_async_(value.detach(), root_rank, name) for name, value in pairs if isinstance(value, Tensor)
    ]
    for handle in handles:
        ops.synchronize(handle)


@dataclass(frozen=True)
class _TensorPlace:
    """Stands for a tensor in a nested state: the tensor's index in a list, and how to make an empty one like it."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None) -> None:
    """Give every rank's optimizer the root's state: options of the parameter groups, momenta, step counts.

    An optimizer that has not taken a step yet may get the state of one that has. Each rank keeps the residuals of its
    own error feedback. As with Horovod, the parameters of an optimizer without state have gradients afterwards: zeros
    for missing ones.

    Args:
        optimizer: plain or distributed.
        root_rank: the rank that sends its state.
        model: its embeddings with sparse gradients are left without zeros, which are dense.

    Raises:
        ConfigError: the optimizer is LBFGS, which decides by its rank's own loss.
        HorovodInternalError: as ``broadcast_parameters``.
    """
    require(optimizer, Optimizer, "broadcast_optimizer_state", "an optimizer")
    require(model, (torch.nn.Module, type(None)), "broadcast_optimizer_state(model=...)", "the model")
    if isinstance(optimizer, LBFGS):
        raise ConfigError("cannot broadcast the state of LBFGS, which decides by its rank's own loss; use another one")
    if not optimizer.state:
        _fill_gradients(optimizer, model)
    tensors: list[Tensor] = []
    skeleton = None
    if rank() == root_rank:
        state = optimizer.state_dict()
        if "fusionlayer" in state:
            state["fusionlayer"] = {"step": state["fusionlayer"]["step"]}
        skeleton = _take_out(state, tensors)
    skeleton = broadcast_object(skeleton, root_rank, name="optimizer.state")
    if rank() != root_rank:
        _make_room(skeleton, tensors)
    broadcast_parameters([(f"optimizer.state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(_put_back(skeleton, tensors))


def _fill_gradients(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Give zeros to parameters without a gradient, but not where backward gives a sparse one: the sum is dense."""
    modules = () if model is None else model.modules()
    sparse = {id(m.weight) for m in modules if isinstance(m, (Embedding, EmbeddingBag)) and m.sparse}
    if isinstance(optimizer, SparseAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse:
                parameter.grad = torch.zeros_like(parameter)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with a ``_TensorPlace`` for each tensor. Append the tensors to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TensorPlace(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    return _map(value, lambda inner: _take_out(inner, tensors))


def _make_room(value: Any, tensors: list[Tensor]) -> None:
    """Append an empty tensor to ``tensors`` for each ``_TensorPlace`` in ``value``."""
    if isinstance(value, _TensorPlace):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
    else:
        _map(value, lambda inner: _make_room(inner, tensors))


def _put_back(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with the tensors instead of each ``_TensorPlace``."""
    if isinstance(value, _TensorPlace):
        return tensors[value.index]
    return _map(value, lambda inner: _put_back(inner, tensors))


def _map(value: Any, change: Any) -> Any:
    """Return a dict, list or tuple with ``change`` applied to each item; other values unchanged."""
    if isinstance(value, Mapping):
        return {key: change(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(inner) for inner in value)
    return value


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the root's ``obj`` on every rank. It is sent pickled, so use it only between ranks that trust each other.

    cloudpickle is used if it is installed. Lambdas and local classes can then be sent, too.

    Args:
        obj: anything that can be pickled. Only the root's object is sent; the root gets it back unchanged.
        root_rank: the rank that sends its object; a rank of the whole job.
        name: the name of the messages. None: the name of the object's type, which must then be the same on all ranks.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks differ in name or root, or a peer failed.
    """
    name = _name_of("broadcast_object", obj, name)
    root = rank() == root_rank
    data = _pickled("broadcast_object", obj) if root else b""
    length = torch.tensor([len(data)], device="cpu")
    ops.broadcast_(length, root_rank, f"{name}.sz", process_set)

    def move(piece: Tensor) -> None:
        ops.broadcast_(piece, root_rank, f"{name}.t", process_set)

    if root:
        pass_on(data, move)
        return obj
    return cast(T, pickle.loads(take_in(int(length), move)))


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order. They are sent as in ``broadcast_object``.

    Raises:
        HorovodInternalError: ranks differ in name, or a peer failed.
    """
    name = _name_of("allgather_object", obj, name)
    data = torch.frombuffer(bytearray(_pickled("allgather_object", obj)), dtype=torch.uint8)
    handles = [
        ops.allgather_async(torch.tensor([data.numel()], device="cpu"), f"{name}.sz"),
        ops.allgather_async(data, f"{name}.t"),
    ]
    lengths, every = (ops.synchronize(handle) for handle in handles)
    assert len(lengths) == size()
    return [pickle.loads(part.numpy().tobytes()) for part in every.split(lengths.tolist())]


def _name_of(call: str, obj: object, name: str | None) -> str:
    require(name, (str, type(None)), f"{call} with name", "a text, the same on all ranks")
    return type(obj).__name__ if name is None else name


def _pickled(call: str, obj: object) -> bytes:
    try:
        dumps = importlib.import_module("cloudpickle").dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    return pickled(call, obj, dumps)
