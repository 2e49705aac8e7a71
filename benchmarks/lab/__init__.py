"""Emulated networks on one machine: hosts are network namespaces, their links are shaped by the kernel."""

from .link import Network, launch, why_not

__all__ = ["Network", "launch", "why_not"]
