"""Transports move bytes between ranks: ``c10d`` for any torch process group, ``local`` for ranks that are threads."""

from .base import Transport
from .c10d import C10dTransport
from .local import LocalTransport

__all__ = ["C10dTransport", "LocalTransport", "Transport"]
