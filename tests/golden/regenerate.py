"""Golden files: bytes that may only change on purpose.

After a wanted change of the wire format, or with a new codec: ``python -m tests.golden.regenerate`` from the root of
the repository, and the difference of the files belongs to the change.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.codecs.variants import every
from tests.synthetic import gradient

FOLDER = Path(__file__).parent
Row = tuple[object, ...]


def payloads() -> Iterator[Row]:
    """Yield the hash of every codec's message of a fixed tensor, header included."""
    yield "codec", "dtype", "numel", "sha256"
    for codec in every():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for numel in (1, 1000, 5000):
                payload = codec.checked.compress(gradient(numel, 90, dtype), seed=1)
                digest = hashlib.sha256(payload.numpy().tobytes()).hexdigest()
                yield str(codec), str(dtype).removeprefix("torch."), numel, digest


def wire_bytes() -> Iterator[Row]:
    """Yield the bytes of every codec's message of f32, without header."""
    yield "codec", "numel", "bytes"
    for codec in every():
        for numel in (1, 128, 1000, 1 << 20):
            yield str(codec), numel, codec.bare.wire(numel).capacity


FILES: dict[str, Callable[[], Iterator[Row]]] = {"payloads.csv": payloads, "wire_bytes.csv": wire_bytes}


def text(name: str) -> str:
    """Return what the file ``name`` should hold."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(FILES[name]())
    return out.getvalue()


if __name__ == "__main__":
    for name in FILES:
        (FOLDER / name).write_text(text(name))
