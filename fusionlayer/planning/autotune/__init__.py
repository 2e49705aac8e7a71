"""Autotuning: an online search for the plan with the shortest measured steps."""

from .settings import Autotune
from .tuner import Autotuner

__all__ = ["Autotune", "Autotuner"]
