"""The base class of all codecs: the operations from which every collective is written."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import native
from ..base.errors import ConfigError, WireError
from ..base.registry import Registry
from ..native.wire import ALIGN, DTYPE_CODES, Plane, WireFormat, lay_out
from ..observe.timeline import here
from .cache import remember
from .encoding import Encoding, piece
from .header import Sender, seal, verify
from .state import TensorState

registry: Registry[Codec] = Registry("codec", __package__, "fusionlayer.codecs", later=("research",))


@dataclass(frozen=True)
class Codec(ABC):
    """Turns a flat tensor into the bytes of one message and back; stateless, deterministic in (x, seed).

    A codec is a frozen dataclass whose fields are its options; it names itself in the class statement. Most codecs
    subclass ``TorchCodec`` (three methods in torch operations) or ``NativeCodec`` (kernels in ``csrc``), not this
    class. Capabilities that only some codecs have are in ``capabilities.py``.

    Tensors are flat and contiguous: elements are f32, bf16 or f16, payloads uint8 of exactly ``wire(...).capacity``.

    Attributes:
        name: the name for ``fusionlayer.codecs.get``.
        lossless: decoding gives back the same bits.
        zips: it is a ``ZippedCodec``: its messages lose no bit and take as many bytes as the data need.
        local: an element's code depends on its block alone, not on how a tensor is cut into messages.
        align: planes and messages are padded to multiples of this many bytes.
        ahead: by default each tensor is encoded by itself, ahead of fusion. All ranks then use the same seed, since
            random numbers decide which elements are sent.
        needs_feedback: it loses too much of a tensor, or loses it too one-sidedly, to train without error feedback.
        collective: the collective made for codecs of this kind; None if the nodes decide.
        header: each payload begins with a header, which carries a checksum and is verified before decoding. Buckets
            leave it out, since all ranks have compared their plan.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    zips: ClassVar[bool] = False
    local: ClassVar[bool] = True
    align: ClassVar[int] = ALIGN
    ahead: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    collective: ClassVar[str | None] = None

    header: bool = field(default=True, kw_only=True)

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.name = name
            registry.add(name, cls)

    @property
    def unbiased(self) -> bool:
        """Whether the mean of the decoded value over seeds is the value."""
        return self.lossless

    @property
    def block(self) -> int:
        """Elements that share metadata; pieces of a tensor begin at multiples of it."""
        return 1

    @property
    def feedback_pays(self) -> bool:
        """Whether error feedback is worth its memory by default: whether the codec is lossy, biased and coarse."""
        return not (self.lossless or self.unbiased)

    @property
    def waits(self) -> bool:
        """Whether the host must wait for a device in each sum, for numbers that it reads from there."""
        return self.zips

    def at_step(self, step: int) -> Codec:
        """Return the codec to use in ``step``: a pure function of options and step. Most codecs return themselves."""
        return self

    def wire(self, numel: int, dtype: torch.dtype = torch.float32) -> WireFormat:
        """Return the layout of a message of ``numel`` elements encoded from ``dtype``."""
        form = self._forms.get((numel, dtype))
        return form or remember(self._forms, (numel, dtype), _wire(self, numel, dtype))

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of ``payload`` (capacity,) must be sent: all, unless the codec has variable size."""
        return payload.numel()

    @cached_property
    def bare(self) -> Codec:
        """The same codec without header."""
        return dataclasses.replace(self, header=False) if self.header else self

    @cached_property
    def checked(self) -> Codec:
        """The same codec with header."""
        return self if self.header else dataclasses.replace(self, header=True)

    @property
    def options(self) -> dict[str, Any]:
        """Every option that determines the meaning of the bytes, with its value."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare and f.name != "header"}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.options.items())})"

    # ---- one message ------------------------------------------------------------------------------------------------

    def compress(self, x: Tensor, seed: int = 0) -> Tensor:
        """Return ``x`` (any shape; f32, bf16 or f16) as a payload: (capacity,) uint8 on the same device."""
        flat = x.detach().contiguous().view(-1)
        payload = torch.zeros(self.wire(flat.numel(), flat.dtype).capacity, dtype=torch.uint8, device=x.device)
        self.encode(flat, payload, seed=seed)
        return payload

    def decompress(self, payload: Tensor, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor of ``shape`` and ``dtype`` that ``compress`` wrote into ``payload``.

        Raises:
            WireError: the payload does not belong to this codec, shape and dtype, or was damaged.
        """
        out = torch.empty(shape, dtype=dtype, device=payload.device)
        self.decode(payload.contiguous().view(-1), out.view(-1))
        return out

    def encode(
        self, x: Tensor, payload: Tensor, *, seed: int = 0, offset: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write ``x`` (n,) into ``payload`` (capacity,).

        With a ``residual`` (n,) f32 this encodes ``x + residual``, and the residual becomes the loss of encoding (error
        feedback). If the loss is not finite the residual stays unchanged, so an overflow does not persist.
        """
        self.encode_chunks(x, payload.unsqueeze(0), x.numel(), seed=seed, offset=offset, residual=residual)

    def encode_tensor(
        self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
    ) -> None:
        """Write ``scale * x`` for a whole gradient ``x`` (n,) into ``payload`` (capacity,).

        Args:
            x: the gradient; it is not changed.
            payload: the message, header included.
            state: the kept state of this tensor; its residual is added and replaced as in ``encode``.
            scale: factor on ``x``.
            ranks: number of ranks whose gradients are summed.
            seed: see ``encode``.
        """
        self.encode(x if scale == 1 else x * scale, payload, seed=seed, residual=state.residual)

    def decode(self, payload: Tensor, out: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Fill ``out`` (n,) from ``payload`` (capacity,), which was encoded from ``dtype`` (default: that of out)."""
        self.decode_chunks(payload.unsqueeze(0), out, out.numel(), dtype=dtype)

    def decode_add(self, payload: Tensor, out: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Add the decoded values of ``payload`` (capacity,) to ``out`` (n,)."""
        self.decode_sum(payload.unsqueeze(0), out, dtype=dtype, add=True)

    # ---- many messages ----------------------------------------------------------------------------------------------

    def encode_chunks(
        self,
        x: Tensor,
        payloads: Tensor,
        chunk: int,
        *,
        seed: int = 0,
        offset: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        """Write ``x[i * chunk : (i + 1) * chunk]`` into row i of ``payloads`` (k, capacity of ``chunk`` elements).

        A shorter last piece becomes a message of its own length. A row without elements is not changed.
        """
        self._check_tensors(x, payloads)
        how = Encoding(seed, offset, residual)
        with here.doing("fusionlayer: encode"):
            for rows, start, stop, form in self._runs(x.numel(), payloads, chunk, x.dtype):
                first = start // chunk * self._numbers(chunk) if start else 0
                self._encode_rows(piece(x, start, stop), _bodies(rows, form), form, how.part(start, stop, first))
                if self.header:
                    for row in rows:
                        self._seal(row, form)

    def decode_chunks(self, payloads: Tensor, out: Tensor, chunk: int, *, dtype: torch.dtype | None = None) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``payloads``: the inverse of ``encode_chunks``."""
        self._check_tensors(out, payloads)
        with here.doing("fusionlayer: decode"):
            for rows, start, stop, form in self._runs(out.numel(), payloads, chunk, dtype or out.dtype):
                self._decode_rows(self._verified(rows, form), piece(out, start, stop), form)

    def decode_sum(self, payloads: Tensor, out: Tensor, *, dtype: torch.dtype | None = None, add: bool = False) -> None:
        """Fill ``out`` (n,) with the sum of all rows of ``payloads`` (k, capacity), added in their order in f32.

        With ``add`` the values in ``out`` are the first summand. The sum is rounded once, to the dtype of ``out``.
        """
        self._check_tensors(out, payloads)
        if out.numel():
            form = self.wire(out.numel(), dtype or out.dtype)
            with here.doing("fusionlayer: decode"):
                self._sum_rows(self._verified(payloads, form), out, form, add)

    def recode(
        self,
        payloads: Tensor,
        payload: Tensor,
        numel: int,
        *,
        dtype: torch.dtype = torch.float32,
        x: Tensor | None = None,
        source: Codec | None = None,
        seed: int = 0,
        offset: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        """Write into ``payload`` (capacity,) the sum of all rows of ``payloads`` (k, capacity), and of ``x`` if given.

        All messages have ``numel`` elements of ``dtype``. They are summed in f32 in the order x, row 0, row 1, ...
        ``residual`` is as in ``encode``. ``source`` is the codec of ``payloads`` if it is another one; ``x`` must then
        be None.
        """
        if not numel:
            return
        form, how = self.wire(numel, dtype), Encoding(seed, offset, residual)
        body = piece(payload, form.body, form.capacity)
        with here.doing("fusionlayer: recode"):
            if source is None or source is self or source == self:
                self._recode_rows(self._verified(payloads, form), body, form, x, how)
            else:
                self._recode_foreign(source, payloads, body, form, how)
            if self.header:
                self._seal(payload, form)

    def recode_rows(
        self,
        payloads: Tensor,
        out: Tensor,
        numel: int,
        starts: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        source: Codec | None = None,
        seed: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        """Write into row i of ``out`` (rows, capacity) the sum of ``payloads[:, i]`` (k, rows, capacity).

        Row i has ``numel`` elements from ``starts[i]`` on, of the seed's sequence and of ``residual``. All else is as
        in ``recode``.

        Raises:
            ConfigError: ``residual`` ends before a row does.
        """
        self._check_reach(residual, numel, starts)
        for row, start in enumerate(starts):
            kept = None if residual is None else residual[start : start + numel]
            given = {"dtype": dtype, "source": source, "seed": seed, "offset": start, "residual": kept}
            self.recode(payloads[:, row], out[row], numel, **given)  # type: ignore[arg-type]

    def _check_reach(self, residual: Tensor | None, numel: int, starts: Sequence[int]) -> None:
        """Refuse a ``residual`` that ends before a row of ``recode_rows`` does."""
        if residual is not None and starts and residual.numel() < (end := max(starts) + numel):
            raise ConfigError(f"{self}: residual of {residual.numel()} elements; expected at least {end}, for all rows")

    def encode_difference(self, x: Tensor, base: Tensor, payload: Tensor, *, seed: int = 0, offset: int = 0) -> None:
        """Write ``x - base`` into ``payload`` (capacity,), a message of f32, for ranks that have ``base``.

        ``x`` is (n,) f32, ``base`` (n,) f32, bf16 or f16; the difference is f32 (SDP4Bit, section 3.1).
        """
        self.encode(x - base, payload, seed=seed, offset=offset)

    # ---- bodies of messages, without header -------------------------------------------------------------------------

    @abstractmethod
    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        """Return the planes of a message of ``numel`` elements; a pure function."""

    @abstractmethod
    def _encode_rows(self, x: Tensor, bodies: Tensor, form: WireFormat, how: Encoding) -> None:
        """Encode piece i of ``x`` (k * n,), of any type, into row i of ``bodies`` (k, nbytes), messages of ``form``."""

    @abstractmethod
    def _decode_rows(self, bodies: Tensor, out: Tensor, form: WireFormat) -> None:
        """Decode row i of ``bodies`` (k, nbytes) into piece i of ``out`` (k * n,)."""

    @abstractmethod
    def _sum_rows(self, bodies: Tensor, out: Tensor, form: WireFormat, add: bool) -> None:
        """Sum all rows of ``bodies`` (k, nbytes) into ``out`` (n,); with ``add``, ``out`` is the first summand."""

    def _recode_rows(self, bodies: Tensor, body: Tensor, form: WireFormat, x: Tensor | None, how: Encoding) -> None:
        """Encode the sum of ``x`` (n,), if given, and all rows of ``bodies`` (k, nbytes) into ``body`` (nbytes,)."""
        total = torch.zeros(form.numel, device=body.device) if x is None else x.to(torch.float32, copy=True)
        self._sum_rows(bodies, total, form, add=True)
        self._encode_rows(total, body.unsqueeze(0), form, how)

    def _recode_foreign(self, source: Codec, payloads: Tensor, body: Tensor, form: WireFormat, how: Encoding) -> None:
        """Encode the sum of all rows of ``payloads`` (k, capacity), messages of ``source``, into ``body`` (nbytes,)."""
        total = torch.empty(form.numel, device=body.device)
        source.decode_sum(payloads, total, dtype=form.dtype)
        self._recode_rows(body.new_empty(0, body.numel()), body, form, total, how)

    def _numbers(self, numel: int) -> int:
        """Return how many numbers of a seed's sequence a message takes: one for each element of its whole blocks."""
        return -(-numel // self.block) * self.block

    def _seal(self, payload: Tensor, form: WireFormat) -> None:
        """Write the header of ``payload`` (capacity,), whose body is complete."""
        seal(self._sender, payload, form)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _runs(
        self, numel: int, payloads: Tensor, chunk: int, dtype: torch.dtype
    ) -> list[tuple[Tensor, int, int, WireFormat]]:
        """Return (rows, start, stop, layout) of all full chunks together, and of a shorter last chunk."""
        if not numel:
            return [] if chunk else [(payloads[:1], 0, 0, self.wire(0, dtype))]
        if chunk < 1:
            raise ConfigError(f"{self}: chunk={chunk}; expected a positive number of elements")
        full, short = divmod(numel, chunk)
        if full + bool(short) > payloads.size(0):
            raise WireError(f"{self}: {payloads.size(0)} messages of {chunk} elements cannot hold {numel}")
        form = self.wire(chunk, dtype)
        if payloads.size(1) != form.capacity:
            raise WireError(
                f"{self}: a message of {chunk} {dtype} elements has {form.capacity} bytes, this one {payloads.size(1)}"
            )
        runs = [(piece(payloads, 0, full), 0, full * chunk, form)] if full else []
        if short:
            runs.append((piece(payloads, full, full + 1), full * chunk, numel, self.wire(short, dtype)))
        return runs

    def _verified(self, payloads: Tensor, form: WireFormat) -> Tensor:
        """Verify the headers of all rows, and return the rows without them."""
        if payloads.size(1) < form.capacity:
            raise WireError(
                f"{self}: a message of {form.numel} {form.dtype} elements has {form.capacity} bytes, this one "
                f"{payloads.size(1)}: it was cut short or belongs to another tensor"
            )
        if self.header:
            for row in payloads:
                verify(self._sender, row, form)
        return _bodies(payloads, form)

    def _check_tensors(self, x: Tensor, payloads: Tensor) -> None:
        if x.dtype not in DTYPE_CODES or x.dim() != 1 or not x.is_contiguous():
            raise ConfigError(
                f"{self}: got a {x.dtype} tensor of shape {tuple(x.shape)}; expected a flat contiguous one of float32, "
                "bfloat16 or float16"
            )
        if payloads.dtype != torch.uint8 or payloads.dim() != 2 or payloads.stride(-1) != 1:
            raise WireError(f"{self}: payload is {payloads.dtype} {tuple(payloads.shape)}; expected contiguous uint8")
        if payloads.device != x.device:
            raise ConfigError(f"{self}: elements on {x.device}, payload on {payloads.device}; expected one device")

    # ---- what is computed once --------------------------------------------------------------------------------------

    @cached_property
    def _forms(self) -> dict[tuple[int, torch.dtype], WireFormat]:
        """Layouts by (numel, dtype). A cache by the codec itself would take ten times as long, as it hashes options."""
        return {}

    @cached_property
    def _sender(self) -> Sender:
        return Sender(self.name, native.crc32c(str(self).encode()), str(self))


def _bodies(rows: Tensor, form: WireFormat) -> Tensor:
    """Return ``rows`` (k, at least capacity) without headers."""
    whole = not form.body and rows.size(1) == form.capacity
    return rows if whole else rows[:, form.body : form.capacity]


@lru_cache(maxsize=4096)
def _wire(codec: Codec, numel: int, dtype: torch.dtype) -> WireFormat:
    if numel < 0:
        raise ConfigError(f"{codec}: numel={numel}; expected at least 0")
    if dtype not in DTYPE_CODES:
        raise ConfigError(f"{codec}: cannot encode {dtype}; expected float32, bfloat16 or float16")
    return lay_out(codec._planes(numel, dtype), numel, dtype, header=codec.header, align=codec.align)
