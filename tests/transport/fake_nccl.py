"""NCCL as the ranks of a test see it: bytes move by gloo, and what NCCL refuses is refused.

``FakeNccl`` stands in for ``torch.distributed.ProcessGroupNCCL``, with tensors of ``tests/streams.py``. Its rules are
those of NCCL and of torch's group over it:

- a GPU has one rank in a communicator;
- all tensors of a communicator are on the GPU for which it was made;
- the ranks connect together, before any call;
- every rank launches the operations of a GPU's communicators in one order. ``FakeNccl.launched`` has them, for the test
  to compare.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fusionlayer.training import comm_hook
from tests.streams import Event, Gpu, OnGpu, Stream

__all__ = ["FakeNccl", "accepts", "gpus"]


def accepts(method: str, count: int) -> bool:
    """Return whether torch's backends take so many arguments, by the docstring: C++ shows no other signature."""
    overloads = re.findall(
        rf"^(?:\d+\. )?{method}\(self: [\w.]+(.*)\) -> ", getattr(Backend, method).__doc__, re.MULTILINE
    )
    most = (len(re.findall(r", \w+: ", overload)) for overload in overloads)
    return any(n - overload.count(" = ") <= count <= n for n, overload in zip(most, overloads, strict=True))


class _Work:
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class FakeNccl:
    """One rank's end of a communicator.

    Attributes:
        launched: the operations of this process, each with its communicator's name.
    """

    launched: list[tuple[str, str]] = []

    class Options:
        is_high_priority_stream = False
        _timeout = timedelta(minutes=5)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "the watchdog would end the process"
        assert dist.get_debug_level() != dist.DebugLevel.DETAIL, "DETAIL switches the watchdog on again"
        self._store, self._rank, self._size = store, rank, size
        self._device: torch.device | None = None
        self._gloo: Any = None
        self._together: list[tuple[bool, Tensor, int]] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        host = os.environ.get("NCCL_HOSTID", "this host")
        own = f"{host} {Stream.gpu.visible[device.index]}"
        if self._rank == 0:
            self._store.set("name", uuid.uuid4().hex)
        self._store.set(f"gpu/{self._rank}", own)
        every = [self._store.get(f"gpu/{rank}").decode() for rank in range(self._size)]
        self._name = self._store.get("name").decode()
        if len({*every}) < self._size:
            raise dist.DistBackendError(f"NCCL error: ncclInvalidUsage\nDuplicate GPU detected: {every}")
        self._device = device
        self._gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self._store), self._rank, self._size, timedelta(minutes=3)
        )

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def _take(self, what: str, *tensors: tuple[Tensor, bool]) -> list[Tensor]:
        """Check the tensors of a call, each with whether it is written, and return their elements."""
        assert self._gloo is not None, f"{what} before the ranks have connected, or after the end"
        for x, writes in tensors:
            if not isinstance(x, OnGpu) or x.device != self._device:
                raise dist.DistBackendError(f"{what}: tensor on {x.device}, communicator of {self._device}")
            with Stream.gpu.at(self._device):
                Stream.gpu.touch(x.elements, writes, f"NCCL's {what}")
        self.launched.append((self._name, what))
        return [x.elements.contiguous() for x, _ in tensors]  # type: ignore[attr-defined]

    def _start_coalescing(self) -> None:
        self._together = []

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> _Work:
        assert self._together is not None, "alone it would need a communicator of two ranks"
        self._together.append((True, tensors[0], to))
        return _Work()

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> _Work:
        assert self._together is not None, "alone it would need a communicator of two ranks"
        self._together.append((False, tensors[0], source))
        return _Work()

    def _end_coalescing(self) -> _Work:
        assert self._together is not None
        parts = self._take("group", *((x, not sends) for sends, x, _ in self._together))
        works = [
            (self._gloo.send if sends else self._gloo.recv)([part.view(-1)], peer, 0)
            for (sends, _, peer), part in zip(self._together, parts, strict=True)
        ]
        self._together = None
        for work in works:
            work.wait()
        return _Work()

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Work:
        into, own = self._take("all_gather", (out, True), (x, False))
        self._gloo._allgather_base(into, own.clone()).wait()
        return _Work()

    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]) -> _Work:
        into, own = self._take("all_to_all", (out, True), (x, False))
        self._gloo.alltoall_base(into, own, out_sizes, sizes).wait()
        return _Work()

    def allreduce(self, tensors: Sequence[Tensor]) -> _Work:
        self._gloo.allreduce(self._take("all_reduce", (tensors[0], True))).wait()
        return _Work()

    def broadcast(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> _Work:
        self._gloo.broadcast(self._take("broadcast", (tensors[0], True)), options).wait()
        return _Work()

    def shutdown(self) -> None:
        self._gloo = None

    abort = shutdown


class _Bucket:
    """A bucket of DDP whose memory is on a GPU of the model."""

    def __init__(self, bucket: dist.GradBucket, where: torch.device) -> None:
        self._bucket, self._where = bucket, where
        self.parameters = bucket.parameters

    def buffer(self) -> Tensor:
        return OnGpu(self._bucket.buffer(), self._where)

    def gradients(self) -> list[Tensor]:
        return [OnGpu(gradient, self._where) for gradient in self._bucket.gradients()]


@contextlib.contextmanager
def gpus(visible: Sequence[int]) -> Iterator[Gpu]:
    """Let this process see GPUs of its host, connected by ``FakeNccl``; torch's default group has NCCL for them."""
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 0)
    add_hook = DistributedDataParallel.register_comm_hook

    def hooked(model: DistributedDataParallel, state: object, hook: Callable[..., Future[Tensor]]) -> None:
        where = next(model.parameters()).device
        add_hook(model, state, lambda state, bucket: hook(state, _Bucket(bucket, where)))

    with pytest.MonkeyPatch.context() as patch, mock.patch("fusionlayer.transport._capture.ctypes") as ctypes:
        ctypes.CDLL.return_value = driver
        # This device has done at once what it is given; the model's own events are over once the host has waited.
        patch.setattr(Event, "query", lambda self: self.synchronize() or True)
        patch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        # torch's C++ takes tensors of the model for ones of the CPU, and knows neither CUDA's futures nor its memory.
        patch.setattr(DistributedDataParallel, "register_comm_hook", hooked)
        patch.setattr(comm_hook, "Future", lambda devices: Future())
        patch.setattr(_fsdp_param, "free_storage", lambda tensor: None)
        patch.setattr(_fsdp_param, "alloc_storage", lambda tensor: None)
        with Gpu(visible).installed(patch) as gpu:
            yield gpu
