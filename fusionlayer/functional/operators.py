"""Lets ``torch.compile`` keep a call in its graph, as an operator of torch, and gives results a gradient.

An operator gets the other arguments of the call as text, since graphs hold tensors, numbers and text. The text names
groups and codecs, so a graph means the same in every process.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import codecs
from ..base.errors import ConfigError
from ..codecs import Codec
from ..transport import Transport
from .arguments import ReduceOp

_OUTSIDE = "an all_to_all with splits, or over a group that is no process group of torch, has no operator"

F = TypeVar("F", bound=Callable[..., Tensor])


def operator(
    shape: Callable[..., Sequence[int]] | None, gradient: Callable[..., Tensor] | None = None
) -> Callable[[F], F]:
    """Return a decorator: compiled programs call the function as the operator ``fusionlayer::<its name>``."""

    def decorate(function: F) -> F:
        name = function.__name__
        schema = "(Tensor(a!) x, str call) -> ()" if shape is None else "(Tensor x, str call) -> Tensor"

        @torch.library.custom_op(f"fusionlayer::{name}", mutates_args=() if shape else ("x",), schema=schema)
        def kept(x: Tensor, call: str) -> Tensor | None:
            args, keywords = _read(call)
            result: Tensor = function(x, *args, **keywords)
            if shape is None:
                return None
            expected = tuple(shape(x, *args, **keywords))
            if result.shape != expected:
                raise ConfigError(
                    f"{name} in a compiled program returned {tuple(result.shape)} where the graph has {expected}; give "
                    "all ranks as many rows, or call it outside"
                )
            return result

        @kept.register_fake
        def _(x: Tensor, call: str) -> Tensor | None:
            args, keywords = _read(call)
            return None if shape is None else x.new_empty(shape(x, *args, **keywords))

        def run(tensor: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
            if not torch.compiler.is_compiling():
                return function(tensor, *args, **keywords)
            call = _written(name, args, keywords)
            if shape is not None:
                result: Tensor = kept(tensor, call)
                return result
            with torch.no_grad():
                kept(tensor.detach(), call)
            return tensor

        def eagerly(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
            return front(tensor, *args, **keywords)

        outside: Callable[..., Tensor] = torch.compiler.disable(eagerly, reason=f"fusionlayer: {_OUTSIDE}")

        @functools.wraps(function)
        def front(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
            if torch.compiler.is_compiling() and _is_outside(args, keywords):
                return outside(tensor, *args, **keywords)
            if gradient is None or not (isinstance(tensor, Tensor) and tensor.requires_grad):
                return run(tensor, args, keywords)
            result: Tensor = _Differentiable.apply(tensor, run, gradient, args, keywords)  # type: ignore[no-untyped-call]
            return result

        return front  # type: ignore[return-value]

    return decorate


def _is_outside(args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether ``torch.compile`` must leave a call out of its graph: its shapes or its group are not known."""
    given = [*args, *keywords.values()]
    return any(isinstance(each, (list, tuple, Transport)) for each in given)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, run: Any, gradient: Any, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Tensor:
        ctx.gradient, ctx.args, ctx.keywords, ctx.shape = gradient, args, keywords, tensor.shape
        result: Tensor = run(tensor, args, keywords)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.gradient(grad, ctx.shape, *ctx.args, **ctx.keywords).view(ctx.shape), None, None, None, None


def _written(call: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Return arguments as text, in operations that ``torch.compile`` follows."""
    listed = ", ".join([_item(call, each) for each in args])
    named = ", ".join([f"{key!r}: {_item(call, each)}" for key, each in keywords.items()])
    return f"[{listed}], {{{named}}}"


def _item(call: str, value: Any) -> str:
    if isinstance(value, dist.ProcessGroup):
        return f"('group', {value.group_name!r})"
    if isinstance(value, ReduceOp):
        return f"('op', {value.value!r})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join([_item(call, each) for each in value])}]"
    if value is None or isinstance(value, (str, bool, int, float)):
        return f"{value!r}"
    if isinstance(value, Codec):
        options = ", ".join([f"{key!r}: {_item(call, each)}" for key, each in value.options.items()])
        return f"('codec', ({value.name!r}, {{{options}}}))"
    raise ConfigError(f"{call} in a compiled program got {type(value).__name__}; give a process group of torch")


_parsed = functools.lru_cache(1024)(ast.literal_eval)


def _read(call: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that ``_written`` has written. A name means the group that has it now."""
    args, keywords = _parsed(call)
    return [_object(each) for each in args], {key: _object(each) for key, each in keywords.items()}


def _object(item: Any) -> Any:
    if isinstance(item, list):
        return [_object(each) for each in item]
    if not isinstance(item, tuple):
        return item
    kind, what = item
    if kind == "codec":
        return codecs.get(what[0], **what[1])
    return ReduceOp(what) if kind == "op" else dist.distributed_c10d._resolve_process_group(what)
