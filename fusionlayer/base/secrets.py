"""Proofs that both ends of a connection have one secret, and keys that authenticate all later data.

Each end sends a random number. HMAC-SHA256 of both, with the secret as its key, proves an end's knowledge. HKDF (RFC
5869) of the same makes one key for each direction of this connection alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from functools import lru_cache
from typing import NamedTuple

NONCE_BYTES, PROOF_BYTES, TAG_BYTES = 16, 32, 16
_COUNTER = struct.Struct("<Q")
# 16 MiB and some 50 ms for each guess of a secret.
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}


def make_nonce() -> bytes:
    """Return a random number that no other connection has."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: bytes, heard: bytes) -> bytes:
    """Return a value that only a holder of the secret can compute.

    Args:
        secret: the shared secret of both ends.
        role: the end that proves it, so that the other end's proof cannot be sent back.
        heard: all earlier messages of both ends, with both random numbers.
    """
    return hmac.digest(secret, role + heard, "sha256")


def is_proof(proof: bytes, secret: bytes, role: bytes, heard: bytes) -> bool:
    """Return whether ``proof`` is that of ``prove``, in constant time."""
    return hmac.compare_digest(proof, prove(secret, role, heard))


@lru_cache(maxsize=4096)
def slow_key(secret: bytes, salt: bytes) -> bytes:
    """Return 32 bytes derived from a secret by scrypt, once in a process: each guess of a recorded proof costs as
    much."""
    return hashlib.scrypt(secret, salt=salt, **_SCRYPT)


class Keys(NamedTuple):
    """Keys of one connection, of 32 bytes each.

    Attributes:
        caller: the key for messages of the connecting end.
        host: the key for messages of the other end.
    """

    caller: bytes
    host: bytes

    @classmethod
    def derive(cls, secret: bytes, heard: bytes, purpose: bytes = b"frames") -> Keys:
        """Return the keys of the connection that began with the messages ``heard``.

        Args:
            secret: the secret that both ends have proved.
            heard: see ``prove``; it has the random numbers of both.
            purpose: the use of the keys; each use has other keys.
        """
        root = hmac.digest(heard, secret, "sha256")  # HKDF-Extract with `heard` as its salt
        return cls(*(hmac.digest(root, purpose + end + b"\1", "sha256") for end in (b" caller", b" host")))


class Seal:
    """Tags of the pieces that one end sends, in their order: none can be changed, repeated, left out or moved.

    A tag is HMAC-SHA256 of the piece's number and its SHA-256, cut to 16 bytes. A sender of one piece to many hashes it
    once. Processors have instructions for SHA-256: with them it is twice as fast as keyed BLAKE2b.

    Args:
        key: the key of this direction of this connection.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sent = 0

    def tag(self, digest: bytes) -> bytes:
        """Return the tag of the next piece, whose SHA-256 is ``digest``."""
        number = _COUNTER.pack(self._sent)
        self._sent += 1
        return hmac.digest(self._key, number + digest, "sha256")[:TAG_BYTES]

    def is_next(self, tag: bytes, digest: bytes) -> bool:
        """Return whether ``tag`` belongs to the next piece."""
        return hmac.compare_digest(tag, self.tag(digest))
