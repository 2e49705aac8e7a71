"""Saves and loads the states of all ranks, each its own: error feedback, local steps, parts of optimizers.

    fl.checkpoint.save_ranks("checkpoints/7", optimizer=optimizer)
    fl.checkpoint.load_ranks("checkpoints/7", optimizer=optimizer)

Every rank calls both, with one folder for all ranks.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import context
from ..base import files
from ..base.errors import ConfigError, FusionLayerError, WireError, require
from ..functional import Group
from ..scheduler.memory import merged_residuals
from .distributed import Distributed

_KEY = re.compile(r"rank (\d+) of (\d+)")
_TENSOR = "tensor of this rank"
"""The key of the mapping that stands for a tensor in a form."""


def rank_state(*, group: Group = None, **objects: Any) -> dict[str, dict[str, Any]]:
    """Return this rank's states of ``objects``, for ``torch.distributed.checkpoint.save`` next to other states.

    The one key names the rank, so that states of all ranks are kept. All values are tensors. ``load_ranks`` loads it.

    Args:
        group: process group or transport of the ranks; None means all ranks.
        objects: objects with ``state_dict`` by a name of yours: optimizers, and hooks of ``fl.ddp``.

    Raises:
        ConfigError: an object has no ``state_dict``, or its state holds a ``DTensor``.
    """
    place = context.transport(group)
    tensors: list[Tensor] = []
    for name, each in objects.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(f"{name}={each!r}; expected an object with state_dict() and load_state_dict()")
    form = {name: _taken_out(each.state_dict(), tensors) for name, each in objects.items()}
    file = io.BytesIO()
    torch.save(form, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    parts = {str(i): tensor for i, tensor in enumerate(tensors)}
    return {_key(place.rank, place.size): {"form": packed, "tensors": parts}}


def save_ranks(folder: str | os.PathLike[str], *, group: Group = None, **objects: Any) -> None:
    """Save the states of all ranks in ``folder``, a file for each rank. All ranks call it, and it ends on all together.

    Args:
        folder: one folder for all ranks; it is made if it is missing. Only this user can read the files, unless it is
            set-group-ID.
        group: see ``rank_state``.
        objects: see ``rank_state``.

    Raises:
        ConfigError: as ``rank_state``.
        FusionLayerError: the file cannot be written.
        TransportError: a peer failed.
    """
    require(folder, (str, os.PathLike), "save_ranks", "the path of a folder")
    state, folder = rank_state(group=group, **objects), Path(folder)
    (key,) = state
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.whole(folder / f"{key}.pt") as file:
            torch.save(state, file)
    except OSError as error:
        raise FusionLayerError(f"{key} cannot be saved in {folder}: {error.strerror}") from error
    place = context.transport(group)
    if place.size > 1:
        place.barrier()


def load_ranks(folder: str | os.PathLike[str], *, group: Group = None, **objects: Any) -> None:
    """Load what ``save_ranks``, or ``torch.distributed.checkpoint.save`` of a ``rank_state``, has saved in ``folder``.

    On equally many ranks, each gets its own state, to the bit. On another number of ranks, ranks share out the error
    feedback: its sum over ranks stays, so nothing is lost. States of codecs restart, and the rest of an optimizer's
        state is that of one of the ranks. A job of one rank sends nothing, so it drops error feedback.

    Args:
        folder: the folder.
        group: see ``rank_state``.
        objects: the objects to load, by the names with which they were saved.

    Raises:
        ConfigError: the folder lacks states or names, the state belongs to the middle of a round of local steps of
            another number of ranks, or the object's own state cannot go to another number of ranks.
    """
    require(folder, (str, os.PathLike), "load_ranks", "the path of a folder")
    place, folder = context.transport(group), Path(folder)
    saved = _Saved(folder)
    own = saved.load(place.rank % saved.size)
    for name in objects.keys() - own.keys():
        raise ConfigError(f"{folder} has states of {', '.join(own) or 'nothing'}, not of {name!r}; give the same names")
    if saved.size == place.size:
        for name, each in objects.items():
            each.load_state_dict(own[name])
        return
    shares = [saved.load(rank) for rank in range(place.rank, saved.size, place.size)]
    for name, each in objects.items():
        state = own[name]
        if isinstance(state, dict) and state and all(_KEY.fullmatch(str(key)) for key in state):  # a ShardedOptimizer's
            every = [saved.load(rank)[name] for rank in range(saved.size)]
            each.load_state_dict({key: part for one in every for key, part in one.items()})
            continue
        if not isinstance(state, dict) or not _is_shared_out(state):
            raise ConfigError(
                f"{name}: {folder} has its state for {saved.size} ranks, this job has {place.size}, and a "
                f"{type(each).__name__} is for as many ranks; load it in a job of {saved.size}"
            )
        of_memory = [_memory_of(share[name]) for share in shares]
        each.load_state_dict(_shared_out(state, of_memory, place.rank, place.size, _factor_of(each)))


# ---- another number of ranks ------------------------------------------------------------------------------------


def _memory_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a state that is this rank's: of an optimizer that under "fusionlayer", of a hook all."""
    found: Mapping[str, Any] = state.get("fusionlayer", state)
    return found


def _is_shared_out(state: Mapping[str, Any]) -> bool:
    return {"rank", "size", "step"} <= _memory_of(state).keys()


def _factor_of(target: Any) -> float:
    engine = target.reducer.engine if isinstance(target, Distributed) else None
    return 1.0 if engine is None else float(engine.scaling.after)


def _shared_out(
    state: Mapping[str, Any], shares: list[Mapping[str, Any]], rank: int, size: int, factor: float
) -> dict[str, Any]:
    """Return ``state`` for ``rank`` of ``size`` ranks, with the error feedback of all ``shares``."""
    memory = dict(_memory_of(state))
    local = memory.get("local", {})
    if local.get("moved") or local.get("under_way"):
        raise ConfigError(
            f"the state is of the middle of a round of local steps of {memory['size']} ranks, this job has {size}; "
            "load it in a job of as many, or call optimizer.synchronize() before saving"
        )
    # A residual has the unit of the sent values, and ``factor`` converts a sum of these to the applied values.
    residuals = merged_residuals(shares)
    scale = memory.get("factor", 1.0) / factor
    memory |= {"rank": rank, "size": size, "packed": {}, "tensors": {}, "numbers": {}}
    memory["residuals"] = {name: x * scale for name, x in residuals.items()} if scale != 1.0 else residuals
    return {**state, "fusionlayer": memory} if "fusionlayer" in state else memory


# ---- files ----------------------------------------------------------------------------------------------------------


class _Saved:
    """The states of all ranks in a folder: files of ``save_ranks``, or a checkpoint of torch.

    Attributes:
        size: the number of ranks that saved them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._planned: Mapping[str, Mapping[tuple[str, ...], str]] = {}
        keys = {path.stem for path in folder.glob("rank * of *.pt")}
        if (folder / ".metadata").exists() and not keys:
            from . import torch_checkpoint  # most jobs have none

            self._planned = torch_checkpoint.entries_of(folder, _KEY)
            keys = set(self._planned)
        places = [(int(found[1]), int(found[2])) for key in keys if (found := _KEY.fullmatch(key))]
        sizes = {size for _, size in places}
        if len(sizes) != 1 or len(places) != max(sizes):
            shown = ", ".join(sorted(keys)[:8]) or "no states of ranks"
            raise ConfigError(
                f"{folder} has {shown}; expected the states of all ranks of one job, by fl.checkpoint.save_ranks or "
                "rank_state: give another folder, and one for each checkpoint"
            )
        (self.size,) = sizes

    def load(self, rank: int) -> dict[str, Any]:
        """Return the states of ``rank`` by name; tensors are on the CPU."""
        key = _key(rank, self.size)
        if self._planned:
            from . import torch_checkpoint  # most jobs have none

            found = torch_checkpoint.read(self._folder, self._planned[key])
            if ("form",) not in found:
                raise WireError(f"{self._folder} has no states of {key}: it was damaged")
            tensors = {path[1]: x for path, x in found.items() if path[0] == "tensors"}
            content: dict[str, Any] = {"form": found["form",], "tensors": tensors}
        else:
            with files.opened(self._folder / f"{key}.pt", follow=True) as file:
                content = torch.load(file, map_location="cpu", weights_only=True)[key]
        form = torch.load(io.BytesIO(content["form"].numpy().tobytes()), weights_only=True)
        states: dict[str, Any] = _put_back(form, content["tensors"])
        return states


def _key(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"


def _taken_out(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with a mapping instead of each tensor, and append the tensors to ``tensors``."""
    if isinstance(value, Tensor):
        if type(value).__name__ == "DTensor":
            raise ConfigError("the state holds a DTensor; save state_dict() with torch.save, on each rank its own")
        tensors.append(value.detach())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {key: _taken_out(each, tensors) for key, each in value.items()}
    return type(value)(_taken_out(each, tensors) for each in value) if type(value) in (list, tuple) else value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return ``value`` with the tensors in their places: the inverse of ``_taken_out``."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[str(value[_TENSOR])]
        return {key: _put_back(each, tensors) for key, each in value.items()}
    return type(value)(_put_back(each, tensors) for each in value) if type(value) in (list, tuple) else value
