"""Which link moves messages between the GPUs of one host: that over peer memory where it is the faster one."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.transport import C10dTransport, c10d
from fusionlayer.transport.links import faster as _faster
from fusionlayer.transport.links.base import LinkMessage
from fusionlayer.transport.links.queueing import QueueingLink
from tests.harness import run_ranks

from .device_on_host import Keeping, Shared, compiled, device_on_host

pytestmark = pytest.mark.medium


class Slow(QueueingLink):
    """Stands in for NCCL, over gloo and tensors of the host. An exchange takes ``seconds`` of the clock."""

    seconds = 1.0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: torch.device) -> None:
        super().__init__(rank, timeout, torch.device("cpu"))
        world: Any = dist.group.WORLD
        self._group = world._get_backend(self.device)

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        clock.now += self.seconds
        works = [self._group.send([data], peer, 0) for peer, data, _ in outgoing]
        works += [self._group.recv([data], peer, 0) for peer, data, _ in incoming]
        for work in works:
            work.wait()

    def all_reduce(self, x: Tensor, key: int) -> None:
        self._group.allreduce([x]).wait()

    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        pass


class Timed(Keeping):
    """An exchange takes a second of the clock."""

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        clock.now += 1.0
        super().exchange(outgoing, incoming)


# What is measured in place of the time: only exchanges move it.
clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)


def choose(rank: int, world: int, path: str, faster: str) -> list[Any]:
    """Return the links of a transport and of a duplicate of it, how often they were compared, and what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fusionlayer").addHandler(handler)
    comparing = mock.Mock(side_effect=c10d.is_faster)
    with (
        device_on_host(path, rank, longest=0 if faster == "peers" else 20_000),
        mock.patch.object(c10d, "NcclLink", Slow),
        mock.patch.object(c10d, "PeerLink", Timed),
        mock.patch.object(_faster, "time", clock),
        mock.patch.object(c10d, "is_faster", comparing),
        mock.patch.object(c10d, "check_devices"),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(Slow, "seconds", 2.0 if faster == "peers" else 0.5),
    ):
        if faster == "nobody knows" and rank == 1:
            mock.patch.object(Shared, "reach", side_effect=RuntimeError("no access\nat all")).start()
        peer_bytes = 0 if faster == "-" else 1 << 22
        transport = C10dTransport.among([*range(world)], "chosen", 30.0, nccl=True, peer_bytes=peer_bytes)
        transport.connect_device(torch.device("cuda", 0))
        twin = transport.duplicate()
        twin.connect_device(torch.device("cuda", 0))
        # The stand-in for NCCL serves the host, as that over peer memory does, which takes gloo's place there.
        links = ["peers" if isinstance(each._links["cpu"], Keeping) else "NCCL" for each in (transport, twin)]
        for each in (transport, twin):
            x = torch.full((world, 5000), rank, dtype=torch.uint8)
            each.all_to_all(x, out := torch.empty_like(x))
            each.drain()
            assert (out == torch.arange(world)[:, None]).all()
        for each in (transport, twin):
            each.close()
    return [*links, comparing.call_count, [line for line in said if "NCCL" in line]]


@pytest.mark.parametrize(
    "faster, taken, compared",
    [("peers", "peers", 1), ("NCCL", "NCCL", 1), ("nobody knows", "NCCL", 0), ("-", "NCCL", 0)],
)
def test_the_faster_link_is_taken_on_all_ranks(faster: str, taken: str, compared: int) -> None:
    results = run_ranks(choose, 2, compiled(), faster)
    assert [result[:3] for result in results] == [[taken, taken, compared]] * 2
    reason = ["messages are sent by NCCL, as a rank cannot reach the memory of the others: rank 1: no access"]
    assert [result[3] for result in results] == [reason if faster == "nobody knows" else []] * 2
