"""Versions of weights: from a publisher, over TCP or through a folder, to followers that come and go."""

from .address import Endpoint, parse
from .factory import open_outlet
from .follower import Follower, subscribe
from .outlet import Outlet
from .snapshot import Snapshot
from .tls import TLS

__all__ = ["TLS", "Follower", "Outlet", "Endpoint", "Snapshot", "open_outlet", "parse", "subscribe"]
