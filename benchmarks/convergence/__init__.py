"""What compression does to training: final validation loss of every method beside that of f32, over several seeds."""

from .settings import Settings, methods
from .summary import BASELINE, summarize

__all__ = ["BASELINE", "Settings", "methods", "summarize"]
