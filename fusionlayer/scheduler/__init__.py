"""The scheduler: when gradients travel, and in what company."""

from .engine import Engine, Scaling
from .failure import located
from .memory import Memory
from .worker import Job, Worker

__all__ = ["Engine", "Job", "Memory", "Scaling", "Worker", "located"]
