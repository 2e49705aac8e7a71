"""``two_shot`` in one launch between processes: memory that all map, and the CUDA kernels compiled for the CPU."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from fusionlayer import codecs, collectives, native
from fusionlayer.base import libraries
from fusionlayer.transport import C10dTransport
from fusionlayer.transport.links import peer_memory
from fusionlayer.transport.links.base import LinkError
from fusionlayer.transport.links.gloo import GlooLink
from tests.harness import run_ranks
from tests.native.conftest import host_kernels
from tests.synthetic import gradient
from tests.transport.device_on_host import Shared

__all__ = ["host_kernels"]


WARPS = 8


class Kernels:
    """The codec core of this CPU, and the kernels for what it lacks."""

    def __init__(self, path: str) -> None:
        self._core, self._kernels = libraries.cpu(), ctypes.CDLL(path)
        libraries.declare_cuda(self._kernels)

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels if "two_shot" in name else self._core, name)


@contextmanager
def launching(link: GlooLink) -> Iterator[Tensor]:
    if link.__dict__.get("_fails"):
        raise LinkError(1, "given up")
    yield link.__dict__.setdefault("_stop", torch.zeros(1, dtype=torch.int32))


@contextmanager
def kernels_instead(path: str) -> Iterator[None]:
    """Let this process's tensors, which lie in the host's memory, be those of a device for which the kernels are."""
    library = Kernels(path)
    with (
        mock.patch.object(peer_memory, "DeviceMemory", Shared),
        mock.patch.object(native, "cpu", lambda: library),
        mock.patch.object(native, "cuda", lambda: library),
        mock.patch.object(native, "most_warps", lambda device: WARPS),
        mock.patch.object(GlooLink, "can_launch", True),
        mock.patch.object(GlooLink, "launching", launching),
    ):
        yield


def sums(rank: int, world: int, path: str, peer_bytes: int) -> list[tuple[list[int], int]]:
    """Return the bits of sums and residuals, and how many calls of the transport each sum took."""
    results = []
    with kernels_instead(path):
        transport = C10dTransport(peer_bytes=peer_bytes)
        for name, numel, feedback in [("int4", 70_001, True), ("taco", 9_000, False), ("fp8", 500, False)]:
            x, residual = gradient(numel, rank), gradient(numel, 9 + rank) * 0.1 if feedback else None
            before = transport.sequence
            collectives.get("two_shot")(x, codecs.get(name).bare, transport, seed=5, residual=residual)
            every = torch.cat([x] if residual is None else [x, residual])
            results.append((every.view(torch.int32).tolist(), transport.sequence - before))
        transport.close()
    return results


def test_processes_sum_in_one_launch_to_the_bits_of_two_shot(host_kernels: Callable[[str], ctypes.CDLL]) -> None:
    path = host_kernels("plain")._name
    plain, fused, short = (run_ranks(sums, 3, path, nbytes) for nbytes in (0, 1 << 20, 48 << 10))
    for rank in range(3):
        assert [bits for bits, _ in fused[rank]] == [bits for bits, _ in plain[rank]]
        assert fused[rank][1][1] == 1 < plain[rank][1][1] == fused[rank][2][1], "one call; fp8 has a scale for all"
        assert short[rank][0][1] > fused[rank][0][1], "what does not fit goes in pieces"
        assert short[rank][1][0] == plain[rank][1][0]


def mine_alone(rank: int, world: int, path: str) -> tuple[bool, int]:
    """Return whether rank 1, which cannot map the memory of others, keeps all ranks from it, and the calls of a sum."""
    with kernels_instead(path):
        if rank == 1:
            with mock.patch.object(peer_memory.DeviceMemory, "reach", side_effect=RuntimeError("no access")):
                return _summed(rank)
        return _summed(rank)


def _summed(rank: int) -> tuple[bool, int]:
    transport = C10dTransport(peer_bytes=1 << 20)
    x = gradient(5000, rank)
    for _ in range(2):
        before = transport.sequence
        collectives.get("two_shot")(x, codecs.get("int4").bare, transport, seed=5)
    (memory,) = transport.__dict__["_peer_memory"].values()
    transport.close()
    return memory.is_whole, transport.sequence - before


def test_a_rank_that_cannot_reach_the_others_lets_all_go_by_messages(
    host_kernels: Callable[[str], ctypes.CDLL],
) -> None:
    assert run_ranks(mine_alone, 2, host_kernels("plain")._name) == [(False, 2)] * 2
