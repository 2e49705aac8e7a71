"""TLS 1.3 between publishers and followers, by certificates or, where Python can do it, by the secret alone."""

from __future__ import annotations

import os
import ssl
import sys
from dataclasses import dataclass
from typing import Any

from ..base.errors import ConfigError, kind_of
from .address import Endpoint
from .keyring import Keyring, key

__all__ = ["TLS", "check_tls"]

_SALT = b"TLS"


@dataclass(frozen=True)
class TLS:
    """Encrypts connections of ``fl.publish`` and ``fl.subscribe`` by TLS 1.3. Both ends need it.

    A publisher has a certificate. With ``authorities`` it accepts only followers whose certificate is signed by one of
    them, and names them by their common name. A follower accepts only a publisher whose certificate is signed by one of
    its ``authorities``, and names the host that it connects to. ``fl.TLS()`` at both ends needs no certificates: the
    secret proves the identity. That takes Python 3.13.

    Args:
        certificate: PEM file with the certificate of this end, and those between it and its authority.
        key: PEM file with its private key; None: it is in ``certificate``.
        authorities: PEM file with certificates of authorities. None: a publisher requests no certificate, and a
            follower with a ``certificate`` or ``host`` uses the authorities of its system.
        host: name in the publisher's certificate, for a follower; None: the host in the address.
    """

    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    authorities: str | os.PathLike[str] | None = None
    host: str | None = None

    def for_publisher(self, keyring: Keyring | None) -> ssl.SSLContext:
        """Return the context of a publisher.

        Raises:
            ConfigError: files cannot be used, or there is no certificate and no secret in its place.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        if not self.certificate:
            _share_key(context, keyring, "set_psk_server_callback")
        elif self.authorities:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_follower(self, keyring: Keyring | None, name: str | None) -> ssl.SSLContext:
        """Return the context of a follower.

        Args:
            keyring: with its secret, or None.
            name: the name that it was given, or None.

        Raises:
            ConfigError: files cannot be used, or there are none and no secret in their place.
        """
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        if not (self.certificate or self.authorities or self.host):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            _share_key(context, keyring, "set_psk_client_callback", name)
        elif not self.authorities:
            context.load_default_certs()
        return context

    def _context(self, protocol: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key, password=_refuse_password)
            if self.authorities:
                context.load_verify_locations(self.authorities)
        except OSError as error:
            raise ConfigError(
                f"tls: {error.strerror or error}: {self}; expected PEM files, and the key of the certificate"
            ) from error
        return context


def check_tls(tls: object, place: Endpoint) -> None:
    """Raise ``ConfigError`` unless this is a valid ``tls`` of ``publish`` and ``subscribe`` at a place."""
    if tls is not None and not isinstance(tls, TLS):
        raise ConfigError(f"tls: got {kind_of(tls)}; expected fl.TLS(certificate=..., authorities=...), or None")
    if tls is not None and not place.is_tcp:
        raise ConfigError(f"tls for {place}: a folder has no connections; expected None, and permissions of its files")


def _share_key(context: ssl.SSLContext, keyring: Keyring | None, callback: str, name: str | None = None) -> None:
    """Let the secret stand for certificates."""
    if keyring is None:
        raise ConfigError("tls: no certificate and no secret; give fl.TLS(certificate=...), or a secret as well")
    if not hasattr(context, callback):
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigError(
            f"tls: without certificates the secret is the key, which takes Python 3.13, and this is {version}; give "
            "fl.TLS(certificate=...) to publish and fl.TLS(authorities=...) to subscribe"
        )

    def of_follower(who: str | None) -> bytes:
        return next((key(secret, _SALT) for secret in keyring.accepted(who or "")), b"")

    def own(_: str | None) -> tuple[str, bytes]:
        who, secret = keyring.own(name, "follower")  # no name at all is an error of TLS
        return who, key(secret, _SALT)

    getattr(context, callback)(of_follower if "server" in callback else own)


def _refuse_password() -> bytes:
    raise ConfigError("tls: the key has a password; give one without, in a file of mode 600")
