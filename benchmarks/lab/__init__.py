"""Emulated networks on one machine: hosts are network namespaces, their links are shaped by the kernel."""

from .launcher import launch, why_not
from .network import Network, Obstacle

__all__ = ["Network", "Obstacle", "launch", "why_not"]
