"""Requests for operations by name: the argument lists of Horovod, and how a request reaches this rank's session."""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..base.deprecations import deprecated
from ..base.errors import ConfigError, FusionLayerError, UsageError, require
from ..base.seeds import derive_seed
from ..codecs import Codec, Part, PartsCodec
from ..collectives import Scaling, reduce_flat
from ..coordination import Reduce
from ..coordination.operation import DTYPES
from ..transport import Transport
from .basics import HorovodInternalError, session
from .process_sets import ProcessSet, global_process_set, number_of

P = ParamSpec("P")
Request = TypeVar("Request")
Result = TypeVar("Result")


class _Unsupported(ConfigError, NotImplementedError):
    """A request that Adasum cannot serve. ``NotImplementedError`` is a ``RuntimeError``, as in Horovod."""


class ReduceOp(enum.IntEnum):
    """How a reduction combines the values of all ranks."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def choose_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """Return the reduction that ``op`` and the deprecated ``average`` mean together."""
    if average is not None:
        if op is not None:
            raise ConfigError("got both op and average; average is deprecated: give op alone")
        # Below the user: the operation, the function that names its arguments, and choose_op.
        deprecated("average", "give op=hvd.Average or op=hvd.Sum", frames=3)
        return ReduceOp.Average if average else ReduceOp.Sum
    if op is None:
        return ReduceOp.Average
    try:
        return ReduceOp(op)
    except ValueError:
        raise ConfigError(f"op={op!r}; expected hvd.{', hvd.'.join(ReduceOp.__members__)}") from None


def taking(arguments: Callable[P, Request]) -> Callable[[Callable[[Request], Result]], Callable[P, Result]]:
    """Return a decorator. The function it decorates takes a request; the result takes the parameters of ``arguments``.

    A call hands its arguments to ``arguments``, which makes the request of them.
    """

    def decorate(function: Callable[[Request], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(arguments(*args, **kwargs))

        signature = inspect.signature(arguments)
        returned = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        call.__annotations__ = {**arguments.__annotations__, "return": returned}
        return call

    return decorate


def all_of(results: Any) -> Any:
    """Return the results of a group of operations, unchanged."""
    return results


def first_of(results: Sequence[Tensor]) -> Tensor:
    """Return the result of an operation on one tensor."""
    return results[0]


@dataclass(frozen=True)
class Reduction:
    """The request of an allreduce or a reducescatter.

    Attributes:
        tensors: this rank's inputs.
        name: the name by which ranks match the operation, if it has one.
        op: how values are reduced.
        prescale: factor before the reduction.
        postscale: factor after it.
        process_set: ranks that take part.
        deliver: makes the caller's result from the list of results, or from the tensors that are reduced in place.
        codec: encodes the values; None: values are sent uncompressed.
    """

    tensors: Sequence[Tensor]
    name: str | None
    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet
    deliver: Callable[[Any], Any] = all_of
    codec: Codec | None = None

    def __post_init__(self) -> None:
        for key, factor in (("prescale", self.prescale), ("postscale", self.postscale)):
            if not isinstance(factor, (float, Real)):
                raise ConfigError(f"{key}_factor={factor!r}; expected a number")

    def begin_allreduce(self, *, in_place: bool = False, at_once: bool = False) -> int:
        """Ask for the allreduce; return the handle."""
        text, reduce, deliver = self.op.name, None, self.deliver
        if self.op is ReduceOp.Adasum:
            reduce = self._adasum()
        elif self.codec is not None:
            text, reduce = self._by_codec(self.codec)
        if in_place:
            given = self.deliver(self.tensors)
            deliver = lambda _: given  # noqa: E731
        return self._submit("allreduce", text, in_place=in_place, reduce=reduce, deliver=deliver, at_once=at_once)

    def begin_reducescatter(self) -> int:
        """Ask for the reducescatter; return the handle."""
        if self.op is ReduceOp.Adasum:
            raise _Unsupported("reducescatter with op=Adasum; Adasum needs whole tensors: use allreduce")
        if not all(checked("reducescatter", tensor).dim() for tensor in self.tensors):
            raise ConfigError("reducescatter of a scalar; give a tensor with a first dimension to be cut")
        return self._submit("reducescatter", self.op.name, deliver=self.deliver)

    def _submit(self, kind: str, op: str, **how: Any) -> int:
        how |= {"name": self.name, "prescale": self.prescale, "postscale": self.postscale}
        return submit(kind, self.tensors, op=op, process_set=self.process_set, **how)

    def _adasum(self) -> Reduce:
        from .adasum import all_reduce

        size = session().size
        everyone = number_of(self.process_set) == number_of(global_process_set)
        if not everyone or size & (size - 1) or self.codec is not None:
            raise _Unsupported(
                f"op=Adasum over {size} ranks of {self.process_set}; it needs all ranks, a number of ranks that is "
                "a power of two, and no codec: use Average"
            )

        def reduce(x: Tensor, transport: Transport, scaling: Scaling) -> None:
            scaling.scale_before_(x)
            all_reduce(x.view(-1), transport)
            scaling.scale_after_(x)

        return reduce

    def _by_codec(self, codec: Codec) -> tuple[str, Reduce]:
        """Return a text for the sum or average by a codec, which ranks compare, and the function that makes it."""
        if self.op not in (ReduceOp.Average, ReduceOp.Sum):
            raise ConfigError(
                f"op={self.op.name} with the codec {codec}; codecs carry sums: use Average, Sum, or no compression"
            )
        return f"{self.op.name} by {codec}", partial(_reduce_by, codec)


# ---- argument lists of Horovod; ``taking`` gives them to all variants of an operation -------------------------------


def allreduce_of(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Reduction:
    """Return the request of an allreduce."""
    chosen = choose_op(op, average)
    return Reduction([tensor], name, chosen, prescale_factor, postscale_factor, process_set, first_of)


def grouped_allreduce_of(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Reduction:
    """Return the request of allreduces that are sent together."""
    given = several("grouped_allreduce", tensors)
    return Reduction(given, name, choose_op(op, average), prescale_factor, postscale_factor, process_set)


def reducescatter_of(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Reduction:
    """Return the request of a reducescatter."""
    return Reduction([tensor], name, choose_op(op), prescale_factor, postscale_factor, process_set, first_of)


def grouped_reducescatter_of(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Reduction:
    """Return the request of several reducescatters."""
    given = several("grouped_reducescatter", tensors)
    return Reduction(given, name, choose_op(op), prescale_factor, postscale_factor, process_set)


def several(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a list of the tensors that a call was given; raise ``ConfigError`` if it was given something else."""
    require(tensors, Iterable, call, "a list of tensors")
    return list(tensors)


# ---- on the way to the session ---------------------------------------------------------------------------------------


def _reduce_by(codec: Codec, x: Tensor, transport: Transport, scaling: Scaling) -> None:
    if isinstance(codec, PartsCodec):
        codec = codec.for_parts([Part("", tuple(x.shape))])
    reduce_flat(x.view(-1), codec, transport, scaling, seed=derive_seed(transport.sequence))


def submit(
    kind: str,
    tensors: Sequence[Tensor] = (),
    *,
    in_place: bool = False,
    process_set: ProcessSet = global_process_set,
    **how: Any,
) -> int:
    """Ask this rank's session for an operation; return the handle."""
    name = how.get("name")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{kind} with name={name!r}; expected one text, also for several tensors")
    given = [checked(kind, tensor) for tensor in tensors]
    if len({tensor.device for tensor in given}) > 1:
        raise ConfigError(f"{kind} of tensors on several devices; give one group for each device")
    if kind != "barrier" and not given:
        raise ConfigError(f"{kind} of no tensors; give at least one")
    if not how.get("at_once") and not (in_place and kind == "broadcast"):  # a broadcast takes nothing of its results
        how["check"] = _unchanged(kind, name, tensors, in_place)
        if in_place:
            given = [x.data if _has_version(x) else x for x in given]  # results must not count as changes
    try:
        return session().submit(kind, given, given if in_place else None, process_set=number_of(process_set), **how)
    except ConfigError:
        raise
    except FusionLayerError as error:
        raise HorovodInternalError.of(error) from None


def _unchanged(kind: str, name: str | None, tensors: Sequence[Tensor], in_place: bool) -> Callable[[], None] | None:
    """Return a function that raises ``UsageError`` if one of ``tensors`` was changed since; None if it cannot be
    determined."""
    seen = [(weakref.ref(x), x._version) for x in tensors if _has_version(x)]
    what = kind if name is None else f"{kind} {name!r}"

    def check() -> None:
        for found, version in seen:
            x = found()
            if x is not None and x._version != version:
                raise UsageError(
                    f"a tensor of shape {tuple(x.shape)} was changed between {what} and its result; change it after "
                    "hvd.synchronize(handle), or give the operation a copy"
                )
        if in_place:
            increment_version([x for found, _ in seen if (x := found()) is not None])

    return check if seen else None


def _has_version(x: Tensor) -> bool:
    """Return whether only changes of ``x`` change its version; views share a version with their memory."""
    return not (x.is_inference() or x._is_view())


def checked(kind: str, tensor: Tensor) -> Tensor:
    """Return ``tensor`` detached; raise ``ConfigError`` if no operation can take it."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        what = f"{tensor.layout} tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"{kind} of a {what}; expected a dense tensor of one of: {types}")
    return tensor.detach() if tensor.requires_grad else tensor
