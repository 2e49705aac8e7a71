"""Machine instructions of the CUDA kernels, counted without a GPU: ``python -m benchmarks.instructions``.

    pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump
    python -m benchmarks.instructions [--archs 80 90 100] [--codecs int4 taco] [--out benchmarks/results]

Each kernel is compiled in a copy of its source in which types, bits, groups and alignment are fixed, so that hardly
more than the path of a large aligned tensor is left. nvdisasm lists it. What a warp does in turn for one tile after the
other is counted, and divided by the elements that a lane has of a tile; in a sum the loop over messages is counted by
itself. Beside them stand bytes per element, the time that either needs for 2^26 elements on an H100 (132
multiprocessors at 1.98 GHz that issue four instructions of a warp each, and the rate of its copy), which is longer,
and the share of copy that was reached where a result file has it. Registers and frames, which hold what is spilled, are
those of the library as it is built.

Kernels whose work depends on the data are not counted: those of sparse codecs and of ``delta``, and the searches for a
threshold.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks import driver
from fusionlayer import native

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "fusionlayer/csrc"
MEASURED = [
    ROOT / f"benchmarks/results/{theme}_nvidia-h100-80gb-hbm3_2026-11-26.json"
    for theme in ("codec-gpu", "codec-gpu-choices")
]
"""Speeds on an H100. The second has kernels that were changed after the first."""
NEWER = {
    "tahquant": ("encode", "decode", "recode"),
    "zip": ("encode",),
    "int4": ("decode_sum", "recode"),
    "taco": ("decode", "recode"),
    "mxfp4": ("encode", "recode"),
    "dynamiq": ("encode", "decode", "recode"),
    "dynamiq, agreed": ("encode", "decode"),
}
"""Codecs, and how verbs begin whose kernels were changed after both. Sums of values as they are rotated were not."""
ELEMENTS = 1 << 26
ISSUES = 132 * 4 * 1.98e9 * 32
"""Instructions of threads that an H100 issues in a second."""
FAN_IN = 8
DTYPES = {4: ("float32", "FL_F32"), 2: ("bfloat16", "FL_BF16")}

Replaced = tuple[str, str, str]
"""A header, what stands in it, and what a copy has in its place."""
ALIGNED: tuple[Replaced, ...] = (
    ("elements.cuh", "if (dtype == FL_F32)", "if (FL_PROBED_DTYPE == FL_F32)"),
    ("elements.cuh", "else if (dtype == FL_BF16)", "else if (FL_PROBED_DTYPE == FL_BF16)"),
    ("block_io.cuh", "if (at.wide)", "if (true)"),
    ("owned.cuh", "  for (int low = 1; low < width;", "#pragma unroll\n  for (int low = 1; low < width;"),
    ("dynamiq.cu", "for (int64_t first = 0; first < in.count; first += kLookedUp)", "const int64_t first = 0;"),
    ("strip_io.cuh", "if (at.wide)", "if (true)"),
    ("zip_tile.cuh", "if (count >= kEight && is_aligned(x, 16))", "if (true)"),
    ("rans_rows.cuh", "if (count >= kEight)", "if (true)"),
    ("rans_decode.cu", "while (int32_t(filled_ - next_) < kRansRow)", "if (int32_t(filled_ - next_) < kRansRow)"),
    *(
        (name, f"for ({begin}; {end}; {step})", f"if ({begin}; {end})")
        for name in ("int_group.cuh", "block_codes.cuh")
        for begin, end, step in (
            ("int64_t m = lane / lines", "m < in.count && lane < each * lines", "m += each"),
            ("int64_t m = lane", "m < in.count", "m += kLanes"),
        )
    ),
    ("dynamiq_codes.cuh", "if (wide_)", "if (true)"),
    ("dynamiq_codes.cuh", "if (bits == 8)\n", "if (false)\n"),
    ("dynamiq_codes.cuh", "else if (bits == 4)\n", "else if (true)\n"),
)
"""The type is one of the compiler's command, accesses are of whole aligned chunks, transforms over lanes have no loop,
``dynamiq`` has four bits and few messages, a row of ``rans`` takes 64 words at most, and lines of eight messages or
fewer are asked for at once."""


@dataclass(frozen=True)
class Probe:
    """One kernel as one codec uses it."""

    codec: str
    verb: str
    source: str
    kernel: str
    """A pattern of its mangled name, which begins with its own one."""
    fixed: tuple[str, ...]
    """Assignments to its arguments ``a``."""
    payload: float | None
    """Bytes of a message for each element that are written, or read; None: as many as the element has."""
    held: int = 32
    """Elements that a lane has in a turn of the loop that is counted."""

    @property
    def sums(self) -> bool:
        """Whether messages are added up."""
        return "x8" in self.verb

    def nbytes(self, size: int) -> float:
        """Return bytes read and written for each element, of ``size`` bytes; of a sum: of the result."""
        payload = size if self.payload is None else self.payload
        if self.verb == "recode x8":
            return (FAN_IN + 1) * payload
        return (FAN_IN if self.sums else 1) * payload + size


def _of(
    codec: str, source: str, payload: float | None, fixed: Sequence[str], *kernels: tuple[str, str], held: int = 32
) -> Iterator[Probe]:
    """Yield probes of a codec's kernels, which are pairs of a verb and a pattern."""
    for verb, kernel in kernels:
        yield Probe(codec, verb, source, kernel, tuple(fixed), payload, held)


TYPE = "a.dtype = {dtype}"
NEAREST, DRAWN = "a.stochastic = false", "a.stochastic = true"
INT4 = (TYPE, "a.layout.bits = 4", "a.layout.log2_group = 7")
INT8 = (TYPE, "a.layout.bits = 8", "a.layout.log2_group = 7")
INT4_NEAREST = (*INT4, NEAREST, "a.levels = int_levels(4, 128, false, false)")
INT4_DRAWN = (*INT4, DRAWN, "a.levels = int_levels(4, 128, true, false)")
INT8_NEAREST = (*INT8, NEAREST, "a.levels = int_levels(8, 128, false, false)")
FP8 = (TYPE, "a.layout.given = false", "a.layout.format = FL_E4M3", "a.layout.bits = 8")
TACO = (*FP8, "a.layout.log2_lanes = 3", "a.layout.scaling.kind = FL_SCALE_F32")
MX = ("a.layout.log2_lanes = 0", "a.layout.scaling.kind = FL_SCALE_E8M0")
MXFP8 = (*FP8, *MX)
MXFP4 = (TYPE, "a.layout.given = false", "a.layout.format = FL_E2M1", "a.layout.bits = 4", *MX)
QSDP = (TYPE, "a.layout.bits = 8", "a.layout.log2_group = 10", "a.shape.bits = 8")
THC = (TYPE, "a.shape.block = 1024", "a.shape.uniform = false", "a.shape.ranks = 0")
TAHQUANT = (TYPE, "a.shape.tile = 64", "a.shape.channels = 1024", "a.shape.bits = 4", "a.shape.coarse = 0")
DYNAMIQ = (TYPE, "a.layout.flat = false")
ZIP = ("a.shape.dtype = {dtype}",)
DECODES = (("decode", "decode_kernelILb{0}E"), ("decode_sum x8", "decode_sum_kernelILb{0}E"))
ROTATED = tuple((verb, kernel.format(1)) for verb, kernel in DECODES)
PLAIN = tuple((verb, kernel.format(0)) for verb, kernel in DECODES)
SIMPLE = (("decode", "decode_kernel"), ("decode_sum x8", "decode_sum_kernel"))

PROBES = (
    *_of("raw", "cast", None, (), ("encode", r"copy_kernelI[jt]E"), held=16),
    *_of("int4", "int_encode", 0.53125, INT4_NEAREST, ("encode", r"encode_kernelILb1E\w*InputE0ELb0E")),
    *_of("int4", "int_decode", 0.53125, INT4, *ROTATED),
    *_of("int4", "int_encode", 0.53125, INT4_NEAREST, ("recode x8", r"encode_kernelILb1E\w*InputE1ELb0E")),
    *_of(
        "int4, rotated sums", "int_encode", 0.53125, INT4_NEAREST, ("recode x8", r"encode_kernelILb0E\w*InputE1ELb0E")
    ),
    *_of("tlq_hs", "int_encode", 0.53125, INT4_DRAWN, ("encode", r"encode_kernelILb1E\w*InputE0ELb0E")),
    *_of("int8", "int_encode", 1.03125, INT8_NEAREST, ("encode", r"encode_kernelILb0E\w*InputE0ELb0E")),
    *_of("int8", "int_decode", 1.03125, INT8, *PLAIN),
    *_of("int8", "int_encode", 1.03125, INT8_NEAREST, ("recode x8", r"encode_kernelILb0E\w*InputE1ELb0E")),
    *_of("taco", "block_encode", 1.015625, TACO, ("encode", "encode_kernelILb1ELb0ELb0E")),
    *_of("taco", "block_decode", 1.015625, TACO, *ROTATED),
    *_of("taco", "block_encode", 1.015625, TACO, ("recode x8", "encode_kernelILb1ELb1ELb0E")),
    *_of("taco, rotated sums", "block_encode", 1.015625, TACO, ("recode x8", "encode_kernelILb0ELb1ELb0E")),
    *_of("mxfp8", "block_encode", 1.03125, MXFP8, ("encode", "encode_kernelILb0ELb0ELb0E")),
    *_of("mxfp8", "block_decode", 1.03125, MXFP8, *PLAIN),
    *_of("mxfp8", "block_encode", 1.03125, MXFP8, ("recode x8", "encode_kernelILb0ELb1ELb0E")),
    *_of("mxfp4", "block_encode", 0.53125, MXFP4, ("encode", "encode_kernelILb0ELb0ELb0E")),
    *_of("mxfp4", "block_decode", 0.53125, MXFP4, *PLAIN),
    *_of("mxfp4", "block_encode", 0.53125, MXFP4, ("recode x8", "encode_kernelILb0ELb1ELb0E")),
    *_of("qsdp", "qsdp", 1.0078125, (*QSDP, "a.shape.stochastic = false"), ("encode", "encode_kernelILb0ELb0E")),
    *_of(
        "qsdp_gradients", "qsdp", 1.0078125, (*QSDP, "a.shape.stochastic = true"), ("encode", "encode_kernelILb0ELb0E")
    ),
    *_of("qsdp", "qsdp", 1.0078125, QSDP, ("decode", "decode_kernelILb0E"), ("decode_sum x8", "decode_kernelILb1E")),
    *_of("qsdp", "qsdp", 1.0078125, (*QSDP, "a.shape.stochastic = false"), ("recode x8", "encode_kernelILb1ELb0E")),
    *_of("onebit", "onebit", 0.12890625, (TYPE, "a.group = 1024"), ("encode", "encode_kernelILb0ELb0E"), held=8),
    *_of("onebit", "onebit", 0.12890625, (TYPE, "a.group = 1024"), ("decode", "decode_kernelILb0E"), held=4),
    *_of("thc", "thc_encode", 0.50390625, (*THC, DRAWN, "a.given = false"), ("encode", "encode_kernelILb0E")),
    *_of("thc", "thc_decode", 0.50390625, THC, *SIMPLE),
    *_of("tahquant", "tahquant_encode", 0.0, TAHQUANT, ("encode, choosing", "choice_kernelILb0E"), held=4),
    *_of("tahquant", "tahquant_encode", 0.578125, TAHQUANT, ("encode, writing", "encode_kernelILb0ELb0E")),
    *_of("tahquant", "tahquant_decode", 0.578125, TAHQUANT, *SIMPLE),
    *_of("tahquant", "tahquant_encode", 0.578125, TAHQUANT, ("recode x8", "encode_kernelILb1ELb0E")),
    *_of("dynamiq, agreed", "dynamiq", 0.5734375, DYNAMIQ, ("encode", "encode_kernelILb0ELb0E"), held=8),
    *_of("dynamiq, agreed", "dynamiq", 0.5734375, DYNAMIQ, ("decode", "decode_kernel"), held=8),
    *_of("dynamiq", "dynamiq", 0.5734375, DYNAMIQ, ("decode_sum x8", "decode_sum_kernel"), held=8),
    *_of("dynamiq", "dynamiq", 0.5734375, DYNAMIQ, ("recode x8", "encode_kernelILb1ELb0E"), held=8),
    *_of("rans", "rans_encode", 0.0, ZIP, ("encode, counting", "count_kernel"), held=8),
    *_of("rans", "rans_encode", 0.0, ZIP, ("encode, measuring", "encode_kernelILj[01]ELb0E"), held=8),
    *_of("rans", "rans_encode", None, ZIP, ("encode, writing", "encode_kernelILj[01]ELb1E"), held=8),
    *_of("rans", "rans_decode", None, (*ZIP, TYPE), ("decode", "decode_kernelILj[01]E"), held=8),
    *_of("zip", "zip_encode", None, (*ZIP, "a.choice = FL_ZIP_WINDOW"), ("encode, blocks", "code_kernel")),
)


@dataclass(frozen=True)
class Listing:
    """What there is to know of a kernel on one architecture: instructions, and what the library's own kernel takes."""

    tile: int
    """Of the loop over tiles, without those of ``loop``; 0 where messages are not added up."""
    loop: int
    """Of the longest loop that has none inside."""
    registers: int
    frame: int
    """Bytes that a thread has of local memory."""


def probed(folder: Path, probe: Probe, size: int) -> Path:
    """Write a copy of ``csrc`` for one probe into ``folder``; return its source."""
    shutil.copytree(CSRC, folder, dirs_exist_ok=True)
    for name, old, new in ALIGNED:
        path = folder / "cuda" / name
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{name} has no {old!r}; change ALIGNED in benchmarks/instructions.py")
        path.write_text(text.replace(old, new))
    path = folder / "cuda" / f"{probe.source}.cu"
    fixed = "".join(f" {assignment};" for assignment in probe.fixed).format(dtype=DTYPES[size][1])
    (name,) = re.findall(r"^\w+?_kernel", probe.kernel)
    text, count = re.subn(
        rf"(__global__ void __launch_bounds__\([^\n]*?\) {name}\()const (\w+) a\) \{{",
        rf"\1const \2 given) {{ \2 a = given;{fixed}",
        path.read_text(),
    )
    if count != 1:
        raise SystemExit(f"{probe.source}.cu has no {name} of the usual form; change benchmarks/instructions.py")
    path.write_text(text)
    return path


def compiled(tools: ModuleType, nvdisasm: str, probe: Probe, size: int, arch: int) -> str:
    """Return the listing of a probe's source for elements of ``size`` bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "csrc"
        source, cubin = probed(folder, probe, size), Path(scratch) / "kernel.cubin"
        flags = [flag.replace("-Ifusionlayer/csrc", f"-I{folder}") for flag in tools.NVCC_FLAGS]
        given = [f"-DFL_PROBED_DTYPE={DTYPES[size][1]}", f'-DFL_CUDA_ARCHS="sm_{arch}"', f"-arch=sm_{arch}"]
        command = [str(tools.find_nvcc()), *flags, *given, "--expt-relaxed-constexpr", "-cubin", str(source)]
        tools.execute([*command, "-o", str(cubin)])
        return str(tools.execute([nvdisasm, "-c", str(cubin)]))


def listing(text: str, resources: str, probe: Probe, size: int, arch: int) -> Listing:
    """Return what the texts of nvdisasm and cuobjdump say of a probe's kernel."""
    kernel = rf"_{probe.source}_cu_\w*\d{probe.kernel}".replace("[jt]", "j" if size == 4 else "t")
    kernel = kernel.replace("[01]", "0" if size == 4 else "1")  # enum fl_dtype
    (body,) = [part for part in re.split(r"\n\s*\.section\s+", text) if re.match(rf"\.text\.\w*{kernel}", part)]
    mine = "".join(part for part in resources.split("\narch = ") if part.startswith(f"sm_{arch}\n"))
    ((registers, frame),) = re.findall(rf"Function \w*{kernel}\w*:\n\s*REG:(\d+) STACK:(\d+)", mine)
    return Listing(*counted(body, probe.sums), int(registers), int(frame))


def counted(body: str, sums: bool) -> tuple[int, int]:
    """Return the instructions of a listing's longest loop that has none inside, and before them, if it is one over
    messages, those that the loop around it has besides. What runs only where lanes have parted is left out.
    """
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    apart: list[str] = []
    count = 0
    for line in body.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            target = re.search(r"\bBRA(\.DIV)?\b.*`\(\.(L_x_\d+)\)", instruction[1])
            if target and target[1]:
                apart.append(target[2])
            elif target:
                branches.append((count, target[2]))
    end = min((labels[name] for name in apart), default=count)
    loops = {range(labels[name], at) for at, name in branches if labels[name] < at - 1 and at <= end}

    def around(one: range) -> list[range]:
        return [other for other in loops if other != one and other.start <= one.start and one.stop <= other.stop]

    outer = {each for one in loops for each in around(one)}
    inner = max(loops - outer, key=len, default=range(end))
    if not sums:
        return 0, len(inner)
    return min(map(len, around(inner)), default=end) - len(inner), len(inner)


def row(
    probe: Probe, size: int, found: dict[int, Listing], shares: dict[tuple[str, str, str], float], copied: float
) -> dict[str, object]:
    """Return the row of a probe, compiled for some architectures."""
    dtype = DTYPES[size][0]
    each = {arch: ((one.tile if probe.sums else one.loop) / probe.held) for arch, one in found.items()}
    message = {arch: (one.loop / probe.held if probe.sums else 0.0) for arch, one in found.items()}
    shown = 90 if 90 in found else max(found)
    total = each[shown] + FAN_IN * message[shown]
    issue, memory = ELEMENTS * total / ISSUES, ELEMENTS * probe.nbytes(size) / copied
    # A call may be several kernels, which have names of their own behind the verb's.
    reached = shares.get((probe.codec, probe.verb, dtype)) or shares.get((probe.codec, probe.verb.split(",")[0], dtype))
    return {
        "codec": probe.codec,
        "verb": probe.verb,
        "dtype": dtype,
        **{f"sm_{arch}": round(count, 1) for arch, count in each.items()},
        **{f"message, sm_{arch}": round(count, 1) if probe.sums else "" for arch, count in message.items()},
        "bytes": round(probe.nbytes(size), 2),
        "issue us": round(issue * 1e6),
        "memory us": round(memory * 1e6),
        "bound": "issue" if issue > memory else "memory",
        "of copy": "not run" if reached is None else reached,
        "registers": " ".join(str(one.registers) for one in found.values()),
        "frame": max(one.frame for one in found.values()),
    }


def measured() -> tuple[dict[tuple[str, str, str], float], float]:
    """Return the shares of copy that an H100 reached, by codec, verb and type, and the copy's bytes in a second."""
    first, later = (json.loads(path.read_text())["rows"] for path in MEASURED)
    shares = {(each["codec"], each["verb"], each["dtype"]): each["of memcpy"] for each in first}
    shares |= {(each["codec"], each["verb"], each["dtype"]): each["of copy"] for each in later}
    for codec, verb, dtype in [*shares]:
        if verb.endswith(", rotated"):
            shares[f"{codec}, rotated sums", verb.removesuffix(", rotated"), dtype] = shares[codec, verb, dtype]
        elif verb.startswith(NEWER.get(codec, ())):
            del shares[codec, verb, dtype]
    return shares, 1e9 * next(each["GB/s"] for each in first if each["codec"] == "memcpy")


def build_script() -> ModuleType:
    """Return setup.py as a module: the one place that knows flags and compilers."""
    spec = importlib.util.spec_from_file_location("fusionlayer_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = driver.make_parser("instructions", __doc__)
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100], help="architectures to compile for")
    parser.add_argument(
        "--codecs", nargs="+", default=sorted({probe.codec for probe in PROBES}), help="codecs to count"
    )
    for tool in ("nvdisasm", "cuobjdump"):
        parser.add_argument(f"--{tool}", default=shutil.which(tool), help="the program; default: that on PATH")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    if not (options.nvdisasm and options.cuobjdump):
        parser.error("nvdisasm and cuobjdump are not on PATH; pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump")
    wanted = [(probe, size) for probe in PROBES if probe.codec in options.codecs for size in DTYPES]
    if not wanted:
        parser.error(f"--codecs {' '.join(options.codecs)}: no such kernels; there are {parser.get_default('codecs')}")
    environment, tools, (shares, copied) = driver.begin(options), build_script(), measured()

    def key(probe: Probe, size: int, arch: int) -> tuple[object, ...]:
        """Return what probes have in common that one compilation serves."""
        return probe.source, probe.kernel.partition("_kernel")[0], probe.fixed, size, arch

    apart = {key(probe, size, arch): (probe, size, arch) for probe, size in wanted for arch in options.archs}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(lambda each: compiled(tools, options.nvdisasm, *each), apart.values())
        made = dict(zip(apart, texts, strict=True))
    resources = tools.execute([options.cuobjdump, "-res-usage", str(native.library_path("cuda"))])
    rows = []
    for probe, size in wanted:
        found = {arch: listing(made[key(probe, size, arch)], resources, probe, size, arch) for arch in options.archs}
        rows.append(row(probe, size, found, shares, copied))
    title = f"Instructions of CUDA kernels for each element: {', '.join(f'sm_{arch}' for arch in options.archs)}"
    driver.finish(options, "instructions", title, environment, rows)


if __name__ == "__main__":
    main()
