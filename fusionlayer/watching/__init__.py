"""Says while a job of torch.distributed runs which rank is late, stopped or in another call, and where."""

from ._report import Report, read, reports
from .watcher import Watcher, begin, follow, leave, watch

__all__ = ["Report", "Watcher", "begin", "follow", "leave", "read", "reports", "watch"]
