"""Errors of the communication threads with the step, bucket and tensors that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FusionLayerError, TransportError
from ..plan import Bucket
from ..transport import Transport

__all__ = ["located"]


@contextmanager
def located(step: int, index: int, bucket: Bucket, transport: Transport) -> Iterator[None]:
    """Raise every error of the ``with`` block again, with step, bucket and tensors in its message."""
    try:
        yield
    except FusionLayerError as error:
        names = bucket.names
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        message = f"step {step}, bucket {index} ({shown}): {error}"
        if isinstance(error, TransportError):
            sequence = transport.sequence if error.sequence is None else error.sequence
            raise TransportError(message, error.ranks, index, names, sequence) from error
        told = type(error)(message)
        vars(told).update(vars(error))
        raise told from error
