"""Copies between devices, and counters by which their streams wait for each other, without a kernel on any of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .._capture import DRIVER

# From cuda.h: CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, CU_MEMHOSTREGISTER_*, CU_STREAM_MEM_OP_*, and flags.
_CAN_WAIT = 122
_PORTABLE, _MAPPED = 1, 2
_WAIT_64, _WRITE_32 = 4, 2
# Wait until the number in memory, signed, is at least the one given. A write comes after all earlier work of its
# stream, for all observers.
_AT_LEAST, _ORDERED = 0, 0
# The driver takes fewer than 256 operations at once.
_MOST = 255


class _CopyOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams``: its writes and waits have the same fields, and a union of six words around them."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    )


class CopyEngines:
    """The functions of CUDA's driver for copies and counters, on one device. Each queues work on a stream.

    Args:
        device: its CUDA context is current on all threads that call this.

    Raises:
        OSError: there is no driver.
        AttributeError: it is older than CUDA 11.7.
        RuntimeError: the device's streams cannot wait for numbers.
    """

    def __init__(self, device: torch.device) -> None:
        driver = ctypes.CDLL(DRIVER)
        self._name = _declared(driver.cuGetErrorName, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        self._memcpy = _declared(
            driver.cuMemcpyAsync, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        )
        self._batch = _declared(
            driver.cuStreamBatchMemOp_v2,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.POINTER(_CopyOperation),
            ctypes.c_uint,
        )
        self._register = _declared(driver.cuMemHostRegister_v2, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._pointer = _declared(
            driver.cuMemHostGetDevicePointer_v2, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint
        )
        can_wait = ctypes.c_int()
        attribute = _declared(driver.cuDeviceGetAttribute, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
        handle = ctypes.c_int()
        device_get = _declared(driver.cuDeviceGet, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
        self._check("cuDeviceGet", device_get(ctypes.byref(handle), device.index))
        self._check("cuDeviceGetAttribute", attribute(ctypes.byref(can_wait), _CAN_WAIT, handle))
        if not can_wait.value:
            raise RuntimeError(f"the streams of {device} cannot wait for numbers of 64 bits")

    def reach(self, memory: Tensor) -> int:
        """Let the device reach memory of the host, whole pages; return where. The memory is never freed afterwards."""
        host, there = memory.data_ptr(), ctypes.c_uint64()
        self._check("cuMemHostRegister", self._register(host, memory.nbytes, _PORTABLE | _MAPPED))
        self._check("cuMemHostGetDevicePointer", self._pointer(ctypes.byref(there), host, 0))
        return there.value

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy between any two places that the device reaches."""
        self._check("cuMemcpyAsync", self._memcpy(to, source, nbytes, stream))

    def signal(self, stream: int, writes: Sequence[tuple[int, int]], waits: Sequence[tuple[int, int]]) -> None:
        """Write numbers of 32 bits after all earlier work, then wait until others, of 64 bits, are as large.

        Args:
            stream: the stream of the device.
            writes: address and number.
            waits: address and number, which is less than 2 ** 63.
        """
        operations = [_CopyOperation(_WRITE_32, address, value, _ORDERED) for address, value in writes]
        operations += [_CopyOperation(_WAIT_64, address, value, _AT_LEAST) for address, value in waits]
        for start in range(0, len(operations), _MOST):
            batch = operations[start : start + _MOST]
            array = (_CopyOperation * len(batch))(*batch)
            self._check("cuStreamBatchMemOp", self._batch(stream, len(batch), array, 0))

    def _check(self, what: str, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self._name(status, ctypes.byref(name))
            raise RuntimeError(f"CUDA error: {what}: {(name.value or str(status).encode()).decode()}")


def _declared(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
