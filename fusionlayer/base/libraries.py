"""Finds and loads the C libraries of ``csrc``, and declares their functions for ctypes.

``libfusionlayer_cpu.so`` is opened on first use, ``libfusionlayer_cuda.so`` only when a CUDA tensor arrives.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .errors import ConfigError, FusionLayerError

ABI_VERSION = 14
MAX_PLANES = 5
MAX_PEERS = 16
NO_CUDA_LIBRARY = "not built (there was no GPU, or no nvcc, at build time)"
SEEDS = (1 << 64) - 1  # the bits of a seed


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


class Peers(ctypes.Structure):
    """``fl_peers`` of ``fusionlayer_codec.h``."""

    _fields_ = [
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("warps", ctypes.c_int32),
        ("bytes", ctypes.c_int64),
        ("memory", ctypes.c_void_p * MAX_PEERS),
        ("stop", ctypes.c_void_p),
    ]


class LinkMessageStruct(ctypes.Structure):
    """``fl_link_message`` of ``fusionlayer_sockets.h``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("key", ctypes.c_uint64),
        ("peer", ctypes.c_int32),
    ]


class LinkResult(ctypes.Structure):
    """``fl_link_result`` of ``fusionlayer_sockets.h``."""

    _fields_ = [("peer", ctypes.c_int32), ("nbytes", ctypes.c_int64)]


class Chooser(ctypes.Structure):
    """``fl_chooser`` of ``fusionlayer_codec.h``."""

    _fields_ = [
        ("estimator", ctypes.c_uint32),
        ("reuse", ctypes.c_uint32),
        ("k", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("sampled", ctypes.c_int64),
        ("sample_k", ctypes.c_int64),
        ("stages", ctypes.c_uint32),
        ("most_stages", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("published", ctypes.c_uint32),
        ("given", ctypes.c_double * 14),
    ]


_POINTER, _I32, _I64, _U32, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float
_VERBS = {
    "fl_encode": (Spec, ctypes.c_void_p, ctypes.c_void_p, Messages, ctypes.c_void_p),
    "fl_decode": (Spec, Messages, ctypes.c_void_p, ctypes.c_void_p),
    "fl_decode_sum": (Spec, Messages, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    "fl_recode": (Spec, Messages, ctypes.c_void_p, ctypes.c_void_p, Messages, ctypes.c_void_p),
    "fl_recode_from": (Spec, Messages, Spec, _POINTER, Messages, _POINTER),
    "fl_recode_rows": (Spec, Messages, _I64, Spec, _POINTER, _POINTER, Messages, _POINTER),
    "fl_encode_difference": (Spec, _POINTER, _POINTER, Messages, _POINTER),
    "fl_accumulate": (_U32, _POINTER, _FLOAT, _I64, _POINTER, _POINTER),
    "fl_accumulate_momentum": (_U32, _POINTER, _FLOAT, _FLOAT, _I32, _I64, _POINTER, _POINTER, _POINTER),
    "fl_magnitude_stats": (_POINTER, _I64, _U32, _POINTER, _POINTER, _POINTER),
    "fl_count_above": (_POINTER, _I64, _POINTER, _I32, _POINTER, _POINTER),
    "fl_kth_magnitude": (_POINTER, _I64, _I64, _POINTER, _POINTER, _POINTER),
    "fl_delta_encode": (Spec, _POINTER, _POINTER, Messages, _POINTER, _POINTER),
    "fl_delta_decode": (Spec, Messages, *[_POINTER] * 5),
    "fl_add_codes": (Spec, Messages, _POINTER, _POINTER),
    "fl_thc_rms": (Spec, _POINTER, _POINTER, _POINTER, _POINTER),
    "fl_dynamiq_stats": (_U32, _POINTER, _POINTER, _I64, _POINTER, _POINTER, _POINTER),
    "fl_choose_largest": (_POINTER, _I64, _I64, _POINTER, _POINTER, _POINTER),
    "fl_choose_threshold": (Chooser, _POINTER, _I64, *[_POINTER] * 5),
    "fl_choose_drawn": (Spec, _POINTER, _I64, _POINTER, _POINTER, _POINTER),
    "fl_sparse_encode": (Spec, _POINTER, _FLOAT, *[_POINTER] * 2, *[_I64] * 2, *[_POINTER] * 2, Messages, _POINTER),
}


def library_path(kind: str) -> Path:
    """Return where the library ``kind``, "cpu" or "cuda", is; the file may be absent.

    The CUDA library is in this package if it was compiled with it, else in the wheel ``fusionlayer-cuda``.
    """
    own = Path(__file__).parents[1] / "lib" / f"libfusionlayer_{kind}.so"
    if kind == "cuda" and not own.exists() and (wheel := find_spec("fusionlayer_cuda")) and wheel.origin:
        return Path(wheel.origin).with_name(own.name)
    return own


def check(kind: str = "cpu") -> Path:
    """Return where the library ``kind`` is, without loading it; raise ``FusionLayerError`` if it is missing."""
    path = library_path(kind)
    if not path.exists():
        remedy = {
            "cpu": "reinstall the package, or run 'python setup.py build_ext --inplace' in a source tree",
            "cuda": "install the wheel fusionlayer-cuda or rebuild where nvcc is, with FUSIONLAYER_CUDA=1",
        }
        raise FusionLayerError(f"{path.name} is not installed; {remedy[kind]}")
    return path


def _open(kind: str) -> ctypes.CDLL:
    path = check(kind)
    library = ctypes.CDLL(str(path))
    for name in ("fl_build_info", "fl_last_error"):
        getattr(library, name).argtypes = []
        getattr(library, name).restype = ctypes.c_char_p
    facts = _facts(library)
    if facts.get("abi") != str(ABI_VERSION):
        raise FusionLayerError(f"{path.name} has ABI {facts.get('abi')}, expected {ABI_VERSION}; rebuild the package")
    declare(library)
    return library


def declare(library: ctypes.CDLL) -> None:
    """Declare the argument types of the functions of ``library`` to ctypes."""
    for name, arguments in _VERBS.items():
        verb = getattr(library, name)
        verb.argtypes = [ctypes.POINTER(a) if issubclass(a, ctypes.Structure) else a for a in arguments]
        verb.restype = ctypes.c_int
    library.fl_workspace_bytes.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.fl_workspace_bytes.restype = ctypes.c_int64


def declare_cuda(library: ctypes.CDLL) -> None:
    """Declare those functions to ctypes that the CUDA library alone has."""
    spec = ctypes.POINTER(Spec)
    library.fl_two_shot.argtypes = [spec, ctypes.c_uint64, _I64, *[_POINTER] * 3, ctypes.POINTER(Peers), _POINTER]
    library.fl_two_shot_bytes.argtypes = [spec, _I64, ctypes.c_int32, ctypes.c_int32]
    library.fl_two_shot_bytes.restype = _I64
    library.fl_most_warps.argtypes = []


def _facts(library: ctypes.CDLL) -> dict[str, str]:
    lines = library.fl_build_info().decode().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@lru_cache(maxsize=1)
def cpu() -> ctypes.CDLL:
    """Return the CPU library; ``FUSIONLAYER_ISA`` chooses its instruction set (default: the best one)."""
    import torch  # here, so that ``fusionlayer --version`` need not wait for it

    library = _cpu_on_one_thread()
    library.fl_set_threads(max(1, min(torch.get_num_threads(), 8)))
    return library


@lru_cache(maxsize=1)
def _cpu_on_one_thread() -> ctypes.CDLL:
    library = _open("cpu")
    library.fl_crc32c.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]
    library.fl_crc32c.restype = ctypes.c_uint32
    library.fl_select_isa.argtypes = [ctypes.c_char_p]
    library.fl_isa.restype = ctypes.c_char_p
    library.fl_set_threads.argtypes = [ctypes.c_int]
    library.fl_dynamiq_widths.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    several, result = ctypes.POINTER(LinkMessageStruct), ctypes.POINTER(LinkResult)
    library.fl_link_open.argtypes = [_I32, _I32, _I32, ctypes.c_char_p, _I64]
    library.fl_link_open.restype = _POINTER
    library.fl_link_add.argtypes = [_POINTER, _I32, _I32, _I32, ctypes.c_char_p, _I32]
    library.fl_link_exchange.argtypes = [_POINTER, several, _I32, several, _I32, _I64, result]
    library.fl_link_wait.argtypes = [_POINTER, _I64, result]
    library.fl_link_tend.argtypes = [_POINTER]
    library.fl_link_tend.restype = _I64
    library.fl_link_states.argtypes = library.fl_link_sent.argtypes = [_POINTER, _POINTER]
    library.fl_link_close.argtypes = [_POINTER, _I32]
    library.fl_link_forget.argtypes = library.fl_link_free.argtypes = [_POINTER]
    wanted = os.environ.get("FUSIONLAYER_ISA")
    if wanted:
        _select_isa(library, wanted, "FUSIONLAYER_ISA=")
    return library


# Guards the loading of the CUDA library. Lanes and workers encode on threads of their own, and ``lru_cache`` alone
# would let two of them load it at once.
_cuda_lock = threading.Lock()


@lru_cache(maxsize=1)
def cuda() -> ctypes.CDLL:
    """Return the CUDA library. This needs no driver."""
    with _cuda_lock:
        library = _open("cuda")
        declare_cuda(library)
        return library


def _select_isa(library: ctypes.CDLL, name: str, given_as: str = "") -> None:
    if library.fl_select_isa(name.encode()) != 0:
        raise ConfigError(
            f"{given_as}{name!r} cannot be used on this machine or in this build; "
            "expected avx512, avx2, baseline or auto, and a CPU that has it"
        )


def select_isa(name: str) -> None:
    """Make the CPU core use ``name``: "avx512", "avx2", "baseline" or "auto". All give the same bytes."""
    _select_isa(cpu(), name)


def isa() -> str:
    """Return the instruction set in use."""
    return str(_cpu_on_one_thread().fl_isa().decode())


def set_threads(count: int) -> None:
    """Let one codec call on a large CPU tensor use ``count`` threads, the caller's included.

    The default is ``torch.get_num_threads()`` at the first call, at most 8.
    """
    if count < 1:
        raise ConfigError(f"threads={count}; expected at least 1")
    cpu().fl_set_threads(count)


@dataclass(frozen=True)
class BuildInfo:
    """How this installation was built; its ``str`` has one line for the package and one for each library.

    Attributes:
        version: version of the package.
        isa: instruction set in use.
        isas: instruction sets that were built.
        compiler: compiler of the CPU library.
        cuda: facts of the CUDA library; empty if it was not built.
    """

    version: str
    isa: str
    isas: tuple[str, ...]
    compiler: str
    cuda: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        cuda = ", ".join(f"{key} {value}" for key, value in self.cuda.items()) or NO_CUDA_LIBRARY
        return (
            f"fusionlayer {self.version}\n"
            f"cpu: isa {self.isa} (built: {', '.join(self.isas)}), compiler {self.compiler}\n"
            f"cuda: {cuda}"
        )


def build_info(version: str) -> BuildInfo:
    """Return how the libraries were built. This opens the CUDA one if it is installed, which needs no driver."""
    facts = _facts(_cpu_on_one_thread())
    of_cuda = _facts(cuda()) if library_path("cuda").exists() else {}
    shown = {key: value for key, value in of_cuda.items() if key in ("archs", "compiler")}
    return BuildInfo(version, isa(), tuple(facts.get("isas", "").split(",")), facts.get("compiler", "unknown"), shown)
