"""Autotuning: an online search for the plan with the shortest steps, by measured step time."""

from .settings import Autotune
from .tuner import Autotuner

__all__ = ["Autotune", "Autotuner"]
