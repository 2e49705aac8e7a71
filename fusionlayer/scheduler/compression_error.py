"""How much of a bucket its codec loses, while training runs: a number for each bucket, and a warning where it is large.

The error is the 2-norm of the loss over the 2-norm of the values, error feedback included, both without the largest
hundredth of the values: a few large ones would hide the loss of the others. It is measured in one of ``EVERY`` steps,
    on at most ``_MOST`` neighbouring elements, other ones each time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..base.plan import Bucket
from ..codecs import Codec, PartsCodec, StatefulCodec
from ..observe import counts

_logger = logging.getLogger("fusionlayer")

EVERY, FIRST = 100, 20
"""The error is measured in steps 20, 120, 220, and so on."""
MEASURING = (FIRST, FIRST + 1)
"""The number of steps of ``EVERY`` with calls of ``ErrorProbe.begin`` and ``end``."""
LIMIT = 0.8
"""The error above which a warning is logged. On gradients with heavy tails (Student's t, 3 degrees of freedom) codecs
that train without error feedback lose at most 0.7. They lose 1 and more where one value of each group is huge."""
_MOST = 1 << 16
_LEFT_OUT = 100


def relative_error(sent: Tensor, lost: Tensor) -> Tensor:
    """Return the error of ``sent`` (n,) after a codec's loss ``lost`` (n,): a tensor of one number."""
    magnitude, count = sent.abs(), sent.numel()
    counts_on = magnitude <= magnitude.kthvalue(max(1, count - -(-count // _LEFT_OUT))).values
    norm = torch.linalg.vector_norm
    whole = norm(sent * counts_on)
    return torch.where(whole > 0, norm(lost * counts_on) / whole, whole)


class ErrorProbe:
    """Measures the error of one bucket. The bucket's lane calls all methods, or a thread that has waited for its job.

    Attributes:
        bucket: its tensors.
        error: the last one; None until there is one.
        is_made_to_lose: the codec is made to lose most of a bucket, and error feedback sends that later. No error of it
            is too large.
    """

    def __init__(self, index: int, bucket: Bucket, codec: Codec, rank: int) -> None:
        self.bucket = bucket
        self.error: float | None = None
        self.is_made_to_lose = self._is_reported = codec.needs_feedback
        self._index, self._codec, self._rank = index, codec, rank
        self._place = 0
        self._sent: Tensor | None = None
        self._lost: Tensor | None = None
        self._found: Tensor | None = None
        with _lock:
            _probes.add(self)

    def begin(self, x: Tensor, residual: Tensor | None, seed: int, step: int) -> None:
        """Note the values to send: ``x`` (n,), and (n,) f32 error feedback, before the collective changes both.

        In the step after that it only reports: by then a device has measured, and nothing waits for it.
        """
        if step % EVERY != FIRST:
            self.report()
            return
        self._place = (self._place + _MOST) % -(-x.numel() // _MOST * _MOST)
        part = x[self._place :][:_MOST]
        if residual is not None:
            self._sent = part + residual[self._place :][:_MOST]
        elif not isinstance(self._codec, (PartsCodec, StatefulCodec)):
            # The collective's messages are gone when it returns, so the rank reads a message of its own.
            payload = torch.zeros(
                self._codec.wire(part.numel(), part.dtype).capacity, dtype=torch.uint8, device=x.device
            )
            self._codec.encode(part, payload, seed=seed)
            back = torch.empty_like(part)
            self._codec.decode(payload, back)
            self._sent = part.float()
            self._lost = self._sent - back

    def end(self, residual: Tensor | None) -> None:
        """Measure, after the collective has left the loss in ``residual``."""
        sent, lost, self._sent, self._lost = self._sent, self._lost, None, None
        if sent is not None:
            lost = residual[self._place :][:_MOST] if lost is None and residual is not None else lost
            assert lost is not None
            self._found = relative_error(sent, lost)
            if not self._found.is_cuda:
                self.report()

    def report(self) -> float | None:
        """Return ``error``, and warn once if it is too large. It waits for the device that measures."""
        if self._found is not None:
            self.error, self._found = float(self._found), None
            if self.error > LIMIT and not self._is_reported:
                names = self.bucket.names
                _logger.warning(
                    "rank %d: bucket %d (%s%s) loses %.2f of its values in %s, more than %g: a few of them are far "
                    "larger than the others; give these tensors a codec with more bits by a policy, clip gradients, or "
                    "set fallback='raw' (docs/watching.md#compression-error)",
                    *(self._rank, self._index, names[0], f" and {len(names) - 1} more" if names[1:] else ""),
                    *(self.error, self._codec, LIMIT),
                )
                self._is_reported = True
        return self.error

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """The labels that distinguish this bucket's number from others."""
        return ("bucket", str(self._index)), ("codec", self._codec.name), ("tensor", self.bucket.names[0])


# Guards _probes: buckets are laid out on any thread.
_lock = threading.Lock()
_probes: weakref.WeakSet[ErrorProbe] = weakref.WeakSet()


@counts.add_labelled
def _errors() -> Iterator[counts.Labelled]:
    with _lock:
        probes = list(_probes)
    for probe in probes:
        if probe.error is not None:
            yield counts.Labelled("compression_error", probe.labels, probe.error)
