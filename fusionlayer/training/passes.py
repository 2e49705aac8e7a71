"""Counts backward passes until a gradient is complete and may be sent."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..base.errors import UsageError
from .backward_end import at_end_of_backward


class BackwardPasses:
    """How often backward has still to compute each gradient before it is complete.

    Usually that is once per backward pass. A layer in several reentrant checkpoints gets a part of its gradient from
    each, so one pass computes it several times.

    Args:
        parameters: those with hooks.
        per_step: backward passes that accumulate a gradient before it is sent.

    Attributes:
        per_step: as given.
        left: by parameter, how often its gradient has still to be computed. The hooks count it down.
        whole: by parameter, what ``left`` begins with: ``left.update(whole)`` begins to count again.
    """

    def __init__(self, parameters: Iterable[Tensor], per_step: int) -> None:
        self.per_step = per_step
        self.whole = dict.fromkeys(parameters, per_step)
        self.left = dict(self.whole)
        self._parts: dict[Tensor, int] = {}
        self._computed: dict[Tensor, int] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Count those too from now on."""
        new = dict.fromkeys(parameters, self.per_step)
        self.whole.update(new)
        self.left.update(new)

    def set_per_step(self, per_step: int) -> None:
        """Accumulate over another number of passes, and begin to count again."""
        self.per_step = per_step
        self.whole = {parameter: per_step * self._parts.get(parameter, 1) for parameter in self.whole}
        self.left.update(self.whole)

    def has_begun(self, parameter: Tensor) -> bool:
        """Return whether a gradient has been accumulated in part."""
        return parameter in self.left and self.left[parameter] < self.whole[parameter]

    def note_part(self, parameter: Tensor) -> bool:
        """Note that the running backward computes this gradient; return whether it does so more often than known."""
        if not self._computed:
            at_end_of_backward(self._computed.clear)
        times = self._computed[parameter] = self._computed.get(parameter, 0) + 1
        return times > self._parts.get(parameter, 1)

    def add_part(self, parameter: Tensor) -> None:
        """Expect this gradient as often in each backward as the running one has computed it."""
        self._parts[parameter] = self._computed[parameter]
        self.whole[parameter] = self.per_step * self._parts[parameter]
        self.left[parameter] += self.per_step


def computed_again(name: str) -> UsageError:
    """Return the error for a gradient to which the same backward has added after it was sent."""
    return UsageError(
        f"gradient {name!r} was computed again after it had been sent: its layer is used in several reentrant "
        "checkpoints of one backward; give torch.utils.checkpoint.checkpoint use_reentrant=False"
    )


def computed_too_often(name: str, per_step: int) -> UsageError:
    """Return the error for a gradient to which more backwards have added than a step has."""
    return UsageError(
        f"gradient {name!r} was computed more than {per_step} times before step(); call step() or synchronize() after "
        "each backward, or raise backward_passes_per_step to accumulate gradients locally"
    )
