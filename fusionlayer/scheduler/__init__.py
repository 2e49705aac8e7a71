"""The scheduler: decides when gradients are sent, and in which buckets."""

from ..collectives import Scaling
from .ahead import AheadBuffer
from .buffers import located
from .engine import Engine
from .lanes import LANES, Job, Worker
from .memory import Memory
from .plan_controller import PlanController, StepSeconds

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
