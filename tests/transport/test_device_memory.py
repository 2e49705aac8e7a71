"""Offers of a device's memory: a fixed format, of which nothing is unpickled."""

import os
import pickle
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from fusionlayer.transport.links.device_memory import DeviceMemory, pack, unpack

STORAGE = torch.storage.TypedStorage
FACTS = (Tensor, (5,), (1,), 0, STORAGE, torch.uint8, 1, b"h" * 66, 512, 1024, False, b"/torch_1_2", 3, b"e" * 64, True)


def test_an_offer_has_all_that_torch_needs() -> None:
    assert unpack(pack(5, FACTS)) == FACTS
    with (
        mock.patch.object(reductions, "reduce_tensor", lambda x: (reductions.rebuild_cuda_tensor, FACTS)),
        mock.patch.object(reductions, "rebuild_cuda_tensor", autospec=True) as rebuild,
    ):
        rebuild.__name__ = "rebuild_cuda_tensor"
        DeviceMemory.reach(DeviceMemory.share(torch.zeros(5, dtype=torch.uint8)))
    assert rebuild.call_args.args == FACTS
    with pytest.raises(RuntimeError, match="memory of cpu cannot be shared"):
        DeviceMemory.share(torch.zeros(5, dtype=torch.uint8))


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


def test_what_is_no_offer_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    whole = pack(5, FACTS)
    chance = random.Random(1)
    wrong = [pickle.dumps(Attack(tmp_path / "was run")), b"", whole[:-1], whole + b"x"]
    wrong += [pack(numel, FACTS) for numel in (0, -1, 513)]
    wrong += [pack(5, FACTS[:6] + (-1,) + FACTS[7:]), pack(5, FACTS[:7] + (b"",) + FACTS[8:])]
    wrong += [chance.randbytes(chance.randrange(200)) for _ in range(2000)]
    for offer in wrong:
        with pytest.raises(OSError, match="are no offer of memory"):
            DeviceMemory.reach(offer)
    assert not (tmp_path / "was run").exists()
