"""``Muon``: matrices have owners, which get their gradients, make updates orthonormal and send them to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..base.errors import ConfigError
from ..codecs import Codec
from ..functional import Group, make_codec
from ..training.parameters import given_names
from ..training.weights import Weights
from .muon_replicas import MuonOfReplicas

if TYPE_CHECKING:
    from .muon_fsdp import MuonOfShards

_APART = ("head", "lm_head", "output", "classifier", "wte", "wpe")


def Muon(  # noqa: N802 - torch's name
    model: nn.Module | Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    *,
    codec: str | Codec = "int4",
    update: str | Codec | None = None,
    matrices: Callable[[str, Tensor], bool] | None = None,
    others: Mapping[str, Any] | None = None,
    group: Group = None,
    check_replicas: bool | int | None = None,
    **options: Any,
) -> MuonOfReplicas | MuonOfShards:
    """Return an optimizer: Muon for matrices and AdamW for all other parameters, with compressed messages.

    Each matrix has one owner; owners have about equally many elements. The owner makes the orthonormal update, by
    ``torch.optim.Muon``, and sends it to the ranks that hold the matrix.

    - **Replicas** (every rank has the whole model): the result is a ``ShardedOptimizer``. ``step`` sums gradients on
      their owners, by ``codec`` with error feedback. Owners keep momentum and f32 weights. All ranks add the difference
      between an owner's weights and theirs; the next difference contains the loss of coding. So weights have the same
      bits on every rank. Other parameters are cut evenly over ranks. The notes of ``ShardedOptimizer`` on ranks, unused
      parameters, clipping and ``GradScaler`` hold here too.
    - **FSDP2** (parameters are DTensors, sharded by rows over one dimension of a mesh): FSDP averages the gradients.
      Each rank keeps the momentum of its rows. ``step`` sends these rows to the owners, with error feedback, and
      receives the rows of the update. AdamW needs no messages. With HSDP each replica has owners of its own, so
      ``step`` sends nothing between replicas.

        optimizer = fl.Muon(model, lr=0.02, others={"lr": 3e-4})

    A matrix is a parameter of two dimensions whose own name ends in "weight", unless its module is an ``nn.Embedding``
    or has a name like those of embeddings and output layers: "head", "lm_head", "output", "classifier", "wte", "wpe",
    or with "embed" in its name.

    Args:
        model: the model, or ``model.named_parameters()``. Parameters that require no gradient are left out.
        lr: learning rate of Muon, and of AdamW unless ``others`` has one.
        codec: of gradients, or with FSDP2 of momentum: "raw", or a dense codec such as "int4".
        update: codec of the updates. None: "raw" if ``codec`` loses nothing, else "int2".
        matrices: returns whether a parameter, with its name, is one for Muon; it must have two dimensions. None: as
            above.
        others: options of ``torch.optim.AdamW``.
        group: process group or transport of the replicas; None means all ranks. With FSDP2 the mesh says it.
        check_replicas: as for ``ShardedOptimizer``; with FSDP2 there are none.
        options: more options of ``torch.optim.Muon``, such as ``momentum`` and ``adjust_lr_fn``.

    Raises:
        ConfigError: no parameter is a matrix, or an argument is invalid; the message names the expected value.
        PlanMismatch: ranks disagree on parameters or codecs.
        ReplicaMismatch: from ``step``, weights differ over ranks; it names the first.
        TransportError: a peer failed, stopped or timed out.
    """
    named = {p: name for p, name in (given_names(model) or {}).items() if getattr(p, "requires_grad", False)}
    is_matrix = _rule(model) if matrices is None else matrices
    chosen = {p: bool(is_matrix(name, p)) for p, name in named.items()}
    if not any(chosen.values()):
        raise ConfigError(
            f"Muon found no matrix among {len(named)} parameters; give matrices=, a function of name and parameter, or "
            "use ShardedOptimizer with AdamW"
        )

    def key(p: Tensor) -> tuple[bool, str]:
        return not chosen[p], str(p.dtype)  # matrices come first

    groups = [
        _options(AdamW, [*params], {"lr": lr, **(others or {})})
        if other
        else _options(torch.optim.Muon, [*params], {"lr": lr, **options})
        for (other, _), params in groupby(sorted(chosen, key=key), key=key)
    ]
    gradients = make_codec(codec, {}).bare
    updates = Weights.of(("raw" if gradients.lossless else "int2") if update is None else update)
    if not any(type(p).__name__ == "DTensor" for p in chosen):
        return MuonOfReplicas(groups, gradients, updates, group, check_replicas)
    from .muon_fsdp import MuonOfShards  # imported here, because it imports DTensor

    if group is not None or check_replicas:
        raise ConfigError("Muon: with FSDP2 the mesh says which ranks there are; leave group and check_replicas out")
    return MuonOfShards(groups, gradients, updates.codec)


def _options(kind: type[Optimizer], params: list[Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``params`` as a group with all options of ``kind``."""
    try:
        return dict(kind(params, **options).param_groups[0])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Muon: torch.optim.{kind.__name__} refuses its options or parameters ({error})") from None


def _rule(model: nn.Module | Iterable[tuple[str, Tensor]]) -> Callable[[str, Tensor], bool]:
    """Return the rule that chooses matrices if the user gives none."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    embeddings = {each.weight for each in modules if isinstance(each, (nn.Embedding, nn.EmbeddingBag))}

    def is_matrix(name: str, p: Tensor) -> bool:
        *_, module, own = ("", *name.split("."))
        apart = p in embeddings or module in _APART or "embed" in module
        return p.dim() == 2 and own.endswith("weight") and not apart

    return is_matrix
