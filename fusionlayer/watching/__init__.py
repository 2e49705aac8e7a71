"""Says while a job runs which rank is late, stopped or in another call, and where: for any torch.distributed program."""

from ._report import Report, read, reports
from .watcher import Watcher, begin, watch

__all__ = ["Report", "Watcher", "begin", "read", "reports", "watch"]
