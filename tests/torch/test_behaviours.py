"""The contract of ``horovod.torch``, behaviour by behaviour, on one to four ranks."""

import os
from collections.abc import Callable

import pytest

import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.loops import looped
from tests.ranks import on_processes
from tests.torch.behaviours import CHECKS


def on_this_rank(names: list[str]) -> Callable[[int], None]:
    def rank_main(rank: int) -> None:
        hvd.init()
        try:
            for name in names:
                CHECKS[name](rank, hvd.size())
        finally:
            hvd.shutdown()

    return rank_main


@looped("size", [1, 2, 3])
@looped("name", CHECKS)
def test_behaviour(name: str, size: int) -> None:
    local.run(on_this_rank([name]), size)


@pytest.mark.medium
@on_processes(3)
def test_processes(rank: int, world: int) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "100000"
    on_this_rank(list(CHECKS))(rank)
