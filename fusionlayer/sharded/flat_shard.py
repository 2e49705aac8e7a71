"""``FlatShard``: the parameters of one group of a ``ShardedOptimizer``, of which each rank owns a part."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import ConfigError, UsageError
from ..codecs import Codec
from ..collectives import halves
from ..native.wire import DTYPE_CODES
from ..training.weights import Weights
from ..transport import Transport
from .layout import Layout


class FlatShard:
    """The parameters of one group as one flat tensor, and this rank's part of it in f32.

    Args:
        params: the parameters, whose ``data`` become views of the flat tensor.
        transport: the ranks.
        layout: the places of the parameters in the flat tensor.
        feedback: keep the loss of encoding gradients in ``residual``, laid out as the flat tensor; add it to the next
            ones.
    """

    def __init__(
        self, params: list[nn.Parameter], transport: Transport, layout: Layout, *, feedback: bool = False
    ) -> None:
        first = params[0]
        self.params = list(params)  # a copy: a user may append to the group's list
        self.layout = layout
        self._replica = torch.zeros(layout.size * layout.chunk, dtype=first.dtype, device=first.device)
        self._views = self._views_of(self._replica)
        for p, view in zip(params, self._views, strict=True):
            view.copy_(p.detach())
            p.data = view
        if transport.size > 1:
            transport.broadcast(self._replica, 0)
        self._rows = self._replica.view(transport.size, -1)
        self._own = self._rows[transport.rank]
        self._filled = layout.filled(transport.rank)
        self._padding = [row[layout.filled(rank) :] for rank, row in enumerate(self._rows)]
        self._gradients = torch.zeros_like(self._replica)
        self._gradient_views = self._views_of(self._gradients)
        self.main = nn.Parameter(self._own.float().clone())
        self._versions = [p._version for p in self.params]
        self.residual = torch.zeros_like(self._replica, dtype=torch.float32) if feedback else None
        # If this rank had no gradient: the positions in the residual, and their former values.
        self._owed: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        return [flat[place].view_as(p) for place, p in zip(self.layout.slices, self.params, strict=True)]

    def take_written(self) -> None:
        """Give ``main`` the values that a user has written into the model since ``gather``, as by ``load_state_dict``.

        Not after ``load``, when the model's values belong to the loaded weights.
        """
        for p, view, version in zip(self.params, self._views, self._versions):  # noqa: B905 - none after ``load``
            if p._version != version:
                place = self._place(view)
                written, main = self._own[place], self.main.detach()[place]
                # If main rounds to the written type, it keeps its further bits.
                main.copy_(torch.where(main.to(written.dtype) == written, main, written.float()))

    def weights(self) -> Tensor:
        """Return a copy of this rank's part of the weights."""
        self.take_written()
        return self.main.detach().clone()

    def load(self, weights: Tensor) -> None:
        """Let ``main`` have the weights of a checkpoint. The model's are loaded before or after it."""
        self.main.detach().copy_(weights)
        self._versions = []

    def _place(self, view: Tensor) -> slice:
        """Return where ``main`` has this rank's elements of a parameter."""
        first = view.storage_offset() - self._own.storage_offset()
        return slice(max(0, first), max(0, first + view.numel()))

    def reduce(self, codec: Codec, transport: Transport, seed: int) -> None:
        """Give ``main`` the average of its gradients over ranks: summed and divided in f32, for any type."""
        pairs = [(to, p.grad) for to, p in zip(self._gradient_views, self.params, strict=True) if p.grad is not None]
        if len(pairs) < len(self.params):
            self._gradients.zero_()
        if self.residual is not None:
            owed = zip(self._views_of(self.residual), self.params, strict=True)
            self._owed = {p: (place, place.clone()) for place, p in owed if p.grad is None}
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])
        rows = self._gradients.view_as(self._rows)
        own = torch.empty_like(self.main)
        if transport.size > 1:
            halves.reduce_scatter(rows, own, codec, transport, seed=seed, residual=self.residual)
            own.mul_(1 / transport.size)
        else:
            own.copy_(rows[0])
        own[self._filled :] = 0  # a codec's rotation spreads values into the padding, which belongs to no parameter
        self.main.grad = own

    def gather(self, weights: Weights, transport: Transport, seed: int) -> None:
        """Bring every rank's copy of the weights to the owners' weights, as far as the codec keeps them."""
        if transport.size == 1:
            self._own.copy_(self.main)
        elif weights.differences:
            main = self.main.detach()
            if weights.codec.lossless:
                main = main.to(self._replica.dtype)
            halves.all_gather(main, self._rows, weights.codec, transport, seed=seed, differences=True)
            torch._foreach_zero_(self._padding)  # a rotation spreads differences there, and no checkpoint has them
        else:
            mine = self.main.to(self._replica.dtype)
            halves.all_gather(mine, self._rows, weights.codec, transport, seed=seed)
        self._versions = [p._version for p in self.params]

    def hold(self, unused: Collection[Tensor], state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the elements of ``unused`` parameters in ``main``, its ``state`` and ``residual``: views, and copies.

        ``main`` and its gradient become zero there until ``put_back``. Otherwise weight decay, or a lossy codec's
        noise, would add to states that the inner step creates.
        """
        assert self.main.grad is not None
        main, held = self.main.detach(), [self._owed[p] for p in unused if p in self._owed]
        states = [
            x for x in state.values() if isinstance(x, Tensor) and x.shape == main.shape and x.is_floating_point()
        ]
        for p, view in zip(self.params, self._views, strict=True):
            place = self._place(view)
            if p in unused and main[place].numel():
                held += [(x[place], x[place].clone()) for x in (main, *states)]
                main[place] = 0
                self.main.grad[place] = 0
        return held

    def copies(self, unused: Collection[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the model's weights of ``unused`` parameters, and their copies: a lossy gather changes the weights."""
        return [(view, view.clone()) for p, view in zip(self.params, self._views, strict=True) if p in unused]

    def check(self, params: Sequence[Tensor]) -> None:
        """Take the values written into the model.

        Raises:
            UsageError: the group has other parameters now, or their memory is no longer the flat tensor.
        """
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            raise UsageError(
                f"a group of a ShardedOptimizer has {len(params)} parameters, not the {len(self.params)} that it was "
                "made with; its parts are cut already: make a new one"
            )
        for p, view in zip(self.params, self._views, strict=True):
            if p.data_ptr() != view.data_ptr():
                raise UsageError(
                    f"a parameter of shape {tuple(p.shape)} was given other memory after the ShardedOptimizer was "
                    "made, as model.to(...) does; do that first"
                )
        self.take_written()


def put_back(held: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy values back to where ``FlatShard`` has taken them."""
    for place, values in held:
        place.copy_(values)


def copy_options(source: Optimizer, to: Optimizer) -> None:
    """Give the groups of ``to`` the options of the groups of ``source``."""
    for given, group in zip(source.param_groups, to.param_groups, strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})


def check_parameters(params: list[nn.Parameter]) -> None:
    """Raise ``ConfigError`` if a group has parameters that cannot be one flat tensor."""
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) != 1 or next(iter(kinds))[0] not in DTYPE_CODES:
        raise ConfigError(
            f"a group of a ShardedOptimizer has parameters of {sorted(map(str, kinds)) or 'no type: there are none'}; "
            "expected one type, float32, bfloat16 or float16, on one device: make a group for each"
        )
    for p in params:
        if type(p).__name__ == "DTensor" or hasattr(p, "_sharded_param_data"):
            raise ConfigError(f"a parameter of shape {tuple(p.shape)} is sharded already; a ShardedOptimizer does that")
        if not p.requires_grad:
            raise ConfigError(f"a parameter of shape {tuple(p.shape)} needs no gradient; leave it out")


def stepped_once(optimizer: Optimizer) -> Optimizer:
    """Return a copy of ``optimizer`` that has states. A checkpoint needs tensors of the right shapes to load into."""
    stepped = copy.deepcopy(optimizer)
    for group in stepped.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    stepped.step()
    return stepped
