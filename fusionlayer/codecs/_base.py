"""What a codec is, and the verbs that every collective is written in."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError, WireError
from ..registry import Registry
from ..wire import ALIGN, DTYPE_CODES, Header, Plane, WireFormat, lay_out
from ._state import Part, TensorState

if TYPE_CHECKING:
    from ..transport import Transport
    from ._arrangement import Arrangement

__all__ = ["Codec", "registry"]

registry: Registry[Codec] = Registry("codec", __package__)


@dataclass(frozen=True)
class Codec(ABC):
    """Turns a flat tensor into the bytes of one message and back; stateless, deterministic in (x, seed).

    A codec is a frozen dataclass whose fields are its options; it names itself in the class statement. Most subclass
    ``TorchCodec`` (three methods in torch operations) or ``NativeCodec`` (kernels in ``csrc``), not this class.

    Tensors are flat and contiguous: elements are f32, bf16 or f16, payloads uint8 of exactly ``wire(...).capacity``.

    Attributes:
        name: what ``fusionlayer.codecs.get`` calls it.
        lossless: decoding gives back the same bits.
        unbiased: the mean of the decoded value over seeds is the value.
        variable_size: a payload may use fewer bytes than its capacity; ``used_bytes`` tells.
        block: elements that share metadata; pieces of a tensor begin at multiples of it.
        local: what an element becomes depends on its block alone, not on the cut of a tensor into messages.
        align: bytes to multiples of which planes and messages are filled up.
        ahead: by default each tensor is encoded by itself, ahead of fusion; the numbers of its seed are then the same
            on all ranks, since they decide what is sent.
        needs_feedback: what it loses of a tensor is too much, or too one-sided, to train without error feedback.
        arrangement: in which order and relative to which means the elements of this one sum travel; None: as they are.
        header: each payload begins with a header that carries its checksum and is verified before decoding.
            Inside buckets whose plan all ranks have compared it is left out.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    variable_size: ClassVar[bool] = False
    local: ClassVar[bool] = True
    align: ClassVar[int] = ALIGN
    ahead: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False

    @property
    def arrangement(self) -> Arrangement | None:
        """How elements travel in the sum that this codec was agreed on for."""
        return None

    header: bool = field(default=True, kw_only=True)

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.name = name
            registry.add(name, cls)

    @property
    def unbiased(self) -> bool:
        """Whether the mean over seeds is the value itself."""
        return self.lossless

    @property
    def block(self) -> int:
        """Elements that share metadata."""
        return 1

    @property
    def feedback_pays(self) -> bool:
        """Whether error feedback is worth its memory by default: the codec is lossy, biased and coarse."""
        return not (self.lossless or self.unbiased)

    @property
    def within(self) -> Codec:
        """The codec of messages inside a node, where sums are made in two levels; the same one for most."""
        return self

    @property
    def untransformed(self) -> Codec:
        """A codec of the same layout that leaves out what this one does to values before it quantises them.

        Of its messages it decodes values in that domain, and it encodes such values: where the transform is linear sums
        can be made there, over whole runs of ``transform_run`` elements. A codec without one is its own.
        """
        return self

    @property
    def transform_run(self) -> int:
        """Elements that are transformed together; it divides ``block``."""
        return 1

    def used_bytes(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a ``payload`` (capacity,) must travel: all unless the codec is of variable size."""
        return payload.numel()

    def compact(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what must travel of a ``payload`` (capacity,) of ``numel`` elements: all of it for most codecs."""
        return payload

    def expand(self, data: Tensor, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> None:
        """Fill ``payload`` (capacity,) from what ``compact`` made of it.

        Raises:
            WireError: ``data`` is nothing that ``compact`` makes for this codec and size.
        """
        if data.numel() != payload.numel():
            raise WireError(f"{self}: {data.numel()} bytes for a message of {payload.numel()}: it was cut short")
        payload.copy_(data)

    @property
    def zips(self) -> bool:
        """Whether messages lose no bit and take as many bytes as the data need: what ``zipped`` collectives carry."""
        return self.lossless and self.variable_size

    @property
    def collective(self) -> str | None:
        """The collective that was made for codecs of this kind; None where the number of ranks decides."""
        return "zipped" if self.zips else None

    def static_extent(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return how many bytes of a payload, from its start, must travel whatever the data: all for most codecs."""
        return self.wire(numel, dtype).capacity

    def extents(self, payloads: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return how many bytes of each payload, from its start, hold all of its data; on CUDA this waits for them.

        Only the first ``static_extent`` bytes of a payload are looked at.

        Raises:
            WireError: a message contradicts itself.
        """
        return [self.wire(numel, dtype).capacity for numel in numels]

    def at_step(self, step: int) -> Codec:
        """Return the codec of a step, a pure function of its options and the step; for most codecs themselves."""
        return self

    def for_parts(self, parts: Sequence[Part]) -> Codec:
        """Return the codec for sums of flat tensors that are made of ``parts``; for most codecs themselves.

        Whoever fuses tensors tells it, so that a codec can treat each by its shape, and keep something of each. The
        parts are no options: codecs with different ones are equal, and their messages have the same layout.
        """
        return self

    def agree(
        self,
        x: Tensor,
        transport: Transport,
        *,
        seed: int = 0,
        residual: Tensor | None = None,
        chunks: Sequence[int] | None = None,
        movable: bool = True,
    ) -> Codec:
        """Return the codec for the sum of ``x`` over ranks, after what statistics they have to exchange for it.

        Every collective that sums calls it first, on all ranks together; most codecs need nothing: themselves. What was
        agreed on lives in fields with ``compare=False``: they are no options, change no layout, and belong to this one
        call. Such a codec may look its facts up by ``offset``, which in these calls is the place in ``x``.

        Args:
            x: (n,), this rank's summand; left as it is.
            transport: the ranks; only the calling thread uses it.
            seed: the same on all ranks.
            residual: (n,) f32 that is going to be sent along.
            chunks: where the collective heeds ``arrangement`` and every rank encodes every element once at most: how
                many elements each message has. All but the last are whole blocks.
            movable: whether blocks may change places between chunks.
        """
        return self

    def kept(self) -> dict[str, float]:
        """Return what this codec carries from one sum to the next, for checkpoints; nothing for most codecs."""
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:  # noqa: B027 - most codecs keep nothing
        """Take over what ``kept`` returned; without it begin anew. Other keys are ignored."""

    def agree_rows(self, rows: Tensor, numel: int, transport: Transport, *, seed: int = 0) -> Codec:
        """Return what ``agree`` does, for rows that become messages of their own.

        Args:
            rows: (k, m), of which the first ``numel`` elements each are values, others 0; m is a multiple of the block.
                The place of an element is that in the rows one behind the other.
            numel: elements of a row.
            transport: as for ``agree``.
            seed: as for ``agree``.
        """
        return self.agree(rows.reshape(-1), transport, seed=seed)

    def wire(self, numel: int, dtype: torch.dtype = torch.float32) -> WireFormat:
        """Return the layout of a message of ``numel`` elements encoded from ``dtype``."""
        return _wire(self, numel, dtype)

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
        """Every option that decides what the bytes mean, with its value."""
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
        """Return the tensor of ``shape`` and ``dtype`` that ``compress`` of such a tensor made ``payload`` from.

        Raises:
            WireError: the payload is not one of this codec, shape and dtype, or was damaged.
        """
        out = torch.empty(shape, dtype=dtype, device=payload.device)
        self.decode(payload.contiguous().view(-1), out.view(-1))
        return out

    def encode(
        self, x: Tensor, payload: Tensor, *, seed: int = 0, offset: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write ``x`` (n,) into ``payload`` (capacity,).

        With a ``residual`` (n,) f32 the sum ``x + residual`` is encoded, and the residual becomes what encoding lost
        (error feedback); where that is not finite it stays, so an overflow does not live on.
        """
        self.encode_chunks(x, payload.unsqueeze(0), x.numel(), seed=seed, offset=offset, residual=residual)

    def encode_tensor(
        self, x: Tensor, payload: Tensor, state: TensorState, *, scale: float = 1.0, ranks: int = 1, seed: int = 0
    ) -> None:
        """Write ``scale * x`` for a whole gradient ``x`` (n,) into ``payload`` (capacity,).

        Args:
            x: left as it is.
            payload: the message, header included.
            state: what is kept of this tensor; its residual is sent along and replaced as in ``encode``.
            scale: factor on ``x``.
            ranks: how many ranks' gradients are summed.
            seed: as in ``encode``.
        """
        self.encode(x if scale == 1 else x * scale, payload, seed=seed, residual=state.residual)

    def decode(self, payload: Tensor, out: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Fill ``out`` (n,) from ``payload`` (capacity,), which was encoded from ``dtype`` (default: out's)."""
        self.decode_chunks(payload.unsqueeze(0), out, out.numel(), dtype=dtype)

    def decode_add(self, payload: Tensor, out: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Add what ``payload`` (capacity,) decodes to onto ``out`` (n,)."""
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

        A last, shorter piece is a message of its own length; a row without elements is left alone.
        """
        self._check_tensors(x, payloads)
        for rows, piece in self._pieces(x.numel(), payloads, chunk, x.dtype):
            n = (piece.stop - piece.start) // rows.shape[0]
            form = self.wire(n, x.dtype)
            part = None if residual is None else residual[piece]
            first = offset + (piece.start // chunk if chunk else 0) * self._numbers(chunk)
            self._encode_rows(x[piece], rows[:, form.body : form.capacity], n, seed, first, part)
            if self.header:
                for row in rows:
                    row[: form.body].copy_(self._seal(row, n, x.dtype))

    def decode_chunks(self, payloads: Tensor, out: Tensor, chunk: int, *, dtype: torch.dtype | None = None) -> None:
        """Fill ``out[i * chunk : (i + 1) * chunk]`` from row i of ``payloads``: the inverse of ``encode_chunks``."""
        self._check_tensors(out, payloads)
        source = dtype or out.dtype
        for rows, piece in self._pieces(out.numel(), payloads, chunk, source):
            n = (piece.stop - piece.start) // rows.shape[0]
            self._decode_rows(self._bodies(rows, n, source), out[piece], n, source)

    def decode_sum(self, payloads: Tensor, out: Tensor, *, dtype: torch.dtype | None = None, add: bool = False) -> None:
        """Fill ``out`` (n,) with the sum of all rows of ``payloads`` (k, capacity), added in their order in f32.

        With ``add`` what stands in ``out`` is the first summand. The sum is rounded to out's dtype once.
        """
        self._check_tensors(out, payloads)
        source = dtype or out.dtype
        if out.numel():
            self._sum_rows(self._bodies(payloads, out.numel(), source), out, source, add)

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

        ``numel`` elements, summed in f32 in the order x, row 0, row 1, ...; messages are those of tensors of ``dtype``.
        ``residual`` as in ``encode``. ``source`` is the codec of ``payloads`` where that is another one; there is no
        ``x`` then.
        """
        if not numel:
            return
        form = self.wire(numel, dtype)
        body = payload[form.body : form.capacity]
        if source is not None and source != self:
            self._recode_foreign(source, payloads, body, numel, dtype, seed, offset, residual)
        else:
            bodies = self._bodies(payloads, numel, dtype)
            self._recode_rows(bodies, body, numel, dtype, x, seed, offset, residual)
        if self.header:
            payload[: form.body].copy_(self._seal(payload, numel, dtype))

    def encode_difference(self, x: Tensor, base: Tensor, payload: Tensor, *, seed: int = 0, offset: int = 0) -> None:
        """Write ``x - base`` into ``payload`` (capacity,), a message of f32: what who has ``base`` lacks of ``x``.

        ``x`` is (n,) f32, ``base`` (n,) f32, bf16 or f16; the difference is f32 (SDP4Bit, section 3.1).
        """
        self.encode(x - base, payload, seed=seed, offset=offset)

    # ---- bodies of messages, without header -------------------------------------------------------------------------

    @abstractmethod
    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        """Return the planes of a message of ``numel`` elements; a pure function."""

    @abstractmethod
    def _encode_rows(self, x: Tensor, bodies: Tensor, n: int, seed: int, offset: int, residual: Tensor | None) -> None:
        """Encode piece i of ``x`` (k * n,) into row i of ``bodies`` (k, nbytes)."""

    @abstractmethod
    def _decode_rows(self, bodies: Tensor, out: Tensor, n: int, dtype: torch.dtype) -> None:
        """Decode row i of ``bodies`` (k, nbytes) into piece i of ``out`` (k * n,)."""

    @abstractmethod
    def _sum_rows(self, bodies: Tensor, out: Tensor, dtype: torch.dtype, add: bool) -> None:
        """Sum all rows of ``bodies`` (k, nbytes), after ``out`` (n,) itself if ``add``, into ``out``."""

    @abstractmethod
    def _recode_rows(
        self,
        bodies: Tensor,
        body: Tensor,
        n: int,
        dtype: torch.dtype,
        x: Tensor | None,
        seed: int,
        offset: int,
        residual: Tensor | None,
    ) -> None:
        """Encode the sum of ``x`` (n,) or nothing and all rows of ``bodies`` (k, nbytes) into ``body`` (nbytes,)."""

    def _recode_foreign(
        self,
        source: Codec,
        payloads: Tensor,
        body: Tensor,
        n: int,
        dtype: torch.dtype,
        seed: int,
        offset: int,
        residual: Tensor | None,
    ) -> None:
        """Encode the sum of all rows of ``payloads`` (k, capacity), messages of ``source``, into ``body`` (nbytes,)."""
        total = torch.empty(n, device=body.device)
        source.decode_sum(payloads, total, dtype=dtype)
        self._recode_rows(body.new_empty(0, body.numel()), body, n, dtype, total, seed, offset, residual)

    def _numbers(self, numel: int) -> int:
        """Return how many numbers of a seed's sequence a message takes: its elements, the last block filled up."""
        return -(-numel // self.block) * self.block

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _pieces(self, numel: int, payloads: Tensor, chunk: int, dtype: torch.dtype) -> list[tuple[Tensor, slice]]:
        """Return (rows, elements) for all full chunks together and for the short last one."""
        if not numel:
            return [] if chunk else [(payloads[:1], slice(0, 0))]
        if chunk < 1:
            raise ConfigError(f"{self}: chunk={chunk}; expected a positive number of elements")
        full, short = divmod(numel, chunk)
        if full + bool(short) > payloads.shape[0]:
            raise WireError(f"{self}: {payloads.shape[0]} messages of {chunk} elements cannot hold {numel}")
        expected = self.wire(chunk, dtype).capacity
        if payloads.shape[1] != expected:
            raise WireError(
                f"{self}: a message of {chunk} {dtype} elements has {expected} bytes, this one {payloads.shape[1]}"
            )
        pieces = [(payloads[:full], slice(0, full * chunk))] if full else []
        return [*pieces, (payloads[full : full + 1], slice(full * chunk, numel))] if short else pieces

    def _bodies(self, payloads: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the rows without their headers, which are verified first."""
        form = self.wire(numel, dtype)
        if payloads.shape[1] < form.capacity:
            raise WireError(
                f"{self}: a message of {numel} {dtype} elements has {form.capacity} bytes, this one "
                f"{payloads.shape[1]}: it was cut short or belongs to another tensor"
            )
        if self.header:
            for row in payloads:
                self._verify(row, numel, dtype)
        return payloads[:, form.body : form.capacity]

    def _seal(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        body = payload[self.wire(0, dtype).body : self.wire(numel, dtype).capacity]
        header = Header(self.name, self._options_crc, dtype, numel, body.numel(), 0, native.crc32c(body.cpu()))
        return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)

    def _verify(self, payload: Tensor, numel: int, dtype: torch.dtype) -> None:
        start, end = self.wire(0, dtype).body, self.wire(numel, dtype).capacity
        given = Header.unpack(payload[:start].cpu().numpy().tobytes())
        expected = Header(self.name, self._options_crc, dtype, numel, end - start, given.sequence, given.body_crc)
        if given != expected:
            differ = [
                f"{f.name} {getattr(given, f.name)}, expected {getattr(expected, f.name)}"
                for f in dataclasses.fields(Header)
                if getattr(given, f.name) != getattr(expected, f.name)
            ]
            raise WireError(f"{self}: the message does not fit its receiver: {'; '.join(differ)}")
        if native.crc32c(payload[start:end].cpu()) != given.body_crc:
            raise WireError(f"{self}: checksum of the message body is wrong: the message was damaged on its way")

    @cached_property
    def _options_crc(self) -> int:
        return native.crc32c(str(self).encode())

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


@lru_cache(maxsize=4096)
def _wire(codec: Codec, numel: int, dtype: torch.dtype) -> WireFormat:
    if numel < 0:
        raise ConfigError(f"{codec}: numel={numel}; expected at least 0")
    if dtype not in DTYPE_CODES:
        raise ConfigError(f"{codec}: cannot encode {dtype}; expected float32, bfloat16 or float16")
    return lay_out(codec._planes(numel, dtype), header=codec.header, align=codec.align)
