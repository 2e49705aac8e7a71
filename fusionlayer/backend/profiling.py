"""Shows compressed calls to torch's profilers, as torch's own backends show theirs: an event from call to end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport import Transport
from .calls import Call


def shown(name: str, inputs: Sequence[Tensor], call: Call) -> Call:
    """Begin the event ``fusionlayer:<name>`` if this thread is profiled; return ``call``, which then ends the event."""
    if not torch.autograd._profiler_enabled():
        return call
    # record_function, the public form, takes no tensors.
    event = torch.autograd._record_function_with_args_enter(f"fusionlayer:{name}", *inputs)

    def profiled(transport: Transport) -> None:
        try:
            call(transport)
        finally:
            torch.autograd._record_function_with_args_exit(event)

    return profiled
