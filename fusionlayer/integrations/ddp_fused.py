"""A communication hook of DDP that hands gradients to an engine, which fuses them by plans of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import context
from ..scheduler import Engine, Scaling
from ..timeline import Timeline
from .construction import GradientOptions, make_engine
from .parameters import describe, one_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["FusingHook"]


class FusingHook:
    """Averages the gradients of DDP's buckets; what travels together is the engine's plan, not DDP's buckets.

    A gradient goes to the engine when DDP's bucket with it is full; the hook waits for the engine in the last bucket of
    a step, where backward has nothing more to compute.

    Args:
        model: wrapped by DDP.
        options: how gradients are fused and encoded.

    Raises:
        ConfigError: what the options cannot be, with what they can.
    """

    def __init__(self, model: DistributedDataParallel, options: GradientOptions) -> None:
        transport = context.transport(model.process_group)
        self._names = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        self._engine: Engine = make_engine(
            options,
            describe(self._names, None),
            transport,
            one_device(self._names),
            scaling=Scaling(before=1 / transport.size),
            timeline=Timeline(context.settings().timeline, transport.rank),
            overlap_forward=False,
        )
        self._given: list[tuple[Future[Tensor], Tensor]] = []

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Take the gradients of one bucket; the future holds their averages when those of all buckets are there."""
        flat = bucket.buffer()
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
        self._given.append((future, flat))
        try:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._engine.submit(self._names[parameter], gradient)
            if bucket.is_last():
                self._engine.synchronize()
        except BaseException as error:
            # DDP must come to its own end first, which leaves the reducer in order and is queued with the last bucket.
            _raise_after_backward(error)
        if bucket.is_last() or self._engine.failure is not None:
            for done, result in self._given:
                done.set_result(result)
            self._given.clear()
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error feedback by parameter name, and the number of steps."""
        return {"step": self._engine.step, **self._engine.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` of the same rank returned."""
        self._engine.step = state["step"]
        self._engine.memory.load_state_dict(state)

    def close(self) -> None:
        """End the engine's threads; backward fails from then on."""
        self._engine.close()


def _raise_after_backward(error: BaseException) -> None:
    def fail() -> None:
        raise error

    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(fail))
