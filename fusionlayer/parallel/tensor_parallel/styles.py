"""Styles for ``parallelize_module``: torch's, with compressed communication between layers."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as stock

from ...base.errors import ConfigError
from ...codecs import Codec
from .channel import Channel


class _Compressed:
    """The part that all styles share: options of the ``Channel`` that a style makes over its mesh."""

    def __init__(
        self,
        *args: Any,
        codec: str | Codec | None = None,
        algorithm: str | None = None,
        piece_bytes: int | None = None,
        codec_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
            raise ConfigError(
                f"torch {torch.__version__} cannot say how gradients of a DTensor are placed; upgrade it, or use "
                "fusionlayer.tensor_parallel.Channel in the model"
            )
        self._options = {
            "codec": codec,
            "algorithm": algorithm,
            "piece_bytes": piece_bytes,
            **(codec_options or {}),
        }

    def _over(self, mesh: DeviceMesh) -> Channel:
        return Channel(mesh, **self._options)


class ColwiseParallel(_Compressed, stock.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` with compressed communication on the side of the input.

    If the input is replicated, backward's all-reduce of its gradient is compressed. If the input is sharded by
    sequence, its all-gather and backward's reduce-scatter are compressed. Communication for ``output_layouts``, usually
    of logits, is torch's.

    ``input_layouts``, ``output_layouts`` and ``use_local_output`` are torch's.

    Args:
        codec: see ``Channel``.
        algorithm: see ``Channel``.
        piece_bytes: see ``Channel``.
        codec_options: options of a codec given by name.

    Raises:
        ConfigError: as ``Channel``; from the forward, the number of ranks does not divide a sequence.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch binds these functions to the module before the forward. torch.compile does not take methods there.
        here = copy.copy(self)
        here.__dict__["_prepare_input_fn"] = partial(_enter, self._over(device_mesh))
        return super(ColwiseParallel, here)._apply(module, device_mesh)


class RowwiseParallel(_Compressed, stock.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` with compressed communication on the side of the output.

    If the output is replicated, its all-reduce is compressed. If the output is sharded by sequence, its reduce-scatter
    and backward's all-gather are compressed. The output of an embedding cut by rows is sent as in torch.

    The arguments and errors are ``ColwiseParallel``'s.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here = copy.copy(self)
        here.__dict__["_prepare_output_fn"] = partial(_leave, self._over(device_mesh))
        return super(RowwiseParallel, here)._apply(module, device_mesh)


class SequenceParallel(_Compressed, stock.SequenceParallel):
    """``torch.distributed.tensor.parallel.SequenceParallel`` with compressed communication for changes of layout.

    An input that is sharded by sequence needs no communication. If the input is replicated, backward's all-gather is
    compressed. If the sum of the input is pending, its reduce-scatter and backward's all-gather are compressed.

    ``sequence_dim`` and ``use_local_output`` are torch's arguments, all others those of ``ColwiseParallel``.

    Raises:
        ConfigError: as ``ColwiseParallel``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here = copy.copy(self)
        here.__dict__["_prepare_input_fn"] = partial(_to_sequence, self._over(device_mesh))
        return super(SequenceParallel, here)._apply(module, device_mesh)


class PrepareModuleInput(_Compressed, stock.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput`` with compressed communication.

    Use it for an input that several layers share, such as that of attention's projections. If it is sharded by
    sequence, one compressed gather serves all of them. Other changes of layout are sent as in torch.

    ``codec``, ``algorithm``, ``piece_bytes`` and ``codec_options`` are those of ``ColwiseParallel``, all other
    arguments torch's.

    Raises:
        ConfigError: as ``ColwiseParallel``.
    """

    _channel: Channel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        here = copy.copy(self)
        here._channel = self._over(device_mesh)
        return super(PrepareModuleInput, here)._apply(module, device_mesh)

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if not isinstance(input_layout, Shard) or not isinstance(desired_layout, Replicate):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        x = input if isinstance(input, DTensor) else DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        whole = _gathered(x, input_layout.dim % x.dim(), self._channel)
        return whole.to_local() if self.use_local_output else whole


def _enter(
    channel: Channel,
    input_layouts: tuple[Placement, ...],
    desired_input_layouts: tuple[Placement, ...],
    module: nn.Module,
    inputs: tuple[Any, ...],
    mesh: DeviceMesh,
) -> DTensor:
    """Return the input of a layer that is cut by columns, as a replicated tensor."""
    x = inputs[0]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, input_layouts, run_check=False)
    if not x.is_floating_point():
        return x.redistribute(placements=desired_input_layouts)
    (placement,) = x.placements
    if isinstance(placement, Shard):
        return _gathered(x, placement.dim, channel)
    if placement.is_partial():
        x = _reduced(x, Replicate(), channel)
    local = channel.copy(x.to_local(grad_placements=(Replicate(),)))
    return DTensor.from_local(local, mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),))


def _leave(
    channel: Channel,
    output_layouts: tuple[Placement, ...],
    use_local_output: bool,
    module: nn.Module,
    output: DTensor,
    mesh: DeviceMesh,
) -> Tensor:
    """Sum the output of a layer that is cut by rows, and return it in the requested layout."""
    placed = _reduced(output, output_layouts[0], channel)
    return placed.to_local() if use_local_output else placed


def _to_sequence(
    channel: Channel,
    sequence_sharding: tuple[Shard, ...],
    module: nn.Module,
    inputs: tuple[Any, ...],
    mesh: DeviceMesh,
) -> DTensor:
    """Return the input of a layer that each rank applies to its tokens, sharded by sequence."""
    x, (wanted,) = inputs[0], sequence_sharding
    if not isinstance(x, DTensor):
        if not isinstance(x, Tensor):
            raise ConfigError(f"SequenceParallel got a {type(x).__name__} for {module}; expected a tensor or a DTensor")
        return DTensor.from_local(x, mesh, sequence_sharding, run_check=False)
    (placement,) = x.placements
    if placement.is_replicate():
        local = channel.split(x.to_local(grad_placements=(Replicate(),)), wanted.dim)
        return DTensor.from_local(local, mesh, (wanted,), run_check=False)
    return _reduced(x, wanted, channel)


def _gathered(x: DTensor, dim: int, channel: Channel) -> DTensor:
    """Return ``x``, which is sharded along ``dim``, replicated; backward's sum of its gradient is compressed too."""
    if x.shape[dim] % channel.size:
        raise ConfigError(
            f"dimension {dim} of shape {tuple(x.shape)} is sharded over {channel.size} ranks; make its length a "
            f"multiple of {channel.size}, by padding for instance"
        )
    local = channel.gather(x.to_local(grad_placements=(Shard(dim),)), dim)
    return DTensor.from_local(local, x.device_mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),))


def _reduced(x: DTensor, wanted: Placement, channel: Channel) -> DTensor:
    """Return ``x`` in the layout ``wanted``; compress the communication if it is a plain sum over ranks."""
    (placement,) = x.placements
    # Subclasses of Partial mean other things than a sum, such as an embedding's mask.
    if type(placement) is not Partial or placement.reduce_op != "sum" or wanted.is_partial():
        return x.redistribute(placements=(wanted,))
    local = x.to_local(grad_placements=(Replicate(),))
    if isinstance(wanted, Shard):
        dim = wanted.dim % x.dim()
        return DTensor.from_local(channel.reduce_scatter(local, dim), x.device_mesh, (Shard(dim),), run_check=False)
    return DTensor.from_local(channel.reduce(local), x.device_mesh, (wanted,), run_check=False)
