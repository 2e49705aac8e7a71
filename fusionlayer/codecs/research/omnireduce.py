"""``omnireduce``: sends only the blocks with the most energy, in bf16."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...native.wire import Plane
from ..pytorch import TorchCodec

_VALUE_BITS = 16
_MOMENTUM = 0.8


class Share:
    """The share of the permitted blocks that one rank selects; kept from one sum to the next.

    Selections of ranks overlap, and ranks know only their union, afterwards. So the share follows the size of the
    union, with momentum (DynamiQ, appendix C, equation 1). It begins with 1 / ranks, so that the union cannot be too
    large.

    Attributes:
        value: k / K; None before the first sum.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        # Guards value: sums of several lanes may share a codec, and each reads the value and writes a new one.
        self._lock = threading.Lock()

    def select(self, wanted: int, ranks: int) -> int:
        """Return how many of ``wanted`` blocks this rank selects, at least one."""
        with self._lock:
            self.value = 1 / ranks if self.value is None else self.value
            return max(1, min(wanted, round(self.value * wanted)))

    def adapt(self, wanted: int, union: int) -> None:
        """Adapt the share after a sum: ranks selected ``union`` blocks together, and ``wanted`` may be sent."""
        with self._lock:
            assert self.value is not None
            self.value *= _MOMENTUM + (1 - _MOMENTUM) * wanted / max(1, union)


@dataclass(frozen=True)
class OmniReduce(TorchCodec, name="omnireduce"):
    """The blocks with the most energy in bf16, as many as fit into ``bits`` per value (SIGCOMM 2021).

    Its default collective ``omnireduce`` sums every block that any rank has selected, as DynamiQ's appendix C adapts it
    to many hops. In other collectives a message has a bit for each block of the tensor, then the selected blocks.
    Blocks with a NaN or Inf are selected first.

    Attributes:
        bits: budget for each value, 1 to 16; the share of blocks that are sent is ``bits`` / 16.
        block_size: elements that are sent together or not at all; a power of two from 32 to 4096.
        share: the share of blocks that a rank selects, adapted in each sum.
    """

    local: ClassVar[bool] = False  # blocks of a message compete
    collective: ClassVar[str | None] = "omnireduce"

    bits: int = 8
    block_size: int = 256
    share: Share = field(default_factory=Share, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= _VALUE_BITS:
            raise ConfigError(f"omnireduce codec: bits={self.bits!r}; expected a budget of 1 to 16 bits per value")
        if type(self.block_size) is not int or self.block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ConfigError(
                f"omnireduce codec: block_size={self.block_size!r}; expected a power of two from 32 to 4096"
            )

    @property
    def block(self) -> int:
        """The block size."""
        return self.block_size

    def blocks(self, numel: int) -> int:
        """Return how many blocks a tensor of ``numel`` elements has."""
        return -(-numel // self.block_size)

    def travelling(self, numel: int) -> int:
        """Return how many blocks of a tensor of ``numel`` elements may be sent, at least one."""
        return min(self.blocks(numel), max(1, self.blocks(numel) * self.bits // _VALUE_BITS))

    def rows(self, x: Tensor) -> Tensor:
        """Return ``x`` (n,) as blocks (m, block_size), the last one filled up with zeros."""
        return torch.nn.functional.pad(x, (0, -x.numel() % self.block_size)).view(-1, self.block_size)

    def select(self, x: Tensor, count: int) -> Tensor:
        """Return (count,) int64, ascending: the blocks of ``x`` (n,) with the most energy, of equal ones the first."""
        energy = self.rows(x.float()).double().square().sum(1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.argsort(energy, descending=True, stable=True)[:count].sort().values

    def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
        bitmap = -(-self.blocks(numel) // 8)
        values = self.travelling(numel) * self.block_size if numel else 0
        return [Plane("blocks", bitmap, torch.uint8), Plane("values", values, torch.bfloat16)]

    def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
        chosen = self.select(x, self.travelling(x.numel()))
        bits = torch.zeros(planes[0].numel() * 8, dtype=torch.uint8, device=x.device)
        bits[chosen] = 1
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=x.device)
        planes[0].copy_((bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8))
        planes[1].copy_(self.rows(x)[chosen].view(-1))

    def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
        places = torch.arange(8, dtype=torch.uint8, device=out.device)
        bits = (planes[0][:, None] >> places & 1).view(-1)[: self.blocks(out.numel())]
        values = planes[1].view(-1, self.block_size)
        chosen = bits.nonzero().view(-1)[: len(values)]
        rows = torch.zeros(self.blocks(out.numel()), self.block_size, device=out.device)
        rows[chosen] = values[: len(chosen)].float()
        out.copy_(rows.view(-1)[: out.numel()])
