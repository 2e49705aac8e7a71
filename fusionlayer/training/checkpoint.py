"""Checkpoints as differences: each version holds changes since the previous one, to the bit.

    fl.checkpoint.save_delta({"model": model.state_dict(), "step": step}, "checkpoints")
    state = fl.checkpoint.load("checkpoints")

A folder belongs to one process. Ranks whose states differ save them with ``save_ranks``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import files
from ..base.errors import ConfigError, FusionLayerError, WireError, kind_of, require
from ..native.wire import DTYPE_CODES
from ..publishing.tensors import Message, decode, encode, expected_bytes, shape_of
from .rank_states import load_ranks, rank_state, save_ranks

__all__ = ["load", "load_ranks", "rank_state", "save_delta", "save_ranks", "versions"]

_FORM = "fusionlayer checkpoint 1"
_NAME = re.compile(r"(\d{8})\.pt")
_DTYPES = {str(dtype): dtype for dtype in DTYPE_CODES}
_MESSAGE = {"codec", "dtype", "shape", "data"}
"""Keys of the mapping that replaces an encoded tensor."""


def save_delta(state: Mapping[str, Any], folder: str | os.PathLike[str], *, every: int = 10) -> int:
    """Save ``state`` as the next version in ``folder``, and return the version's number: 0, 1, 2, ...

    Tensors of f32, bf16 and f16 are saved as changes since the previous version, by ``delta``. They are saved whole, by
    ``zip``, in every version whose number is a multiple of ``every``, and if the previous version has no such tensor.
    The rest of the state is saved unchanged. The version before is read for this, and so are those back to the last one
    that is whole. A file is complete once it has its name.

    Args:
        state: tensors, numbers and texts, in mappings and lists, as for ``torch.load`` with ``weights_only``. No
            ``DTensor``: save the result of ``to_local``.
        folder: is made if it is missing. Only this user can read the files, unless it is set-group-ID.
        every: how many versions share one that is whole.

    Raises:
        ConfigError: an argument is invalid.
        FusionLayerError: the file cannot be written.
        WireError: the version before cannot be read.
    """
    require(state, Mapping, "save_delta", "a mapping, such as model.state_dict()")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every={every!r}; expected a number of versions, at least 1")
    folder = Path(folder)
    known = versions(folder)
    version = known[-1] + 1 if known else 0
    since = known[-1] if known and version % every else None
    before = None if since is None else load(folder, since)
    content = {"form": _FORM, "version": version, "since": since, "state": _encoded(state, before)}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.whole(_file(folder, version), sync=True) as file:
            torch.save(content, file)
    except OSError as error:
        raise FusionLayerError(f"version {version} in {folder} cannot be written: {error.strerror}") from error
    return version


def load(folder: str | os.PathLike[str], version: int | None = None) -> dict[str, Any]:
    """Return the state of a version that ``save_delta`` has saved, to the bit; its tensors are on the CPU.

    Args:
        folder: where versions are.
        version: number of the version; None: the newest.

    Raises:
        ConfigError: the folder has no such version.
        WireError: a file was damaged, or is not the one that belongs there.
    """
    require(folder, (str, os.PathLike), "checkpoint.load", "the path of a folder")
    folder = Path(folder)
    known = versions(folder)
    if not known or (version is not None and version not in known):
        has = f"versions {known[0]} to {known[-1]}" if known else "no versions"
        raise ConfigError(f"{folder} has {has}, not {'any' if version is None else version}; give one that it has")
    chain = [_read(folder, known[-1] if version is None else version)]
    while (since := chain[-1]["since"]) is not None:
        if not isinstance(since, int) or since >= chain[-1]["version"]:
            raise WireError(f"version {chain[-1]['version']} in {folder} follows {since!r}: it was damaged")
        chain.append(_read(folder, since))
    state: dict[str, Any] = {}
    for content in reversed(chain):
        try:
            state = _decoded(content["state"], state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            path = _file(folder, content["version"])
            raise WireError(f"{path} holds what save_delta does not write ({error}): it was damaged") from error
    return state


def versions(folder: str | os.PathLike[str]) -> list[int]:
    """Return the numbers of the versions in ``folder``, ascending; none if it is missing."""
    names = (_NAME.fullmatch(path.name) for path in Path(folder).glob("*.pt"))
    return sorted(int(name[1]) for name in names if name)


def _file(folder: Path, version: int) -> Path:
    return folder / f"{version:08d}.pt"


def _read(folder: Path, version: int) -> dict[str, Any]:
    path = _file(folder, version)
    if not path.exists():
        raise WireError(f"{path} is missing, and later versions need it: copy it back")
    try:
        with files.opened(path, follow=True) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for files that were damaged
        first = str(error).partition("\n")[0]
        raise WireError(f"{path} cannot be read ({first}): it was damaged, or is no version of a checkpoint") from error
    told = content if isinstance(content, dict) else {}
    if (told.get("form"), told.get("version")) != (_FORM, version) or not {"since", "state"} <= told.keys():
        raise WireError(f"{path} is not version {version} of a checkpoint as save_delta makes it; give another folder")
    return told


# ---- tensors in a state ---------------------------------------------------------------------------------------------


def _encoded(value: Any, before: Any) -> Any:
    """Return ``value`` with a message instead of each tensor that codecs take; ``before`` is the last version's."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            raise ConfigError(f"save_delta: got {kind_of(value)}; expected plain tensors, such as p.to_local()")
        x = value.detach().cpu().contiguous()
        return _message(x, before) if x.dtype in DTYPE_CODES else x.clone()
    if isinstance(value, Mapping):
        if value.keys() == _MESSAGE:
            raise ConfigError(
                f"save_delta: a mapping has the keys {sorted(_MESSAGE)}, which have a meaning; rename one"
            )
        known = before if isinstance(before, Mapping) else {}
        return {key: _encoded(each, known.get(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        row = before if isinstance(before, (list, tuple)) else ()
        pairs = [(each, row[i] if i < len(row) else None) for i, each in enumerate(value)]
        return type(value)(_encoded(*pair) for pair in pairs) if type(value) in (list, tuple) else value
    return value


def _message(x: Tensor, before: Any) -> dict[str, Any]:
    since = isinstance(before, Tensor) and (before.shape, before.dtype) == (x.shape, x.dtype)
    message = encode(x.view(-1), before.view(-1) if since else None, header=True)
    return {"codec": message.codec, "dtype": str(x.dtype), "shape": list(x.shape), "data": message.data}


def _decoded(value: Any, before: Any) -> Any:
    """Return ``value`` with tensors instead of messages: the inverse of ``_encoded``."""
    if isinstance(value, dict):
        if value.keys() == _MESSAGE:
            return _tensor(value, before)
        known = before if isinstance(before, dict) else {}
        return {key: _decoded(each, known.get(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        row = before if isinstance(before, (list, tuple)) else ()
        return type(value)(_decoded(each, row[i] if i < len(row) else None) for i, each in enumerate(value))
    return value


def _tensor(message: dict[str, Any], before: Any) -> Tensor:
    shape, dtype, data = shape_of(message["shape"]), _DTYPES[message["dtype"]], message["data"]
    least, most = expected_bytes(message["codec"], math.prod(shape), dtype, header=True)
    if not least <= data.numel() <= most:
        raise WireError(f"a tensor of {dtype} {list(shape)} in {data.numel()} bytes: it was damaged")
    out = torch.empty(shape, dtype=dtype, device="cpu")
    base = before.view(-1) if isinstance(before, Tensor) else None
    decode(Message(message["codec"], data), base, out.view(-1), header=True)
    return out
