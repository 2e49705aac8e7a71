"""Horovod's environment variables, and timelines that begin and end while a job runs."""

import json
import logging
from pathlib import Path

import pytest
import torch

import fusionlayer.torch as hvd
from fusionlayer.torch.environment import VARIABLES, read
from fusionlayer.transport import local


def test_what_the_variables_mean() -> None:
    level = logging.getLogger("fusionlayer").level
    try:
        found = read(
            {
                "HOROVOD_FUSION_THRESHOLD": "1024",
                "HOROVOD_CACHE_CAPACITY": "7",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
                "HOROVOD_TIMELINE": "/tmp/trace.json",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": "11",
                "HOROVOD_LOG_LEVEL": "error",
            }
        )
        assert logging.getLogger("fusionlayer").level == logging.ERROR
    finally:
        logging.getLogger("fusionlayer").setLevel(level)
    assert (found.fusion_bytes, found.cache_capacity) == (1024, 7)
    assert (found.patience.warning, found.patience.limit) == (5, 9)
    assert (found.job.timeline, found.job.timeout) == ("/tmp/trace.json", 11)
    ours = read({"FUSIONLAYER_TIMELINE": "ours", "HOROVOD_TIMELINE": "theirs", "HOROVOD_STALL_CHECK_DISABLE": "1"})
    assert ours.job.timeline == "ours" and ours.patience.warning is None
    assert read({"HOROVOD_TIMELINE": "DYNAMIC"}).job.timeline is None
    for name in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_LOG_LEVEL"):
        assert name in VARIABLES
        with pytest.raises(ValueError, match=name):
            read({name: "-3 eels"})


def test_a_timeline_may_begin_and_end_at_any_time(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        hvd.init()
        hvd.allreduce(torch.ones(4), name="before")
        hvd.barrier()
        hvd.start_timeline(str(tmp_path / "trace"), mark_cycles=True)
        big = [hvd.allreduce_async(torch.ones(1 << 16), name=f"big.{i}") for i in range(8)]
        hvd.allreduce(torch.ones(4), name="small")
        for handle in big:
            hvd.synchronize(handle)
        hvd.barrier()
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(4), name="after")
        hvd.shutdown()

    local.run(rank_main, 2)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.{rank}").read_text())
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"small", "big.0", "big.7"} <= rows and not {"before", "after"} & rows
        names = {event["name"] for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names
