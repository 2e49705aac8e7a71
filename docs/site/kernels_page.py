"""docs/kernels.md, from the comments of the core's header, and the section of docs/gpu.md on kernels that have run."""

from __future__ import annotations

import re

from docs.site import kernel_runs
from docs.site.kernel_runs import ROOT
from docs.site.markdown import as_page

__all__ = ["gpus", "kernels"]


def kernels() -> str:
    """Return docs/kernels.md."""
    header = (ROOT / "fusionlayer/csrc/include/fusionlayer_codec.h").read_text()
    contract = header.partition("Contract of every verb:")[2].partition("*/")[0]
    promises = [_plain(text) for text in contract.split("\n *   - ") if text.strip()]
    return as_page(
        "# Kernels",
        "Which guarantees does the compiled core give? Codecs compute in C++17 behind a C ABI: a CPU library with\n"
        "drivers for AVX-512, AVX2 and plain x86-64, chosen at loading, and a CUDA library. Comments in\n"
        "`fusionlayer/csrc/include/fusionlayer_codec.h` define each function. See also [how their bytes stay\n"
        "equal](architecture.md#the-codec-core) and [speeds on a GPU](../benchmarks/results/README.md#on-a-gpu).",
        "## What every function promises",
        [f"- {promise}" for promise in promises],
        "## What the CUDA kernels are made of",
        "A kernel is limited by the longer of two times: issuing its instructions, or moving its bytes at the rate of\n"
        "a copy. [Instructions](../benchmarks/results/instructions_intel-r-xeon-r-processor_2026-11-26.md) of a\n"
        "thread for each element were counted in nvcc's code for sm_80, sm_90 and sm_100. No kernel spills a\n"
        "register to memory. `delta` takes some 45 instructions of sm_90 for an unchanged element of bf16.",
    )


def _plain(comment: str) -> str:
    """Return a comment of C as one line that Markdown leaves as it is."""
    text = re.sub(r"\s*\n \*\s*|\s+", " ", comment).strip()
    return re.sub(r"([*<\[\]])", r"\\\1", text)


def gpus() -> str:
    """Return docs/gpu.md, whose section on kernels that changed since they ran is made from hashes of their sources."""
    heading, page = "## Kernels that have run", (ROOT / "docs/gpu.md").read_text()
    before, _, after = page.partition(f"{heading}\n")
    return f"{before}{heading}\n\n" + "\n".join(kernel_runs.not_run()) + "\n\n" + after[after.index("## ") :]
