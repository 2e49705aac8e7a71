"""How publisher and follower prove to each other that they have one secret. ``docs/wire_format.md`` describes it."""

from __future__ import annotations

import socket
import struct

from ..base.errors import ConfigError, TransportError, WireError
from ..base.secrets import NONCE_BYTES, PROOF_BYTES, Keys, is_proof, make_nonce, prove
from .frames import receive
from .keyring import NAME_BYTES, Keyring, is_name, key

__all__ = ["HELLO_BYTES", "Greeting", "greet"]

_MAGIC = b"FLPUB2"
_OPENING = struct.Struct(f"<6sB{NONCE_BYTES}s{NONCE_BYTES}s")
_HELLO = struct.Struct(f"<{NONCE_BYTES}s{NAME_BYTES}s{PROOF_BYTES}s")
_ANSWER = struct.Struct(f"<B{PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
_PUBLISHER, _FOLLOWER = b"publisher", b"follower"


class Greeting:
    """The publisher's end of the beginning of one connection.

    Each proof is made of all earlier messages of both ends, so it is invalid on another connection.

    Args:
        keyring: the required proof of followers; None: they need not prove anything.

    Attributes:
        opening: the first message.
        name: the name that the follower gives, after its hello.
        secret: the secret of its proof; None: it needs none.
        keys: the keys of later data; None without a secret.
    """

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        salt = keyring.salt if keyring else bytes(NONCE_BYTES)
        self.opening = _OPENING.pack(_MAGIC, keyring is not None, salt, make_nonce())
        self.name = ""
        self.secret: bytes | None = None
        self.keys: Keys | None = None

    def answer(self, hello: bytes, certified: str | None) -> tuple[str | None, bytes]:
        """Return why this is no follower, or None; and the answer to its ``hello``.

        Args:
            hello: its first message.
            certified: the name in its certificate, which counts instead of the one that it gives.
        """
        _, name, proof = _HELLO.unpack(hello)
        refusal = _ANSWER.pack(0, bytes(PROOF_BYTES))
        self.name = certified or name.rstrip(b"\0").decode("utf-8", "replace")
        if not is_name(self.name):
            return "it gives no name that a follower may have", refusal
        if self._keyring is None:
            return None, _ANSWER.pack(1, bytes(PROOF_BYTES))
        heard = self.opening + hello[: -len(proof)]
        for secret in self._keyring.accepted(self.name):
            slow = key(secret, self._keyring.salt)
            if is_proof(proof, slow, _FOLLOWER, heard):
                self.secret, self.keys = secret, Keys.derive(slow, heard)
                return None, _ANSWER.pack(1, prove(slow, _PUBLISHER, heard))
        return f"it calls itself {self.name!r}, and has not the secret", refusal


def greet(end: socket.socket, name: str, secret: bytes | None) -> Keys | None:
    """Do the follower's part of the handshake; return the keys of later data, None without secret.

    Raises:
        ConfigError: the ends do not have one secret.
        TransportError: the publisher has closed the connection.
        WireError: the other end is no publisher.
    """
    try:
        magic = bytes(receive(end, len(_MAGIC)))
    except ConnectionError as error:
        raise TransportError(
            "the publisher has closed the connection without a word: it has no room for more followers, or it has "
            "tls=..., which subscribe needs as well then"
        ) from error
    if magic != _MAGIC:
        raise WireError(f"another program answers there: it said {magic!r}, expected {_MAGIC!r}")
    opening = magic + receive(end, _OPENING.size - len(magic))
    _, guarded, salt, _ = _OPENING.unpack(opening)
    if guarded and secret is None:
        raise ConfigError("the publisher asks for a secret: give subscribe(secret=...) that of publish")
    if secret is not None and not guarded:
        raise ConfigError("the publisher has no secret, so nothing shows that it is yours: give publish the secret too")
    hello = make_nonce() + name.encode().ljust(NAME_BYTES, b"\0")
    heard = opening + hello
    slow = None if secret is None else key(secret, salt)
    end.sendall(hello + (bytes(PROOF_BYTES) if slow is None else prove(slow, _FOLLOWER, heard)))
    taken, proof = _ANSWER.unpack(bytes(receive(end, _ANSWER.size)))
    if not taken or (slow is not None and not is_proof(proof, slow, _PUBLISHER, heard)):
        raise ConfigError("publisher and follower have different secrets: give both the same one")
    return None if slow is None else Keys.derive(slow, heard)
