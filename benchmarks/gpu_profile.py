"""Make a cost profile of nodes with GPUs from the measured rates of codecs on one; links and step are assumptions.

    python -m benchmarks.gpu_profile benchmarks/results/codec-gpu_nvidia-h100-80gb-hbm3_2026-11-26.json --out profiles

Nothing is measured here. Codecs and copies cost what result files of `benchmarks.codec --device cuda` say. Links are
those of data sheets: four fifths of NVLink, nine tenths of a network adapter. The step is that of a GPT of 1 GB of bf16
with 16,384 tokens for each GPU, at 40 % of the device's arithmetic. With such a profile `fusionlayer simulate` and
`plan` answer for nodes that nobody here has. `fusionlayer profile --device cuda` measures those that you have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fusionlayer import codecs
from fusionlayer.planning.cost_model import FREE, AlphaBeta, CodecCost, LinkCost
from fusionlayer.planning.profile import PROFILE_VERSION, Gradient, Machine, Model, Profile

__all__ = ["NVLINK", "PCIE", "gpu_profile", "main", "network"]

_NUMEL, _FAN_IN = 1 << 26, 8
"""Elements of the measured tensors, and messages that a sum was measured with."""
_LAUNCH = 5e-6
"""Seconds of a kernel, however small."""
_COMMENT = "Codecs as measured, links and step as assumed: see benchmarks/gpu_profile.py, which made this file"
_RATES = ("100gbit", "400gbit", "3200gbit")


def _link(latency: float, hop: float, overhead: float, rate: float) -> LinkCost:
    """Return a link: seconds of an exchange, of a hop in the library's own sum, of one message more; bytes a second."""
    return LinkCost(latency, overhead, 0.0, AlphaBeta(latency, 1 / rate), AlphaBeta(2 * hop, 1 / rate))


NVLINK = _link(15e-6, 2e-6, 0.5e-6, 0.8 * 450e9)
PCIE = _link(20e-6, 6e-6, 2e-6, 15e9)
"""Of eight GPUs that share root complexes."""


def network(rate: float) -> LinkCost:
    """Return the link of a node whose adapters carry ``rate`` bits per second together."""
    return _link(25e-6, 8e-6, 1e-6, 0.9 * rate / 8)


def gpu_profile(
    rows: Sequence[dict[str, Any]], inside: LinkCost = NVLINK, title: str = "GPT of 1 GB in bf16"
) -> Profile:
    """Return the profile of nodes whose GPUs are linked by ``inside``.

    Args:
        rows: results of ``benchmarks.codec`` for ``2**26`` elements on a device; of each codec those in bf16 count.
        inside: the link between GPUs of a node.
        title: what the profile is of.
    """
    found = {(row["codec"], row["verb"]): row["GB/s"] * 1e9 for row in rows if row["dtype"] == "bfloat16"}
    copies = [row["GB/s"] * 1e9 for row in rows if row["codec"] == "memcpy"]
    names = sorted({name for name, verb in found if verb == "encode" and codecs.knows(name)})
    gradients = tuple(_gradients())
    forward, backward = 0.041, 0.083
    numel = sum(numel for _, numel in gradients)
    ready, tensors = 0.0, []
    for name, each in gradients:
        ready += backward * each / numel
        tensors.append(Gradient(name, each, round(ready, 7), round(forward * (1 - ready / backward), 7), "bfloat16", 2))
    return Profile(
        version=PROFILE_VERSION,
        title=title,
        machine=Machine(8, 8, 1, "cuda", 8),
        model=Model("gpt-1gb", forward, backward, 0.004, tuple(tensors)),
        copy=AlphaBeta(_LAUNCH, 4 / (sum(copies) / len(copies))),
        codecs={name: _codec(name, found) for name in names},
        links={rate: network(float(rate.removesuffix("gbit")) * 1e9) for rate in _RATES},
        inside=inside,
    )


def _gradients() -> Iterator[tuple[str, int]]:
    """Yield name and elements of each gradient, in the order of their arrival."""
    width = 1280
    for layer in reversed(range(22)):
        for name, size in (("down", 4 * width**2), ("up", 4 * width**2), ("proj", width**2), ("qkv", 3 * width**2)):
            yield f"{layer}.{name}", size
        yield f"{layer}.norms", 4 * width
    yield "embedding", 50304 * width


def _codec(name: str, found: dict[tuple[str, str], float]) -> CodecCost:
    """Return the costs of a codec whose kernels moved so many bytes a second; see ``benchmarks.codec.rows``."""
    codec = codecs.get(name).bare
    nbytes = codec.wire(_NUMEL, torch.bfloat16).capacity / _NUMEL  # of an element
    if codec.lossless and not codec.zips:
        return CodecCost(8 * nbytes, FREE, FREE, FREE, FREE, lossless=True)

    def line(verb: str, moved: float) -> AlphaBeta:
        return AlphaBeta(_LAUNCH, moved / found[name, verb])

    fed = "encode + feedback" if codec.feedback_pays and (name, "encode + feedback") in found else "encode"
    return CodecCost(
        8 * nbytes,
        encode=line(fed, 2 + nbytes + (8 if fed != "encode" else 0)),
        decode=line("decode", 2 + nbytes),
        sum=line(f"decode_sum x{_FAN_IN}", nbytes + 4 / _FAN_IN),
        recode=line(f"recode x{_FAN_IN}", nbytes * (1 + 1 / _FAN_IN)),
        lossless=codec.lossless,
        algorithm=codec.collective,
        ahead=codec.ahead,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser("benchmarks.gpu_profile", description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="of benchmarks.codec --device cuda")
    parser.add_argument("--out", type=Path, default=Path("profiles"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    result = json.loads(options.results.read_text())
    hardware = result["environment"]["hardware"]
    profile = gpu_profile(
        result["rows"], title=f"GPT of 1 GB in bf16 on nodes of 8 x {hardware}, links as data sheets say"
    )
    path = options.out / f"gpt-1gb_{options.results.stem.split('_', 1)[1]}.yaml"
    profile.to_yaml(path, _COMMENT)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
