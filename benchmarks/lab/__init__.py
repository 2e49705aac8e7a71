"""Emulated networks on one machine: hosts are network namespaces, their links are shaped by the kernel."""

from .flaps import Flap
from .launcher import launch, why_not
from .network import Network, Obstacle
from .programs import search_system_folders

__all__ = ["Flap", "Network", "Obstacle", "launch", "why_not"]

search_system_folders()
