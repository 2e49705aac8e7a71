"""Builds the codec core in ``fusionlayer/csrc`` as plain shared libraries; ``pyproject.toml`` says all else.

The libraries have a C ABI and are opened by ctypes, so one build serves every Python and every torch. Needed are
setuptools 77 and a C++17 compiler. The CUDA library is built for the GPUs of this machine, where nvcc is found.
``docs/install.md`` lists the environment variables: CXX, FUSIONLAYER_CUDA, FUSIONLAYER_CUDA_ARCHS, FUSIONLAYER_NVCC,
FUSIONLAYER_OBJECTS, FUSIONLAYER_WERROR.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

CSRC = Path("fusionlayer/csrc")
BUILD = Path("build/native")  # of another target: with its name behind
LIB = Path("fusionlayer/lib")
INCLUDES = (f"-I{CSRC}/include", f"-I{CSRC}/core", f"-I{CSRC}")

CXX_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"),
    *INCLUDES,
)
# The kernels are compiled once for each; a variant whose flags the compiler refuses is left out. The linker keeps the
# first of equal inline functions, so what may run on every CPU comes first.
ISA_FLAGS = {
    "baseline": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
NVCC_FLAGS = (
    *("-std=c++17", "-O3", "-fmad=false", "-cudart", "static"),
    *("-Xcompiler", "-fPIC,-ffp-contract=off,-fvisibility=hidden"),
    *INCLUDES,
)
CUDA_ARCHS = (80, 90, 100)
KEPT_DAYS = 30
"""Days that an unused file stays in the object cache."""
HOW_TO_BUILD_CUDA = "FUSIONLAYER_CUDA=1 builds it all the same, for all GPUs, and needs nvcc"


class Step(NamedTuple):
    """One compiler call, skipped as long as its command, its tool and the bytes of all its inputs stay the same."""

    output: Path
    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    tool: str

    def run(self) -> None:
        """Make ``output``, or raise ``SetupError`` with what the compiler said."""
        digest = self.digest()
        if self.is_current(digest):
            return
        stamp = self.stamp()
        stamp.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if not fetch_object(digest, self.output):
            began = time.monotonic()
            warnings = execute(self.command)
            tell(f"built {self.output.name} in {time.monotonic() - began:.0f} s")
            sys.stderr.write(warnings)
            store_object(digest, self.output)
        stamp.write_text(digest)

    def digest(self) -> str:
        """Return the digest of the command, its tool and its inputs."""
        digest = hashlib.sha256(repr((self.command, self.tool)).encode())
        for path in self.inputs:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def stamp(self) -> Path:
        """Return the file with the digest of ``output``."""
        return self.output.with_name(f"{self.output.name}.stamp")

    def is_current(self, digest: str) -> bool:
        """Tell whether ``output`` exists and has this digest."""
        return self.output.exists() and self.stamp().exists() and self.stamp().read_text() == digest


def object_cache() -> Path | None:
    """Return the folder of the object cache; None without FUSIONLAYER_OBJECTS."""
    given = os.environ.get("FUSIONLAYER_OBJECTS")
    return Path(given).expanduser() if given else None


def fetch_object(digest: str, output: Path) -> bool:
    """Copy a compiled file from the object cache to ``output``; return whether the cache has it."""
    if (cache := object_cache()) is None:
        return False
    try:
        shutil.copyfile(cache / digest, output)
        os.utime(cache / digest)
    except OSError:
        return False
    return True


def store_object(digest: str, output: Path) -> None:
    """Copy ``output`` into the object cache and remove what nothing has used for ``KEPT_DAYS``; errors are ignored."""
    if (cache := object_cache()) is None:
        return
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f"{digest}.{os.getpid()}"
        shutil.copyfile(output, fresh)
        fresh.replace(cache / digest)
        oldest = time.time() - KEPT_DAYS * 86400
        for path in cache.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def tell(line: str) -> None:
    """Print a line at once; pip hides what builds print, so below pip it goes to the terminal, if there is one."""
    if "PIP_BUILD_TRACKER" in os.environ:
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            # pip draws a wheel behind its own line, and erases one character before it draws the next.
            terminal.write(f"\n    {line}  ")
            return
    print(line, flush=True)


def execute(command: Sequence[str]) -> str:
    """Return what ``command`` printed; raise ``SetupError`` with it if the command fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise SetupError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise SetupError(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def choice(name: str, *accepted: str) -> str:
    """Return the environment variable ``name``, the first of the ``accepted`` values if it is unset."""
    value = os.environ.get(name, accepted[0])
    if value not in accepted:
        raise SetupError(f"{name}={value!r}; expected one of: {', '.join(accepted)}")
    return value


def sources(*patterns: str) -> tuple[Path, ...]:
    """Return the files under ``csrc`` that match one of ``patterns``, sorted."""
    return tuple(sorted(path for pattern in patterns for path in CSRC.glob(pattern)))


def with_headers(source: Path) -> tuple[Path, ...]:
    """Return ``source`` and the files of ``csrc`` that it includes, directly or through others."""
    found = [source]
    for path in found:
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            places = [folder / name for folder in (path.parent, CSRC / "include", CSRC / "core", CSRC)]
            found += [place for place in places if place.exists() and place not in found][:1]
    return tuple(found)


def build_library(library: Path, compiles: Iterable[Step], link: Sequence[str], tool: str) -> Path:
    """Run all ``compiles`` in parallel, link their outputs into ``library`` and return it."""
    steps = tuple(compiles)
    # What takes longest comes first, so that no core is left alone with it: encoders, and the widest vectors.
    stale = sum(not step.is_current(step.digest()) for step in steps)
    workers = min(len(steps), os.cpu_count() or 1)
    if stale:
        tell(f"compiles {stale} files for {library.name}, {workers} at once")
    ordered = sorted(reversed(steps), key=lambda step: not re.search("avx|encode", step.output.name))
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(step.run) for step in ordered]:
            done.result()
    objects = tuple(step.output for step in steps)
    Step(library, (*link, "-o", str(library), *map(str, objects)), objects, tool).run()
    return library


def find_cxx() -> tuple[str, ...]:
    """Return the command of the C++ compiler."""
    if given := os.environ.get("CXX"):
        command = tuple(shlex.split(given))
        if shutil.which(command[0]) is None:
            raise SetupError(f"CXX={given!r} is not a program; set it to a C++17 compiler, or unset it for g++ or c++")
        return command
    for candidate in ("g++", "c++"):
        if shutil.which(candidate):
            return (candidate,)
    raise SetupError(
        "no C++ compiler: neither g++ nor c++ is on PATH; install one (apt install g++, dnf install gcc-c++, or conda "
        "install gxx), set CXX to a C++17 compiler, or install a wheel that was made elsewhere by 'make wheels'"
    )


def target_machine() -> str:
    """Return what the C++ compiler makes code for, such as "x86_64"; CXX may be a cross compiler."""
    return execute((*find_cxx(), "-dumpmachine")).strip().partition("-")[0]


def build_folder() -> Path:
    """Return where compiled files are kept: each target has a folder of its own."""
    machine = target_machine()
    return BUILD if machine == platform.machine() else BUILD.with_name(f"{BUILD.name}-{machine}")


def accepts(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    """Tell whether the compiler can compile for the target that ``flags`` name."""
    probe = (*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull)
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def build_cpu(werror: bool) -> Path:
    """Return the path of the built ``libfusionlayer_cpu.so``."""
    cxx, folder = find_cxx(), build_folder()
    tool = execute((*cxx, "--version"))
    flags = (*CXX_FLAGS, *(("-Werror",) if werror else ()))
    isas = [isa for isa, isa_flags in ISA_FLAGS.items() if accepts(cxx, isa_flags)]
    built = tuple(f"-DFL_HAVE_{isa.upper()}" for isa in isas if ISA_FLAGS[isa])

    def compile_step(source: Path, variant: str, *extra: str) -> Step:
        output = folder / "cpu" / f"{source.stem}{variant}.o"
        command = (*cxx, *flags, *extra, "-c", str(source), "-o", str(output))
        return Step(output, command, with_headers(source), tool)

    every = sources("cpu/*.cpp", "sockets/*.cpp", "codecs/*/*.cpp")
    kernels = [source for source in every if source.stem in ("kernels", source.parent.name)]
    steps = [compile_step(source, "", *built) for source in every if source not in kernels]
    # Beside the others, the baseline runs only on CPUs without AVX2. It takes longest to compile.
    variants = {isa: ("-O1",) if isa == "baseline" and len(isas) > 1 else ISA_FLAGS[isa] for isa in isas}
    for isa, extra in variants.items():
        steps += [compile_step(source, f".{isa}", f"-DFL_ISA={isa}", *extra) for source in kernels]
    # dlopen is in a library of its own before glibc 2.34.
    link = (*cxx, "-shared", "-pthread", "-Wl,-z,defs", "-Wl,--no-as-needed", "-ldl")
    return build_library(folder / "libfusionlayer_cpu.so", steps, link, tool)


def find_nvcc() -> str:
    """Return the path of nvcc, or raise ``SetupError`` with the places that were looked at."""
    if given := os.environ.get("FUSIONLAYER_NVCC"):
        if shutil.which(given) is None:
            raise SetupError(f"FUSIONLAYER_NVCC={given!r} is not a program; set it to the path of nvcc, or unset it")
        return given
    places = [Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvcc")]
    if home := os.environ.get("CUDA_HOME"):
        places.insert(0, Path(home, "bin/nvcc"))
    for place in map(str, places):
        if shutil.which(place):
            return place
    if found := shutil.which("nvcc"):
        return found
    raise SetupError(
        f"no nvcc: not at {', '.join(map(str, places))}, not on PATH; install the CUDA toolkit (12.8 or later) and set "
        "FUSIONLAYER_NVCC or CUDA_HOME, or set FUSIONLAYER_CUDA=0 to build without CUDA"
    )


def gpus() -> list[int]:
    """Return the compute capabilities of this machine's GPUs, as 90 for 9.0; none where nvidia-smi does not run."""
    try:
        told = execute(("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"))
    except SetupError:
        return []
    return sorted({int(line.replace(".", "")) for line in re.findall(r"^\d+\.\d$", told, re.MULTILINE)})


def asked_archs() -> list[str]:
    """Return the words of ``FUSIONLAYER_CUDA_ARCHS``; none: the GPUs of this machine."""
    return os.environ.get("FUSIONLAYER_CUDA_ARCHS", "").replace(",", " ").split()


def cuda_archs(nvcc: str) -> list[int]:
    """Return what to compile for, in ascending order: as asked, else for the GPUs of this machine, else for all."""
    known = {int(name.removeprefix("compute_")) for name in execute((nvcc, "--list-gpu-arch")).split()}
    known = {arch for arch in known if arch >= CUDA_ARCHS[0]}
    asked, present = asked_archs(), gpus()
    if asked and asked != ["all"]:
        refused = [name for name in asked if not name.isdecimal() or int(name) not in known]
        if refused:
            choices = " ".join(map(str, sorted(known)))
            raise SetupError(f"FUSIONLAYER_CUDA_ARCHS: {' '.join(refused)}; expected all, or numbers among: {choices}")
        return sorted(set(map(int, asked)))
    if asked or not present:
        archs = [arch for arch in CUDA_ARCHS if arch in known]
        if not archs:
            names = ", ".join(f"sm_{arch}" for arch in CUDA_ARCHS)
            raise SetupError(f"{nvcc} compiles for none of {names}; use CUDA 12.8 or later")
        return archs
    # A GPU that nvcc does not know runs the code of an older one of its kind, or compiles the PTX that is kept with it.
    archs = sorted({max(older) for gpu in present if (older := [arch for arch in known if arch <= gpu])})
    if not archs:
        raise SetupError(f"the GPU of this machine is of compute capability {present[-1] / 10}; the kernels need 8.0")
    return archs


def cuda_sources() -> tuple[Path, ...]:
    """Return the sources of the CUDA library."""
    return sources("cuda/*.cu", "codecs/*/*.cu")


def build_cuda(werror: bool) -> Path:
    """Return the path of the built ``libfusionlayer_cuda.so``; no GPU and no driver are needed."""
    nvcc, folder = find_nvcc(), build_folder()
    if folder != BUILD:
        raise SetupError(f"nvcc makes code for this machine alone, and CXX for {target_machine()}")
    tool = execute((nvcc, "--version"))
    archs = cuda_archs(nvcc)
    targets = [(arch, f"sm_{arch}") for arch in archs] + [(archs[-1], f"compute_{archs[-1]}")]
    gencode = tuple(flag for arch, code in targets for flag in ("-gencode", f"arch=compute_{arch},code={code}"))
    flags = (
        *NVCC_FLAGS,
        *gencode,
        *(("-Werror", "all-warnings") if werror else ()),
    )
    stated = f'-DFL_CUDA_ARCHS="{" ".join(code for _, code in targets)}"'

    def compile_step(source: Path) -> Step:
        output = folder / "cuda" / f"{source.stem}.o"
        command = (nvcc, *flags, stated, "-c", str(source), "-o", str(output))
        return Step(output, command, with_headers(source), tool)

    steps = [compile_step(source) for source in cuda_sources()]
    link = (nvcc, "-shared", "-cudart", "static", *gencode, "-Xlinker", "-z,defs")
    return build_library(folder / "libfusionlayer_cuda.so", steps, link, tool)


def build_native(kinds: Sequence[str] = ("cpu", "cuda")) -> list[Path]:
    """Return the paths of the libraries of these ``kinds`` that can be built here and were not declined."""
    cuda = choice("FUSIONLAYER_CUDA", "auto", "1", "0")
    werror = choice("FUSIONLAYER_WERROR", "0", "1") == "1"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        libraries = [build_cpu(werror)] if "cpu" in kinds else []
        if "cuda" not in kinds or cuda == "0":
            return libraries
        if cuda == "auto" and not asked_archs() and not gpus():
            tell(f"fusionlayer is built without its CUDA library: no NVIDIA GPU is here; {HOW_TO_BUILD_CUDA}")
            return libraries
        try:
            libraries.append(build_cuda(werror))
        except SetupError as problem:
            if cuda == "1":
                raise SetupError(f"FUSIONLAYER_CUDA=1 cannot be done: {problem}") from problem
            tell(f"warning: fusionlayer is built without its CUDA library: {problem}")
    return libraries


def place(libraries: Sequence[Path], folder: Path) -> None:
    """Make ``folder`` hold exactly ``libraries``; a process that has an older one open keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {*folder.glob("*.so")} - {folder / library.name for library in libraries}:
        stale.unlink()
    for library in libraries:
        target = folder / library.name
        if not (target.exists() and filecmp.cmp(library, target, shallow=False)):
            fresh = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.copy(library, fresh)
            fresh.replace(target)


class NativeDistribution(Distribution):
    """A distribution with compiled parts, none of them a Python extension module; -v lists copied files."""

    def __init__(self, attrs: Mapping[str, Any] | None = None) -> None:
        super().__init__(attrs)
        self.verbose = False

    def has_ext_modules(self) -> bool:
        """Make setuptools run ``build_ext`` and call the wheel's content platform dependent."""
        return True


class BuildPackage(build_py):
    """``build_py`` that carries nothing over from an earlier build into a wheel."""

    def run(self) -> None:
        """Copy the package to an empty folder."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "fusionlayer"), ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """``build_ext`` that makes the shared libraries: in the source tree if in place or editable, else for the wheel."""

    folder = LIB

    def make(self) -> list[Path]:
        """Build what changed and return the libraries."""
        return build_native()

    def run(self) -> None:
        """Build what changed and put the libraries where they are loaded from."""
        place(self.make(), self.folder if self.in_source_tree else Path(self.build_lib) / self.folder)

    @property
    def in_source_tree(self) -> bool:
        """Whether the package will be imported from the source tree."""
        return bool(self.inplace or self.editable_mode)

    def get_source_files(self) -> list[str]:
        """Return what a source distribution needs."""
        return [str(path) for path in CSRC.rglob("*") if path.is_file()]

    def get_outputs(self) -> list[str]:
        """Return the libraries that go into a wheel."""
        return [] if self.in_source_tree else [str(path) for path in (Path(self.build_lib) / self.folder).glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        """Return an empty mapping: libraries of an editable build are made in the source tree."""
        return {}


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3: the libraries know nothing of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return (python, abi, platform); the platform is that of the C++ compiler."""
        machine, tag = target_machine(), super().get_tag()[2]
        return "py3", "none", tag if tag.endswith(f"_{machine}") else f"linux_{machine}"


def main() -> None:
    """Run the command line."""
    os.chdir(Path(__file__).resolve().parent)
    setup(
        distclass=NativeDistribution,
        cmdclass={"build_py": BuildPackage, "build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )


if __name__ == "__main__":
    main()
