"""Broadcasts of parameters, objects and optimizer states."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor

from .. import context
from ..base.errors import ConfigError, kind_of, require
from ..transport import Transport
from ..transport._announced import pass_on, take_in
from .arguments import Group, negotiate

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0, group: Group = None
) -> None:
    """Give every rank the root's values, in place.

    ``params`` is ``model.state_dict()`` or ``model.named_parameters()``. Entries that are not tensors stay unchanged.

    Raises:
        ConfigError: ``params`` is neither a mapping nor (name, tensor) pairs.
        PlanMismatch: ranks have other names, shapes or types than the root.
        TransportError: a peer failed, stopped or timed out.
    """
    require(params, Iterable, "broadcast_parameters", "model.state_dict() or model.named_parameters()")
    items = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in items):
        raise ConfigError(
            "broadcast_parameters got no (name, tensor) pairs; give model.state_dict() or named_parameters()"
        )
    transport = context.transport(group)
    _check_root(root_rank, transport)
    tensors = {name: value.detach() for name, value in items if isinstance(value, Tensor)}
    facts: list[object] = [root_rank]
    facts += [(name, tuple(value.shape), str(value.dtype)) for name, value in sorted(tensors.items())]
    negotiate(transport, "broadcast_parameters", facts)
    with torch.no_grad():
        for _, value in sorted(tensors.items()):
            dense = value.contiguous()
            transport.broadcast(dense, root_rank)
            if dense.data_ptr() != value.data_ptr():
                value.copy_(dense)


def _check_root(root_rank: int, transport: Transport) -> None:
    if not isinstance(root_rank, Integral) or not 0 <= root_rank < transport.size:
        raise ConfigError(f"root_rank={root_rank}; expected a rank of the group, 0 to {transport.size - 1}")


def broadcast_bytes(data: bytes, root_rank: int = 0, group: Group = None) -> bytes:
    """Return the root's ``data`` on every rank; the ``data`` of other ranks is ignored."""
    transport = context.transport(group)
    _check_root(root_rank, transport)
    sizes = negotiate(transport, "broadcast of bytes", [root_rank], [len(data)])

    def move(piece: Tensor) -> None:
        transport.broadcast(piece, root_rank)

    if transport.rank == root_rank:
        pass_on(data, move)
        return bytes(data)
    return bytes(take_in(sizes[root_rank][0], move))


def pickled(call: str, obj: object, dumps: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Return ``obj`` as bytes; raise ``ConfigError``, which names the call, if it cannot be sent."""
    try:
        return dumps(obj)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"{call} got {kind_of(obj)} that pickle refuses: {error}; give plain data") from None


def broadcast_object(obj: T, root_rank: int = 0, group: Group = None) -> T:
    """Return the root's ``obj`` on every rank. It is sent pickled, so use it only among ranks that trust each other."""
    mine = pickled("broadcast_object", obj) if context.transport(group).rank == root_rank else b""
    result: T = pickle.loads(broadcast_bytes(mine, root_rank, group))
    return result


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, group: Group = None) -> None:
    """Give every rank's optimizer the root's state: options of the parameter groups, momenta, step counts.

    A ``DistributedOptimizer`` also takes over the root's step, because seeds and schedules of codecs depend on it. Its
    residuals stay unchanged, because they belong to each rank. Call this function before the first step, or after the
    root has loaded a checkpoint.

    Raises:
        PlanMismatch, TransportError: as ``broadcast_parameters``.
    """
    require(optimizer, torch.optim.Optimizer, "broadcast_optimizer_state", "an optimizer of torch")
    buffer = io.BytesIO()
    if context.transport(group).rank == root_rank:
        state = optimizer.state_dict()
        if "fusionlayer" in state:
            own = {key: value for key, value in state["fusionlayer"].items() if key in ("step", "local")}
            if "local" in own:
                own["local"] = {k: v for k, v in own["local"].items() if k not in ("parameters", "buffers")}
            state["fusionlayer"] = own
        torch.save(state, buffer)
    data = broadcast_bytes(buffer.getvalue(), root_rank, group)
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state)
