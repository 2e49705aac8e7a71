"""The scheduler: when gradients travel, and in which buckets."""

from ..collectives import Scaling
from .ahead import AheadBuffer
from .engine import Engine
from .failure import located
from .lane import LANES
from .memory import Memory
from .plan_controller import PlanController, StepSeconds
from .worker import Job, Worker

__all__ = [
    "LANES",
    "AheadBuffer",
    "Engine",
    "Job",
    "Memory",
    "Scaling",
    "PlanController",
    "StepSeconds",
    "Worker",
    "located",
]
