"""Versions of weights: from a publisher, over TCP or through a folder, to followers that come and go."""

from .address import Place, parse
from .follower import Follower, subscribe
from .outlet import Outlet, open_outlet
from .snapshot import Snapshot
from .tls import TLS

__all__ = ["TLS", "Follower", "Outlet", "Place", "Snapshot", "open_outlet", "parse", "subscribe"]
