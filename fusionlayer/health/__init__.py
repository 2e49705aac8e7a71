"""Detects ranks that are dead, stopped, slow or in another call, for transports, launchers and `fl.watch`."""

from .current import begin, follow, leave, watch
from .report import Report, read, reports
from .watcher import Watcher

__all__ = ["Report", "Watcher", "begin", "follow", "leave", "read", "reports", "watch"]
