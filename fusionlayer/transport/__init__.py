"""Transports: who moves the bytes. ``c10d`` for any torch process group, ``local`` for ranks that are threads."""

from ._base import Transport

__all__ = ["Transport"]
