"""The ctypes face of ``csrc``: loads the libraries, passes pointers, turns statuses into exceptions.

``libfusionlayer_cpu.so`` is opened on first use; ``libfusionlayer_cuda.so`` only when a CUDA tensor arrives. ctypes
releases the GIL for the length of a call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .errors import ConfigError, FusionLayerError

__all__ = [
    "BuildInfo",
    "Messages",
    "Spec",
    "build_info",
    "cpu",
    "crc32c",
    "decode",
    "decode_sum",
    "encode",
    "isa",
    "library_path",
    "recode",
    "select_isa",
    "set_threads",
]

ABI_VERSION = 1
MAX_PLANES = 4
CAST, INT = 0, 1
INT_HADAMARD, INT_STOCHASTIC = 1, 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

DEVICE_ERROR = 3
_STATUS = {
    1: "the codec core refused an argument",
    2: "this build of the codec core does not have that codec or option",
    DEVICE_ERROR: "CUDA reported an error",
}


class Spec(ctypes.Structure):
    """``fl_spec`` of ``fusionlayer_codec.h``."""

    _fields_ = [
        ("codec", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("param", ctypes.c_uint32 * 4),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("numel", ctypes.c_int64),
    ]


class Messages(ctypes.Structure):
    """``fl_messages`` of ``fusionlayer_codec.h``."""

    _fields_ = [
        ("plane", ctypes.c_void_p * MAX_PLANES),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]


_VERBS = {
    "fl_encode": (Spec, ctypes.c_void_p, ctypes.c_void_p, Messages, ctypes.c_void_p),
    "fl_decode": (Spec, Messages, ctypes.c_void_p, ctypes.c_void_p),
    "fl_decode_sum": (Spec, Messages, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    "fl_recode": (Spec, Messages, ctypes.c_void_p, ctypes.c_void_p, Messages, ctypes.c_void_p),
}


def library_path(kind: str) -> Path:
    """Return where the library ``kind``, "cpu" or "cuda", is installed (it may be absent)."""
    return Path(__file__).parent / "lib" / f"libfusionlayer_{kind}.so"


def _open(kind: str) -> ctypes.CDLL:
    path = library_path(kind)
    if not path.exists():
        remedy = {
            "cpu": "reinstall the package, or run 'python setup.py build_ext --inplace' in a source tree",
            "cuda": "install where nvcc is found (FUSIONLAYER_NVCC names one; FUSIONLAYER_CUDA=1 insists)",
        }
        raise FusionLayerError(f"{path.name} is not installed; {remedy[kind]}")
    library = ctypes.CDLL(str(path))
    for name, arguments in _VERBS.items():
        verb = getattr(library, name)
        verb.argtypes = [ctypes.POINTER(a) if issubclass(a, ctypes.Structure) else a for a in arguments]
        verb.restype = ctypes.c_int
    for name in ("fl_build_info", "fl_last_error"):
        getattr(library, name).argtypes = []
        getattr(library, name).restype = ctypes.c_char_p
    facts = _facts(library)
    if facts.get("abi") != str(ABI_VERSION):
        raise FusionLayerError(f"{path.name} has ABI {facts.get('abi')}, expected {ABI_VERSION}; rebuild the package")
    return library


def _facts(library: ctypes.CDLL) -> dict[str, str]:
    lines = library.fl_build_info().decode().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@lru_cache(maxsize=1)
def cpu() -> ctypes.CDLL:
    """Return the CPU library, its instruction set chosen by ``FUSIONLAYER_ISA`` (default: the best one)."""
    library = _open("cpu")
    library.fl_crc32c.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]
    library.fl_crc32c.restype = ctypes.c_uint32
    library.fl_select_isa.argtypes = [ctypes.c_char_p]
    library.fl_isa.restype = ctypes.c_char_p
    library.fl_set_threads.argtypes = [ctypes.c_int]
    library.fl_set_threads(max(1, min(torch.get_num_threads(), 8)))
    wanted = os.environ.get("FUSIONLAYER_ISA")
    if wanted:
        _select_isa(library, wanted, "FUSIONLAYER_ISA=")
    return library


_cuda_lock = threading.Lock()


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    with _cuda_lock:
        return _open("cuda")


def _select_isa(library: ctypes.CDLL, name: str, given_as: str = "") -> None:
    if library.fl_select_isa(name.encode()) != 0:
        raise ConfigError(
            f"{given_as}{name!r} cannot be used on this machine or in this build; "
            "expected avx512, avx2, baseline or auto, and a CPU that has it"
        )


def select_isa(name: str) -> None:
    """Make the CPU core use ``name``: "avx512", "avx2", "baseline" or "auto". Bytes do not depend on it."""
    _select_isa(cpu(), name)


def isa() -> str:
    """Return the instruction set in use."""
    return str(cpu().fl_isa().decode())


def set_threads(count: int) -> None:
    """Let one codec call on a large CPU tensor use ``count`` threads, the caller's included.

    The default is ``torch.get_num_threads()`` at the first call, at most 8.
    """
    if count < 1:
        raise ConfigError(f"threads={count}; expected at least 1")
    cpu().fl_set_threads(count)


def crc32c(data: bytes | Tensor, crc: int = 0) -> int:
    """Return the crc32c of ``data`` (bytes, or a contiguous CPU tensor's memory), continued from ``crc``."""
    if isinstance(data, Tensor):
        pointer, nbytes = data.data_ptr(), data.numel() * data.element_size()
        return int(cpu().fl_crc32c(crc, pointer, nbytes))
    return int(cpu().fl_crc32c(crc, data, len(data)))


@dataclass(frozen=True)
class CodecParams:
    """The part of ``fl_spec`` that depends on the codec alone."""

    codec: int
    param: tuple[int, ...] = ()

    def spec(self, numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> Spec:
        """Return the ``fl_spec`` for messages of ``numel`` elements of ``dtype``."""
        param = (ctypes.c_uint32 * 4)(*self.param)
        return Spec(self.codec, DTYPES[dtype], param, seed & (1 << 64) - 1, offset, numel)


def _messages(bodies: Tensor, offsets: Sequence[int]) -> Messages:
    base = bodies.data_ptr()
    planes = (ctypes.c_void_p * MAX_PLANES)(*(base + offset for offset in offsets))
    return Messages(planes, bodies.stride(0), bodies.shape[0])


def _call(verb: str, device: torch.device, *arguments: object) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            library = _cuda()
            status = getattr(library, verb)(*arguments, torch.cuda.current_stream(device).cuda_stream)
    else:
        library = cpu()
        status = getattr(library, verb)(*arguments, None)
    if status:
        detail = f": {library.fl_last_error().decode()}" if status == DEVICE_ERROR else ""
        raise FusionLayerError(f"{verb}: {_STATUS.get(status, f'status {status}')}{detail}")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def encode(spec: Spec, offsets: Sequence[int], x: Tensor, residual: Tensor | None, bodies: Tensor) -> None:
    """``fl_encode``: ``bodies`` (count, nbytes) uint8 take consecutive pieces of ``x``; ``offsets`` are the planes'."""
    _call("fl_encode", x.device, spec, x.data_ptr(), _pointer(residual), _messages(bodies, offsets))


def decode(spec: Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor) -> None:
    """``fl_decode``: consecutive pieces of ``out`` come from ``bodies`` (count, nbytes) uint8."""
    _call("fl_decode", out.device, spec, _messages(bodies, offsets), out.data_ptr())


def decode_sum(spec: Spec, offsets: Sequence[int], bodies: Tensor, out: Tensor, *, add: bool) -> None:
    """``fl_decode_sum``: ``out`` becomes, or with ``add`` gains, the sum of all ``bodies`` (count, nbytes) uint8."""
    _call("fl_decode_sum", out.device, spec, _messages(bodies, offsets), out.data_ptr(), int(add))


def recode(
    spec: Spec, offsets: Sequence[int], bodies: Tensor, x: Tensor | None, residual: Tensor | None, body: Tensor
) -> None:
    """``fl_recode``: ``body`` (nbytes,) uint8 encodes the sum of ``x`` and all ``bodies`` (count, nbytes) uint8."""
    out = _messages(body.unsqueeze(0), offsets)
    _call("fl_recode", body.device, spec, _messages(bodies, offsets), _pointer(x), _pointer(residual), out)


@dataclass(frozen=True)
class BuildInfo:
    """How this installation was built; ``str`` of it is one line per fact.

    Attributes:
        version: of the package.
        isa: instruction set in use, then the ones built.
        compiler: of the CPU library.
        cuda: facts of the CUDA library, or why there is none.
    """

    version: str
    isa: str
    isas: tuple[str, ...]
    compiler: str
    cuda: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        cuda = ", ".join(f"{key} {value}" for key, value in self.cuda.items()) or "not built (no nvcc at build time)"
        return (
            f"fusionlayer {self.version}\n"
            f"cpu: isa {self.isa} (built: {', '.join(self.isas)}), compiler {self.compiler}\n"
            f"cuda: {cuda}"
        )


def build_info(version: str) -> BuildInfo:
    """Return how the libraries were built; opens the CUDA one if it is there (it needs no driver for that)."""
    facts = _facts(cpu())
    cuda = _facts(_cuda()) if library_path("cuda").exists() else {}
    shown = {key: value for key, value in cuda.items() if key in ("archs", "compiler")}
    return BuildInfo(version, isa(), tuple(facts.get("isas", "").split(",")), facts.get("compiler", "unknown"), shown)
