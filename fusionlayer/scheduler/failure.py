"""Errors of the communication thread, told in the user's terms: step, bucket, tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FusionLayerError, TransportError
from ..plan import Bucket
from ..transport import Transport

__all__ = ["located"]


@contextmanager
def located(step: int, index: int, bucket: Bucket, transport: Transport) -> Iterator[None]:
    """Say in every error of the body which step, bucket and tensors it belongs to."""
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
