"""Checkpoints as differences: any version comes back to the bit, and what was damaged is told."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, WireError
from tests.codecs.conformance import same_bits
from tests.codecs.test_delta import moved
from tests.synthetic import bit_patterns, gradient


def state_at(version: int) -> dict[str, Any]:
    """Return a state whose bf16 weights change by little from version to version, with more that a job keeps."""
    weights = gradient(50_000, 1, torch.bfloat16)
    for i in range(version):
        weights = moved(weights, 0.01, stream=10 * i)
    return {
        "weights": weights.view(500, 100),
        "odd": bit_patterns(torch.float32).roll(version),
        "of the optimizer": {"state": {0: {"step": torch.tensor(float(version)), "counts": torch.arange(version)}}},
        "cast": gradient(30, version, torch.bfloat16 if version % 2 else torch.float32),
        "late": gradient(100 * version, 2) if version > 2 else None,
        "list": [version, "text", gradient(3, version), (True, 0.1)],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return same_bits(a, b) if a.is_floating_point() else torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_every_version_comes_back_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert fl.checkpoint.versions(folder) == []
    (tmp_path / "a").mkdir()
    for version in range(8):
        state = state_at(version)
        kept = copy.deepcopy(state)
        assert fl.checkpoint.save_delta(state, folder, every=3) == version
        assert same(state, kept), "nothing that is saved changes"
    assert fl.checkpoint.versions(folder) == list(range(8))
    for version in (7, 0, 3, 5):
        assert same(fl.checkpoint.load(folder, version), state_at(version))
    assert same(fl.checkpoint.load(folder), state_at(7))
    for version in (3, 4, 5):  # the last one that is whole, and those that need it
        os.link(folder / f"{version:08d}.pt", tmp_path / f"{version:08d}.pt")
    assert same(fl.checkpoint.load(tmp_path), state_at(5))


def test_differences_are_small_and_models_load_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).bfloat16()
    for version in range(3):
        fl.checkpoint.save_delta(model.state_dict(), tmp_path)
        with torch.no_grad():
            model[0].weight.copy_(moved(model[0].weight.flatten(), 0.02, stream=version).view(300, 300))  # type: ignore[arg-type,operator]
    whole, first, second = (path.stat().st_size for path in sorted(tmp_path.iterdir()))
    assert max(first, second) < whole / 10
    other = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).bfloat16()
    other.load_state_dict(fl.checkpoint.load(tmp_path))
    assert torch.equal(other[1].weight, model[1].weight) and not torch.equal(other[0].weight, model[0].weight)


def test_what_is_missing_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no versions, not any"):
        fl.checkpoint.load(tmp_path)
    for version in range(3):
        fl.checkpoint.save_delta(state_at(version), tmp_path)
    (tmp_path / ".00000003.17").write_bytes(b"half a file")  # of a process that was killed
    assert fl.checkpoint.versions(tmp_path) == [0, 1, 2]
    with pytest.raises(ConfigError, match="has versions 0 to 2, not 3"):
        fl.checkpoint.load(tmp_path, 3)
    for wrong in ({"every": 0}, {"every": True}):
        with pytest.raises(ConfigError, match="expected a number of versions"):
            fl.checkpoint.save_delta({}, tmp_path, **wrong)
    with pytest.raises(ConfigError, match="expected a mapping"):
        fl.checkpoint.save_delta([], tmp_path)  # type: ignore[arg-type]
    first, second = tmp_path / "00000000.pt", tmp_path / "00000001.pt"
    data = bytearray(second.read_bytes())
    for place in range(100, len(data), len(data) // 50):
        data[place] ^= 1
        second.write_bytes(data)
        try:
            assert same(fl.checkpoint.load(tmp_path), state_at(2)), "wrong weights were accepted"
        except WireError as error:
            assert "\n" not in str(error)
        data[place] ^= 1
    second.write_bytes(first.read_bytes())
    with pytest.raises(WireError, match="is not version 1"):
        fl.checkpoint.load(tmp_path)
    second.write_bytes(bytes(data))
    torch.save({**torch.load(first), "state": state_at(1)}, first)
    with pytest.raises(WireError):
        fl.checkpoint.load(tmp_path, 1)
    first.unlink()
    with pytest.raises(WireError, match="00000000.pt is missing, and later versions need it"):
        fl.checkpoint.load(tmp_path, 2)
