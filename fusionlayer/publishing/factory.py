"""Makes the outlet that fits an endpoint."""

from __future__ import annotations

from .address import Endpoint
from .folder import FolderOutlet
from .keyring import Keyring, common_of
from .outlet import Outlet
from .server import TcpOutlet
from .tls import TLS

__all__ = ["open_outlet"]


def open_outlet(
    place: Endpoint, offers: int = 1, *, keep: int, keyring: Keyring | None, tls: TLS | None, timeout: float
) -> Outlet:
    """Return an outlet at ``place``.

    Args:
        place: folder, or host and port to listen at.
        offers: how many versions it can send over TCP: with 1 only the newest.
        keep: how many versions behind the newest a follower may be and still get differences.
        keyring: proves followers over TCP, and signs the files of a folder; None: nothing.
        tls: encrypts connections over TCP; None: no encryption.
        timeout: seconds in which a follower must take some of the data sent to it.

    Raises:
        ConfigError: the place cannot be used.
    """
    if not place.is_tcp:
        return FolderOutlet(place, keep, common_of(keyring))
    return TcpOutlet(place, keep, keyring, tls, timeout, offers)
