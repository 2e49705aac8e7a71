"""``MuonOfShards``: Muon for matrices that FSDP2 has sharded by rows; an owner of each makes its update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import AdamW, Optimizer

from .. import context
from ..base.errors import ConfigError, UsageError
from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TwoLevelCodec
from .layout import Layout
from .muon_replicas import known


class MuonOfShards(Optimizer):
    """The result of ``Muon`` for a model under FSDP2.

    Its states are DTensors, sharded as their parameters: ``momentum_buffer``, and ``owed``, the error feedback of the
    momentum. ``torch.distributed.checkpoint`` saves them and loads them on another number of ranks. ``owed_update`` of
    the matrices that this rank owns is not saved: it is less than a step of the codec.

    Args:
        groups: groups of matrices with all options of ``torch.optim.Muon``, and groups with those of AdamW.
        gradients: codec of gradients to owners.
        updates: codec of the returned updates.
    """

    def __init__(self, groups: list[dict[str, Any]], gradients: Codec, updates: Codec) -> None:
        context.refuse_elastic("Muon", "without a rank its matrices would be missing; use DistributedOptimizer")
        super().__init__(groups, {})
        for codec in (gradients, updates):
            if codec.needs_feedback or isinstance(codec, (AgreeingCodec, TwoLevelCodec)):
                raise ConfigError(f"Muon with FSDP2 cannot send {codec}; use a dense codec of one level, such as int4")
        self._gradients, self._updates = gradients, updates
        self._matrices: list[DTensor] = [p for group in groups if "momentum" in group for p in group["params"]]
        cuts = {(p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, ()) for p in self._matrices}
        mesh, placements = cuts.pop()
        if cuts or mesh is None or placements not in ((Shard(0),), (Replicate(), Shard(0))):
            raise ConfigError(
                "Muon takes matrices that fully_shard has sharded by rows over one mesh, of shards or of replicas and "
                "shards; other parameters may be AdamW's: give matrices="
            )
        # Replicas have the same gradients, and each makes the same updates from them.
        self._transport = transport = context.transport(mesh.get_group(mesh.ndim - 1))
        size = transport.size
        # FSDP2 cuts rows as torch.chunk does: only the last ranks have fewer.
        self._rows = [-(-p.shape[0] // size) for p in self._matrices]
        layout = Layout(tuple(p.numel() for p in self._matrices), size, 1, whole=True)
        self._owned = [[*layout.owned(rank)] for rank in range(size)]
        block = max(gradients.block, updates.block)
        most = max(sum(self._rows[i] * self._matrices[i].shape[1] for i in owned) for owned in self._owned)
        self._piece = -(-most // block) * block
        self._owed, self._owed_update = (torch.zeros(size * self._piece, device=mesh.device_type) for _ in range(2))
        self._steps = 0
        if size > 1:
            shapes = [tuple(p.shape) for p in self._matrices]
            transport.agree("matrices or codecs of Muon", shapes, gradients, updates)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; all ranks call it. Matrices without a gradient keep their values and states.

        Raises:
            UsageError: a gradient is sparse.
            TransportError: a peer failed, stopped or timed out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            if "momentum" in group:
                options.update(dict.fromkeys(group["params"], group))
                continue
            inner = AdamW([{"params": group["params"]}], **known(AdamW, group))
            inner.state = self.state
            inner.step()
        present = {i for i, p in enumerate(self._matrices) if p.grad is not None}
        if present:
            self._step_matrices(present, options)
        self._steps += 1
        return loss

    def _step_matrices(self, present: set[int], options: dict[Tensor, dict[str, Any]]) -> None:
        size, rank = self._transport.size, self._transport.rank
        mine = self._owed.new_zeros(size, self._piece)
        self._owed.zero_()
        owed = self._owed.view_as(mine)
        for owner in range(size):
            places = self._pieces(mine[owner], owner, rank), self._pieces(owed[owner], owner, rank)
            for i in present.intersection(places[0]):
                direction, kept = self._direction(self._matrices[i], options[self._matrices[i]])
                places[0][i].copy_(direction)
                places[1][i].copy_(kept)
        arrived = self._exchange(mine, self._gradients, self._owed, 0)
        for owner in range(size):
            for i, place in self._pieces(owed[owner], owner, rank).items():
                if i in present:
                    self.state[self._matrices[i]]["owed"].to_local().copy_(place)
        back = torch.zeros_like(mine)
        for i in present.intersection(self._owned[rank]):
            whole = torch.cat([self._pieces(arrived[source], rank, source)[i] for source in range(size)])
            update = _update(whole, options[self._matrices[i]])
            for to, rows in enumerate(update.split(self._rows[i])):
                self._pieces(back[to], rank, to)[i].copy_(rows)
        updates = self._exchange(back, self._updates, self._owed_update, 1)
        for owner in range(size):
            for i, place in self._pieces(updates[owner], owner, rank).items():
                if i in present:
                    p = self._matrices[i]
                    p.to_local().mul_(1 - options[p]["lr"] * options[p]["weight_decay"]).add_(place)

    def _pieces(self, row: Tensor, owner: int, holder: int) -> dict[int, Tensor]:
        """Return the rows of each matrix of ``owner`` that ``holder`` holds, as views of ``row``, by number."""
        found, start = {}, 0
        for i in self._owned[owner]:
            height, width = self._matrices[i].shape
            rows = min(max(0, height - holder * self._rows[i]), self._rows[i])
            found[i] = row[start : start + rows * width].view(rows, width)
            start += rows * width
        return found

    def _direction(self, p: DTensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the orthonormal matrices of Muon, and the remaining ones of earlier matrices."""
        grad = p.grad
        if not isinstance(grad, DTensor):
            raise UsageError(f"Muon got a gradient of type {type(grad).__name__} of shape {tuple(p.shape)}")
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
            state["owed"] = torch.zeros_like(grad, dtype=torch.float32)
        momentum, local = state["momentum_buffer"].to_local(), grad.to_local()
        momentum.lerp_(local, 1 - group["momentum"])
        return local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum, state["owed"].to_local()

    def _exchange(self, rows: Tensor, codec: Codec, residual: Tensor, number: int) -> Tensor:
        """Send row r of ``rows`` to rank r; return the received rows, by rank. This rank's own row loses nothing."""
        transport, piece = self._transport, rows.size(1)
        owed = residual.view_as(rows)[transport.rank]
        own = rows[transport.rank] + owed
        capacity = codec.wire(piece, rows.dtype).capacity
        sends, recvs = (
            transport.scratch(f"{way} 0", rows.size(0) * capacity, rows.device).view(-1, capacity)
            for way in ("outgoing", "incoming")
        )
        seed = derive_seed(self._steps, transport.rank, number)
        codec.encode_chunks(rows.view(-1), sends, piece, seed=seed, residual=None if codec.lossless else residual)
        transport.all_to_all(sends, recvs)
        out = torch.empty_like(rows)
        codec.decode_chunks(recvs, out.view(-1), piece)
        out[transport.rank] = own
        owed.zero_()
        return out


def _update(direction: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the update of ``torch.optim.Muon`` for this direction, without weight decay."""
    matrix = nn.Parameter(torch.zeros_like(direction))
    matrix.grad = direction
    how = {**known(torch.optim.Muon, group), "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    torch.optim.Muon([matrix], **how).step()
    return matrix.detach()
