"""How ranks prove over new connections that they have the job key: gloo asks no caller for its identity."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ...base import job_key
from ...base import secrets as proofs
from .base import LinkError, LinkMessage
from .exchange import ExchangeLink

_BYTES = 32


def prove(gather: Callable[[Tensor], list[Tensor]], rank: int, place: str) -> None:
    """Prove to the others that this rank has the job key, and check their proofs. Without a key do nothing.

    Args:
        gather: gives each rank the tensors, (32,) uint8, of all ranks.
        rank: this rank.
        place: the purpose of the connections; equal on all ranks.

    Raises:
        LinkError: what answers for a rank has no such key.
    """
    key = job_key.find()
    if key is None:
        return

    def told(text: bytes) -> list[bytes]:
        return [each.numpy().tobytes() for each in gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))]

    nonces = b"".join(told(secrets.token_bytes(_BYTES)))

    def role(of: int) -> bytes:
        return f"connection:{of}:{place}:".encode()

    for peer, shown in enumerate(told(proofs.prove(key, role(rank), nonces))):
        if not proofs.is_proof(shown, key, role(peer), nonces):
            raise LinkError(peer, f"what is connected as rank {peer} is no process of this job: it has no job key")


def prove_link(link: ExchangeLink, rank: int, size: int, place: str, seconds: float) -> None:
    """Like ``prove``, over an unused link, within this many seconds."""
    others = [peer for peer in range(size) if peer != rank]
    deadline = time.monotonic() + seconds

    def gather(mine: Tensor) -> list[Tensor]:
        rows = list(torch.empty(size, mine.numel(), dtype=torch.uint8, device="cpu"))
        rows[rank].copy_(mine)
        outgoing = [LinkMessage(peer, mine, 0) for peer in others]
        try:
            link.exchange(outgoing, [LinkMessage(peer, rows[peer], 0) for peer in others], deadline)
        except LinkError as error:
            raise LinkError(
                error.peer,
                f"what is connected as rank {error.peer} does not prove that it is a process of this job: {error}; a "
                "stranger can take a rank's place at a port of gloo, so let none reach it (docs/security.md)",
            ) from None
        return rows

    prove(gather, rank, place)
