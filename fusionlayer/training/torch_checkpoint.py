"""Reads a rank's tensors from a checkpoint of ``torch.distributed.checkpoint``.

torch unpickles a checkpoint's description, and may unpickle values: any user with access to its folder could run code.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..base import files
from ..base.errors import WireError

Entries = Mapping[tuple[str, ...], str]
"""Names of entries by their place below a key."""

_RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    "collections": {"OrderedDict"},
    **dict.fromkeys(("pathlib", "pathlib._local"), {"PosixPath"}),
}
"""What torch writes into a description, by module."""


class _Description(pickle.Unpickler):
    """Makes torch's records alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise WireError(f"it asks for {module}.{name}, which torch does not write there")
        return super().find_class(module, name)


class _CheckpointReader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with files.opened(path, follow=True) as file:
                found = _Description(file).load()
        except Exception as error:  # damaged pickles raise errors of many kinds
            raise WireError(f"{path} cannot be read ({error}): it was damaged, or give another folder") from error
        if not isinstance(found, Metadata):
            raise WireError(f"{path} does not describe a checkpoint of torch; give another folder")
        return found


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise WireError(f"{read_item.storage_index.fqn!r} is no tensor: the checkpoint was damaged")


def entries_of(folder: Path, key: re.Pattern[str]) -> dict[str, Entries]:
    """Return the entries of a checkpoint for each ``key`` in their places."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for entry, path in (_CheckpointReader(folder).read_metadata().planner_data or {}).items():
        for i, part in enumerate(path):
            if isinstance(part, str) and key.fullmatch(part):
                found.setdefault(part, {})[tuple(map(str, path[i + 1 :]))] = entry
    return dict(found)


def read(folder: Path, entries: Entries) -> dict[tuple[str, ...], Tensor]:
    """Return the tensors of these entries, and read no others.

    Raises:
        WireError: as ``entries_of``.
    """
    reader = _CheckpointReader(folder)
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    # What else is there is an empty mapping.
    names = {path: entry for path, entry in entries.items() if isinstance(known.get(entry), TensorStorageMetadata)}
    found = {e: torch.empty(known[e].size, dtype=known[e].properties.dtype, device="cpu") for e in names.values()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this rank reads alone, as it means to
        dcp.load(found, storage_reader=reader, planner=_TensorPlanner(), no_dist=True)
    return {path: found[entry] for path, entry in names.items()}
