"""Signatures of versions in a folder, by a secret: without it, no writer can make versions that followers accept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..base.errors import WireError
from ..base.secrets import PROOF_BYTES, is_proof, prove

__all__ = ["SIGNED_BYTES", "checks", "seal", "sign"]

_MAGIC = b"FLS1"
SIGNED_BYTES = len(_MAGIC) + PROOF_BYTES
"""Bytes that stand before a signed update."""


def sign(secret: bytes, facts: Sequence[object]) -> str:
    """Return the signature of the content of ``newest.json``."""
    return prove(secret, b"newest", json.dumps(facts).encode()).hex()


def seal(secret: bytes, front: bytes | memoryview) -> bytes:
    """Return the prefix of a signed update.

    Args:
        secret: of the publisher and its followers.
        front: the update up to the end of its header, which has the digests of everything that follows.
    """
    return _MAGIC + prove(secret, b"update", bytes(front))


def checks(secret: bytes, mark: bytes) -> Callable[[bytes], None]:
    """Return a function that raises ``WireError`` unless ``mark`` is the result of ``seal`` for its argument.

    Raises:
        WireError: ``mark`` is no signature.
    """
    if mark[: len(_MAGIC)] != _MAGIC:
        raise WireError("it is not signed, and this follower has a secret: give publish the same secret")

    def check(front: bytes) -> None:
        if not is_proof(mark[len(_MAGIC) :], secret, b"update", bytes(front)):
            raise WireError("its signature is of another secret: give publisher and followers the same one")

    return check
