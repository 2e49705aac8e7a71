"""How far a distributed optimizer's step has come."""

from __future__ import annotations

from enum import Enum, auto


class StepState(Enum):
    """How far an optimizer's step has come.

    A failure is not a state: the engine keeps the error, and every later call raises it again.
    """

    IDLE = auto()
    """The engine has no gradient of the next step: at first, after ``step``, or while backward accumulates locally."""
    REDUCING = auto()
    """A hook has handed over the step's first gradient. Every rank has to end this step; ``zero_grad`` is refused."""
    REDUCED = auto()
    """The gradients are reduced: the end of backward, or code that read ``param_groups``, has ended the step."""
    SYNCHRONIZED = auto()
    """The user's ``synchronize`` has reduced the gradients: ``step`` warns outside ``skip_synchronize``."""
    STEPPED = auto()
    """With ``overlap_forward``: ``step`` has returned, and the next forward updates parameters as results come."""


WITH_RESULTS = (StepState.REDUCED, StepState.SYNCHRONIZED)
