"""``SendsItsOwn``: the base class of optimizers that choose the values to send instead of gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import ConfigError
from ..codecs import Codec

Sent = tuple[str, str | Codec | None]
"""A description of the values that an optimizer sends, and their codec; None: ``DistributedOptimizer``'s codec."""


@runtime_checkable
class SendsItsOwn(Protocol):
    """An optimizer that chooses the values that ``DistributedOptimizer`` sends for it.

    Every optimizer of torch that has these two methods does so; it need not inherit from this class. ``OneBitAdam`` is
    one. This one clips large values, on each rank before the average:

        class Clipped(torch.optim.SGD):
            def sends(self):
                return "clipped gradients", None

            def exchanged(self, parameter):
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1, 1)

    The averages of all ranks are in ``parameter.grad`` when ``step`` is called. In a job of one rank nothing is sent:
    ``exchanged`` is not called, and ``step`` finds unchanged gradients. A rank that waits in ``hvd.join`` does not
    ask either: it sends zeros.

    Such an optimizer takes ``op=Average`` alone and no ``plan``, and ``sync`` only if it also follows syncs.
    """

    def sends(self) -> Sent:
        """Return what is sent from the next step on, in words, and its codec: a name, a codec or None.

        None means the codec that ``DistributedOptimizer`` was given. Other arguments that belong to that codec, such as
        ``algorithm``, do not count for a codec named here.

        It is called before the first gradient of each step. If the answer has changed, that step makes a new plan, on
        which ranks agree. So the answer must depend only on values that are the same on all ranks, such as the number
        of steps.
        """

    def exchanged(self, parameter: Tensor) -> object:
        """Put the sent value of ``parameter`` into ``parameter.grad``: in place, or as another dense tensor.

        It is called once in each step for each parameter, when backward has accumulated the gradient. If backward has
        made none on this rank, it is called at the end: ``parameter.grad`` is None then, and if it stays so, zeros
        are sent.
        """


@runtime_checkable
class FollowsSyncs(Protocol):
    """An optimizer that takes more from a sync of local steps than new parameters. ``OneBitAdam`` is one.

    Attributes:
        averages_first: steps before the first local one, in which it needs averaged gradients.
    """

    averages_first: int

    def begins(self, parameters: Collection[Tensor]) -> object:
        """Note that local steps of these parameters begin, from values that all ranks have."""

    def leaves(self, parameters: Collection[Tensor]) -> object:
        """Note that the progress of these parameters since their last sync is sent now."""

    def synced(self, differences: Mapping[Tensor, tuple[Tensor, Tensor]]) -> object:
        """Take in what has arrived, before it sets the parameters.

        Args:
            differences: by parameter: the value of all ranks after the last sync, and the average over ranks of the
                differences that were sent. Both have the parameter's number of elements, and belong to the caller.
        """


def sent_by(optimizer: Optimizer) -> Sent | None:
    """Return what an optimizer says that it sends; None: gradients are sent uncompressed."""
    if not isinstance(optimizer, SendsItsOwn):
        return None
    sent: object = optimizer.sends()
    if not (isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], str)):
        raise ConfigError(
            f"{type(optimizer).__name__}.sends() returned {sent!r}; expected what it sends in words, and a codec or "
            'None, such as ("momentum", "int8")'
        )
    return sent
