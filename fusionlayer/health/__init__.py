"""Detects ranks that are dead, stopped, slow or in another call, for transports, launchers and `fl.watch`."""

from .report import Report, read, reports
from .watcher import Watcher, begin, follow, leave, watch

__all__ = ["Report", "Watcher", "begin", "follow", "leave", "read", "reports", "watch"]
