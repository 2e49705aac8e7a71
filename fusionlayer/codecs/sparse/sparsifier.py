"""The base classes of sparsifiers, whose messages hold some elements of a tensor and their positions."""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ... import native
from ...base.errors import ConfigError, WireError
from ...base.libraries import Chooser
from ...base.seeds import derive_seed
from ...native import selection
from ...native.wire import Plane, WireFormat, aligned
from ..capabilities import VariableSizeCodec
from ..encoding import Encoding
from ..state import TensorState

ALL = -1  # every element that equals the threshold is sent
INFINITE = 0x7F800000  # the bits of Inf; magnitudes that are not finite have these bits or larger ones
# A threshold, and how many elements equal to it are sent: numbers of the host, or (2,) int64 on the gradient's device,
# which the host never reads.
Choice = tuple[int, int] | Tensor

_LARGEST = struct.unpack("<f", struct.pack("<I", INFINITE - 1))[0]
_SUPERBLOCK, _BLOCK = 1 << 16, 1 << 8
_BITMAP, _BYTE, _SHORT = range(3)
_MOST_REUSE = 1 << 24  # ages are f32
_MOST_COUNTED = 255  # pairs of a block of 256
MEMORY, _AGE = "threshold", 1  # what is kept of a tensor's thresholds, and where in it a threshold's age is
_VALUES = {"f32": torch.float32, "bf16": torch.bfloat16}


def bits_of(magnitude: float) -> int:
    """Return the bits of a magnitude as f32, clamped to the range from the smallest above 0 to the largest finite."""
    if not magnitude < _LARGEST:
        return INFINITE - 1
    bits: int = struct.unpack("<I", struct.pack("<f", max(magnitude, 0.0)))[0]
    return min(max(bits, 1), INFINITE - 1)


@dataclass(frozen=True)
class Sparsifier(VariableSizeCodec):
    """Sends some elements of a tensor unchanged, with their positions; the residual keeps the others.

    Of n elements it sends about k = max(1, floor(density * n)), and at most ``capacity(n)``. This is a pure function,
    so ranks need not exchange sizes. With error feedback, the sent elements plus the new residual equal the input plus
    the old residual, to the last bit. NaN and Inf are always sent and never kept. ``wire_format.md`` describes the
    planes.

    Attributes:
        density: share of the elements that are sent.
        values: type of sent values; the residual keeps the loss of "bf16".
    """

    local: ClassVar[bool] = False
    align: ClassVar[int] = 16
    ahead: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True
    _flags: ClassVar[int] = 0

    density: float = 0.01
    values: Literal["f32", "bf16"] = "f32"

    def __post_init__(self) -> None:
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ConfigError(f"{self.name} codec: density={self.density!r}; expected a share above 0, at most 1")
        if self.values not in _VALUES:
            raise ConfigError(f"{self.name} codec: values={self.values!r}; expected 'f32' or 'bf16'")

    def target(self, numel: int) -> int:
        """Return k, how many of ``numel`` elements should be sent."""
        return min(numel, max(1, math.floor(self.density * numel)))

    def capacity(self, numel: int) -> int:
        """Return how many of ``numel`` elements a message has room for; a pure function."""
        return self.target(numel)

    # ---- encode -----------------------------------------------------------------------------------------------------

    def encode_tensor(
        self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
    ) -> None:
        n = x.numel()
        self._check_tensors(x, payload.unsqueeze(0))
        form = self.wire(n, x.dtype)
        if payload.numel() != form.capacity:
            raise WireError(f"{self}: a message of {n} elements has {form.capacity} bytes, this one {payload.numel()}")
        if n:
            wanted = torch.zeros(n, device=x.device) if state.residual is None else state.residual
            self._encode_sum(x, scale, wanted, payload[form.body :], state, seed, 0)
        if self.header:
            self._seal(payload, form)

    @abstractmethod
    def _encode_sum(
        self, x: Tensor, scale: float, wanted: Tensor, body: Tensor, state: TensorState, seed: int, offset: int
    ) -> None:
        """Add ``scale * x`` (n,) to ``wanted`` (n,) f32, send a part in ``body``, and keep the rest."""

    def _send(
        self,
        wanted: Tensor,
        body: Tensor,
        choice: Choice,
        seed: int,
        offset: int,
        *,
        x: Tensor | None = None,
        scale: float = 1.0,
        clear: Tensor | None = None,
    ) -> None:
        """Write the selected elements of ``wanted`` (plus ``scale * x``) into ``body``; keep the rest there."""
        n = wanted.numel()
        spec = self._params(n).spec(n, torch.float32 if x is None else x.dtype, seed, offset)
        (threshold, ties), there = ((0, 0), choice) if isinstance(choice, Tensor) else (choice, None)
        selection.sparse_encode(
            spec, self.wire(n).offsets, wanted, threshold, ties, body, x=x, scale=scale, clear=clear, choice=there
        )

    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        n = form.numel
        for i, body in enumerate(bodies if n else ()):
            each = how.part(i * n, (i + 1) * n, i * n)
            wanted = torch.zeros(n, device=x.device) if each.residual is None else each.residual
            self._encode_sum(x[i * n : (i + 1) * n], 1.0, wanted, body, TensorState(), each.seed, each.offset)

    # ---- decode -----------------------------------------------------------------------------------------------------

    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        n = form.numel
        for i, body in enumerate(bodies if n else ()):
            self._sum_rows(body.unsqueeze(0), out[i * n : (i + 1) * n], form, add=False)

    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        spec = self._params(form.numel).spec(form.numel, out.dtype)
        native.decode_sum(spec, form.offsets, bodies, out, add=add)

    # ---- layout -----------------------------------------------------------------------------------------------------

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        spans = self._spans(self.pairs(payload, numel, dtype), numel, dtype)
        return sum(span.stop - span.start for span in spans)

    def pairs(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many elements ``payload`` (capacity,), a message of ``numel`` elements, carries.

        Raises:
            WireError: the message claims more pairs than it has room for.
        """
        ends = self.wire(numel, dtype).views(payload)[0]
        pairs = int(ends[-1]) if numel else 0
        if pairs > self.capacity(numel):
            raise WireError(f"{self}: a message of {pairs} pairs with room for {self.capacity(numel)}: it was damaged")
        return pairs

    def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        spans = self._spans(self.pairs(payload, numel, dtype), numel, dtype)
        return torch.cat([payload[span] for span in spans])

    def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
        head, ends = self._spans(0, numel, dtype)[:2]
        if data.numel() < head.stop - head.start + ends.stop - ends.start:
            raise WireError(f"{self}: {data.numel()} bytes for a message of {numel} elements: it was cut short")
        payload.zero_()
        payload[ends].copy_(data[head.stop : head.stop + ends.stop - ends.start])
        spans = self._spans(self.pairs(payload, numel, dtype), numel, dtype)
        lengths = [span.stop - span.start for span in spans]
        if data.numel() != sum(lengths):
            raise WireError(f"{self}: {data.numel()} bytes for a message that uses {sum(lengths)}: it was damaged")
        for span, part in zip(spans, data.split(lengths), strict=True):
            payload[span].copy_(part)

    def _spans(self, pairs: int, numel: int, dtype: torch.dtype) -> list[slice]:
        """Return the parts of a message that ``pairs`` pairs use: its header, then the first bytes of each plane."""
        form = self.wire(numel, dtype)
        spans = [slice(0, form.body)]
        for section in form.sections:
            plane = section.plane
            count = min(pairs, plane.count) if plane.name in ("positions", "values") else plane.count
            spans.append(slice(section.offset, section.offset + count * plane.dtype.itemsize))
        return spans

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        return _layout(self, numel)[1]

    def _params(self, numel: int) -> native.CodecParams:
        form, value = _layout(self, numel)[0], native.DTYPES[_VALUES[self.values]]
        return native.CodecParams(native.SPARSE, (form, value, self.capacity(numel), self._flags))


@lru_cache(maxsize=4096)
def _layout(codec: Sparsifier, numel: int) -> tuple[int, tuple[Plane, ...]]:
    """Return the form that takes the fewest bytes for a message of ``numel`` elements, and its planes."""
    capacity, value = codec.capacity(numel), _VALUES[codec.values]
    ends = Plane("ends", -(-numel // _SUPERBLOCK), torch.uint32)
    values = Plane("values", capacity, value)
    none = Plane("counts", 0, torch.uint8)
    forms = {
        _BITMAP: (ends, none, Plane("bitmap", -(-numel // 8), torch.uint8), values),
        _BYTE: (
            ends,
            Plane("counts", -(-numel // _BLOCK), torch.uint8),
            Plane("positions", capacity, torch.uint8),
            values,
        ),
        _SHORT: (ends, none, Plane("positions", capacity, torch.uint16), values),
    }
    return min(forms.items(), key=lambda item: sum(aligned(plane.nbytes, codec.align) for plane in item[1]))


@dataclass(frozen=True)
class ThresholdSparsifier(Sparsifier):
    """Sends the elements whose magnitude reaches a threshold; a subclass estimates it.

    Before anything is sent, the codec counts the elements at or above the estimate, and at or above each of a ladder
    of thresholds around that of the last step. (Error feedback makes counts steep there: everything above that
    threshold is gone.) It uses the estimate if its count is between 0.8 k and the capacity, else the lowest threshold
    of the ladder with such a count, else the k-th magnitude itself. A message that ran full would cut off the end of
    the tensor in every step. Codecs with the option ``guarded`` do all this only if it is True.

    Attributes:
        slack: capacity is k * slack, rounded up. All of it is sent: slack costs bytes, and is the space for a
            threshold's elements. In training of a small network at density 0.01, estimate or ladder had such a count in
            70 to 99 of 100 cases with a slack of 1.1, depending on the codec; in 57 to 85 with 1.0, in 78 to 100 with
            1.25.
        reuse: number of steps that use one threshold; 1 finds a new one in every step. A reused threshold needs a
            single pass over the gradient, on a GPU a second one that counts. If it sends less than k / 4 or fills the
            message, it is searched again at once, which costs more than reusing it. In that training nine of ten
            thresholds sent 0.4 to 2.2 k one step later, so reuse needs slack.
    """

    slack: float = 1.1
    reuse: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.slack) or not 1 <= self.slack < math.inf:
            raise ConfigError(f"{self.name} codec: slack={self.slack!r}; expected a factor of at least 1")
        if type(self.reuse) is not int or self.reuse < 1:
            raise ConfigError(f"{self.name} codec: reuse={self.reuse!r}; expected at least 1 step")
        if self.reuse > 1 and self.slack == 1:
            raise ConfigError(f"{self.name} codec: reuse={self.reuse} with slack=1; expected room for drift: slack=1.2")

    def capacity(self, numel: int) -> int:
        return min(numel, math.ceil(self.target(numel) * self.slack))

    def _estimate(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> list[float]:
        """Return at most 14 thresholds that might send ``k`` elements of ``wanted`` (n,), the likeliest first.

        An empty list makes the codec use the k-th magnitude itself. A number that is read from ``wanted`` makes the
        host wait for its device; the core's estimators do not (``_chooser``).
        """
        return []

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[Chooser, Tensor | None]:
        """Return how the core finds a threshold that sends ``k`` of ``wanted`` (n,), and the sample that it needs."""
        return self._how(selection.GIVEN, wanted, k, self._estimate(wanted, k, state, seed)), None

    def _how(
        self,
        estimator: int,
        wanted: Tensor,
        k: int,
        given: Sequence[float] = (),
        *,
        stages: int = 1,
        most: int = 1,
        published: bool = False,
    ) -> Chooser:
        room, reuse = self.capacity(wanted.numel()), min(self.reuse, _MOST_REUSE)
        return Chooser(estimator, reuse, k, room, 0, 0, stages, most, len(given), published, tuple(given))

    def _encode_sum(
        self, x: Tensor, scale: float, wanted: Tensor, body: Tensor, state: TensorState, seed: int, offset: int
    ) -> None:
        kept = self._kept(state)
        if kept is None:
            selection.accumulate(x, scale, wanted)
        else:
            self._send(wanted, body, (kept, ALL), seed, offset, x=x, scale=scale)
            if self._is_sound(body, wanted.numel()):
                state.tensors[MEMORY][_AGE] += 1
                return
            self._take_back(x, wanted, body)
        self._send(wanted, body, self._select(wanted, state, derive_seed(seed, offset)), seed, offset)

    def _select(self, wanted: Tensor, state: TensorState, seed: int) -> Choice:
        """Return the elements of ``wanted`` (n,) to send."""
        k = self.target(wanted.numel())
        if k == wanted.numel():
            return 0, ALL
        how, sample = self._chooser(wanted, k, state, seed)
        if how.estimator == selection.GIVEN and not how.count and self.reuse == 1:  # no later step needs the threshold
            return selection.choose_largest(wanted, k)
        if MEMORY not in state.tensors:
            state.tensors[MEMORY] = torch.zeros(selection.THRESHOLD_NUMBERS, device=wanted.device)
        return selection.choose_threshold(how, wanted, state.tensors[MEMORY], sample)

    def _kept(self, state: TensorState) -> int | None:
        """Return the threshold of an earlier step if this step may try it in the pass that adds the gradient.

        None on a device: only there is it known. The core tries it.
        """
        memory = state.tensors.get(MEMORY) if self.reuse > 1 else None
        if memory is None or memory.device.type != "cpu" or not 1 <= memory[_AGE] < self.reuse:
            return None
        return bits_of(float(memory[0]))

    def _is_sound(self, body: Tensor, n: int) -> bool:
        """Return whether a reused threshold surely sent all elements that the core permits."""
        ends, counts, _, values = self.wire(n).planes(body)
        pairs = int(ends[-1])
        cut = pairs >= self.capacity(n) or bool((counts == _MOST_COUNTED).any())
        return 4 * pairs >= self.target(n) and not cut and bool(values.isfinite().all())

    def _take_back(self, x: Tensor, wanted: Tensor, body: Tensor) -> None:
        """Restore ``wanted`` to its state before ``body`` was written, with ``x`` added."""
        self._sum_rows(body.unsqueeze(0), wanted, self.wire(wanted.numel()), add=True)
        broken = ~x.isfinite()
        # The core drops a value that is not finite and has no space in the message: it is in neither of the two.
        if broken.any():
            wanted[broken] = x[broken].float()


def check_guarded(name: str, guarded: object) -> None:
    """Raise ``ConfigError`` if the option ``guarded`` of the codec ``name`` is no truth value."""
    if not isinstance(guarded, bool):
        raise ConfigError(f"{name} codec: guarded={guarded!r}; expected True or False")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
