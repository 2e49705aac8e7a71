"""``ShardedOptimizer``: each rank owns a part of the states, reduces its gradients, and sends its updated weights."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import compress
from numbers import Real
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import context
from ..base.errors import ConfigError, UsageError, kind_of, require
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..functional import Group, make_codec
from ..training.averaging import claim, refuse_averaged
from ..training.live import refuse_twice
from ..training.replicas import Replicas, check_interval
from ..training.weights import Weights, both_ways
from ..transport import Transport
from .flat_shard import FlatShard, check_parameters, copy_options, put_back, stepped_once
from .layout import Layout, state_for

_UNSCALE = GradScaler._unscale_grads_.__name__
_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch whose update of an element depends on other elements."""


class ShardedOptimizer(Optimizer):
    """An optimizer that is sharded over ranks: ZeRO stage 1, compressed both ways (SDP4Bit; ZeRO++).

    ``step`` averages each gradient on the rank that owns it. Each rank updates its part of the weights in f32, and
    gathers all weights. The model keeps whole weights, the same bits on every rank; a rank holds states for 1 / size of
    them. All ranks begin with rank 0's weights. Writes of all ranks into the model between two steps, as by
    ``load_state_dict``, count; changes by ``p.data`` leave no trace and are undone by the next step.

    A parameter that no rank uses in a step (``p.grad`` is None on all ranks) or that is frozen keeps its values and its
    optimizer state. ``optimizer_class`` sees one tensor per group, so its counters of steps, such as AdamW's ``step``,
    count every step of the group.

        optimizer = fl.ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, weights="qwd", gradients="tlq_hs", lr=1e-3
        )

    Args:
        params: parameters or groups of them, as any optimizer takes; f32, bf16 or f16, on one device. Their ``data``
            becomes a view of one tensor for each group.
        optimizer_class: an optimizer that updates each element independently of others, as Adam and SGD do. It gets
            flat f32 parts.
        weights: "raw"; "delta" for differences that lose no bit; "qwd" for int4 differences; "qw" or "qwz" for weights
            in int4 or int8; a codec; or "sdp4bit", "zero++" or "qsdp", which set ``gradients`` too.
        gradients: name or codec of the gradients; "tlq_hs" is a two-level codec.
        group: process group or transport; None means all ranks.
        check_replicas: number of steps within which a difference of the model's weights over ranks is found. The first
            step compares all, later ones a part each. False: never; None takes the configured number.
        defaults: options of ``optimizer_class``.

    Raises:
        ConfigError: an argument is invalid, or two do not fit each other; the message says what is expected.
        PlanMismatch: ranks disagree on parameters or codecs.
        ReplicaMismatch: from ``step``, weights differ over ranks; it names the first.
        TransportError: a peer failed, stopped or timed out.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        *,
        weights: str | Codec | Weights | None = None,
        gradients: str | Codec | None = None,
        group: Group = None,
        check_replicas: bool | int | None = None,
        **defaults: Any,
    ) -> None:
        if not callable(optimizer_class):
            raise ConfigError(
                f"optimizer_class: got {kind_of(optimizer_class)}; expected one such as torch.optim.AdamW"
            )
        require(params, Iterable, "ShardedOptimizer", "parameters, such as model.parameters()")
        params = list(params)  # type: ignore[assignment]
        if not params:
            raise ConfigError("ShardedOptimizer got no parameters; give those of a model, such as model.parameters()")
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        if name in _WHOLE_TENSORS:
            raise ConfigError(f"{name} looks at whole tensors, of which a rank has parts; use AdamW, SGD or fl.Muon")
        if not isinstance(weights, Weights):
            weights, gradients = both_ways(weights, gradients, default=None)
        context.refuse_elastic(
            "ShardedOptimizer", "without a rank its shards would be missing; use DistributedOptimizer"
        )
        self._transport = context.transport(group)
        self._weights = Weights.of(weights)
        self._gradients = make_codec("raw" if gradients is None else gradients, {}).bare
        if self._gradients.needs_feedback:
            raise ConfigError(
                f"gradients={self._gradients}: a sparse codec, or one of low rank, needs error feedback, which a "
                "ShardedOptimizer does not have; use DistributedOptimizer"
            )
        self._steps = 0
        try:
            super().__init__(params, {})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"ShardedOptimizer got parameters that torch's optimizers refuse ({error}); expected "
                "model.parameters(), or groups such as [{'params': [...]}]"
            ) from None
        for each in self.param_groups:
            check_parameters(each["params"])
        named = {
            f"group {i}, parameter {j}": p
            for i, each in enumerate(self.param_groups)
            for j, p in enumerate(each["params"])
        }
        names = {p: name for name, p in named.items()}
        refuse_twice(names)
        refuse_averaged(names, group=group)
        claim(self)
        align = max(self._weights.codec.block, self._gradients.block)
        alone = self._transport.size == 1 and check_replicas is None
        every = 0 if alone else check_interval(check_replicas)
        self._agree(align, name, every)
        self._parts = [self._cut(each, align) for each in self.param_groups]
        mains = [{**each, "params": [part.main]} for each, part in zip(self.param_groups, self._parts, strict=True)]
        self._inner = optimizer_class(mains, **defaults)
        self.defaults = self._inner.defaults
        copy_options(self._inner, self)
        self._named = names
        # Address and version of each gradient after the last backward: a later change is refused.
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._reduced = False
        self._late: Tensor | None = None
        self._unused: frozenset[Tensor] = frozenset()
        self._stand_in: Tensor | None = None
        note = partial(_note, weakref.ref(self))
        hooks = [p.register_post_accumulate_grad_hook(note) for p in named.values()]
        weakref.finalize(self, _remove, hooks).atexit = False
        replicas = Replicas(named, broadcast=True, every=every)
        self._check = replicas.check(self._at_once, optimizer=self) if self._transport.size > 1 else None

    def _cut(self, group: Mapping[str, Any], align: int) -> FlatShard:
        """Return the parts of a group."""
        params: list[Any] = group["params"]
        return FlatShard(params, self._transport, Layout(tuple(p.numel() for p in params), self._transport.size, align))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being made; raise ``UsageError`` later, when all parts have been cut."""
        if hasattr(self, "_inner"):
            raise UsageError("a ShardedOptimizer takes all parameters when it is made; make a new one")
        super().add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. GradScaler finds overflows through them: all ranks find those of any rank."""
        # Only GradScaler's check is a call of all ranks, so it is identified by its method.
        caller = sys._getframe(1)
        if caller.f_code.co_name == _UNSCALE and isinstance(caller.f_locals.get("self"), GradScaler):
            self._agree_on_overflow()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the averages of ``clip_grad_norm_``."""
        self._forget_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Average the gradients, scale the averages to a norm of at most ``max_norm``, and return their norm before.

        Return the norm of all averaged gradients, the same on all ranks. All ranks call this right before ``step``;
        with GradScaler, after ``unscale_``. ``p.grad`` stays this rank's own.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.

        Raises:
            UsageError: a gradient was changed after backward; a group has other parameters.
        """
        require(max_norm, Real, "clip_grad_norm_", "the largest norm, a number")
        self._look()
        self._reduce()
        self._reduced, self._late = True, None
        own = [part.main.grad for part in self._parts if part.main.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(each, norm_type).to(own[0].device) for each in own])
        every = self._find_unused(torch.linalg.vector_norm(norms, norm_type))
        norm: Tensor = torch.linalg.vector_norm(every, norm_type)
        for each in own:
            each.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(each.device))
        return norm

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average gradients, update this rank's part of the weights, and gather all; return the result of ``closure``.

        A parameter without a gradient counts as zeros if another rank has a gradient of it. If no rank has one, or if
        the parameter is frozen now, its values and its optimizer state do not change.

        Raises:
            UsageError: a group has other parameters than when the optimizer was made; a gradient was changed after
                backward, or backward has run after ``clip_grad_norm_``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        transport = self._transport
        self._look()
        if self._check is not None:
            self._check.begin()
            self._check.settle()
        if not self._reduced:
            self._reduce()
            self._find_unused(torch.zeros((), device=self._parts[0].main.device))
        elif self._late is not None:
            raise UsageError(
                f"{self._named[self._late]}: backward has changed its gradient after clip_grad_norm_(); call "
                "clip_grad_norm_() after the last backward of a step, and zero_grad() of the optimizer between steps"
            )
        copy_options(self, self._inner)
        held = [part.hold(self._unused, self._inner.state.get(part.main, {})) for part in self._parts]
        try:
            self._inner.step()
        finally:
            put_back(pair for pairs in held for pair in pairs)
        for index, part in enumerate(self._parts):
            seed = derive_seed(self._steps, index, 1)
            copies = [] if self._weights.codec.lossless else part.copies(self._unused)
            part.gather(self._weights, transport, seed)
            put_back(copies)
        self._steps += 1
        self._forget_gradients()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states and f32 weights. Every rank saves its own part, next to the model's weights.

        A job of the same size that loads both continues bit for bit. The state has one key, which names the rank, so
        that ``torch.distributed.checkpoint`` keeps the parts of all ranks.

        Raises:
            TransportError: a step has failed; the last state that was saved before it is the one to continue from.
        """
        self._transport.drain()
        inner = self._inner if self._steps else stepped_once(self._inner)
        weights = [part.weights() for part in self._parts]
        state = {"step": self._steps, "weights": weights, "optimizer": inner.state_dict()}
        owed = [part.residual.clone() for part in self._parts if part.residual is not None]
        key = f"rank {self._transport.rank} of {self._transport.size}"
        return {key: {**state, "residuals": owed} if owed else state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict`` on the same rank of a job of the same size.

        For another number of ranks, give one mapping with the states of all ranks of the saved job.

        Raises:
            ConfigError: the state belongs to another rank, to part of another job, or to other parameters.
        """
        state = state_for(state_dict, self._transport.rank, [part.layout for part in self._parts])
        lengths = [len(weights) for weights in state["weights"]]
        expected = [part.main.numel() for part in self._parts]
        if lengths != expected:
            raise ConfigError(f"got the state of parts of {lengths} elements, expected {expected}: of the same model")
        self._steps = state["step"]
        for i, (part, weights) in enumerate(zip(self._parts, state["weights"], strict=True)):
            part.load(weights)
            if part.residual is not None:
                owed = state.get("residuals")
                part.residual.copy_(owed[i]) if owed and owed[i] is not None else part.residual.zero_()
        self._inner.load_state_dict(state["optimizer"] if self._steps else {**state["optimizer"], "state": {}})
        copy_options(self._inner, self)

    def _reduce(self) -> None:
        for index, part in enumerate(self._parts):
            part.reduce(self._gradients, self._transport, derive_seed(self._steps, index, 0))

    def _find_unused(self, norm: Tensor) -> Tensor:
        """Find the parameters that no rank uses in this step, and return each rank's ``norm``, in one message.

        Each rank sends four bytes for its norm, and one bit per parameter. Only a rank that lacks a gradient, or clips,
        reads the message, so on a device the other ranks do not wait for it.
        """
        used = np.array([p.requires_grad and p.grad is not None for p in self._named])
        mine = torch.cat([norm.view(1).view(torch.uint8), torch.from_numpy(np.packbits(used)).to(norm.device)])
        every = mine.view(1, -1)
        transport = self._transport
        if transport.size > 1:
            every = mine.new_empty(transport.size, mine.numel())
            with transport.doing("which parameters ranks have used"):
                transport.all_gather(mine, every)
        if used.all():
            self._unused = frozenset()
        else:
            bits = np.bitwise_or.reduce(every[:, 4:].cpu().numpy(), axis=0)
            self._unused = frozenset(compress(self._named, np.unpackbits(bits, count=len(used)) == 0))
        return every[:, :4].flatten().view(torch.float32)

    def _forget_gradients(self) -> None:
        self._seen.clear()
        self._reduced = False
        self._late = None

    def _look(self) -> None:
        """Raise ``UsageError`` if groups have other parameters, or a gradient was changed after backward."""
        if len(self.param_groups) != len(self._parts):
            raise UsageError(
                f"a ShardedOptimizer has {len(self.param_groups)} groups, not the {len(self._parts)} that it was "
                "made with; its parts are cut already: make a new one"
            )
        for each, part in zip(self.param_groups, self._parts, strict=True):
            part.check(each["params"])
        first = self._parts[0].params[0]
        if first.grad is not None and first.grad is self._stand_in and first not in self._seen:
            first.grad = None  # GradScaler has seen it
        self._stand_in = None
        for p, name in self._named.items():
            address, version = self._seen.get(p, (None, None))
            if p.grad is not None and p.grad.data_ptr() == address and p.grad._version != version:
                raise UsageError(
                    f"{name}, of shape {tuple(p.shape)}: its gradient was changed between backward and step. It is "
                    "this rank's own and not averaged yet, so clipping it gives another result on each number of "
                    "ranks: call clip_grad_norm_() of the ShardedOptimizer; to scale gradients, scale the loss, or "
                    "assign a new tensor to p.grad"
                )

    @torch.no_grad()
    def _agree_on_overflow(self) -> None:
        """Make a gradient infinite if any rank has one that is not finite: GradScaler looks at this rank's now."""
        self._look()
        first = self._parts[0].params[0]
        if all(p.grad is None for p in self._named):
            # GradScaler refuses a rank without gradients.
            first.grad = self._stand_in = torch.zeros_like(first)
        gradients = [p.grad for p in self._named if p.grad is not None]
        found = torch.stack([each.isfinite().all().logical_not().to(gradients[0].device) for each in gradients])
        overflown = found.any().float().view(1)
        if self._transport.size > 1:
            with self._transport.doing("GradScaler's look for overflows"):
                self._transport.all_reduce(overflown)
        if overflown.item():
            gradients[0].fill_(float("inf"))
        # Unscaling leaves versions unchanged, but the line above does not.
        for p, (address, _) in self._seen.items():
            if p.grad is not None:
                self._seen[p] = address, p.grad._version

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``UsageError``: a copy would share the transport, and its weights would not be the model's."""
        raise UsageError("a ShardedOptimizer cannot be copied or pickled; copy or save its state_dict()")

    def _at_once(self, work: Callable[[Transport], None]) -> Callable[[], None]:
        work(self._transport)
        return lambda: None

    def _agree(self, align: int, name: str, every: int) -> None:
        shapes = [[(tuple(p.shape), str(p.dtype)) for p in each["params"]] for each in self.param_groups]
        if self._transport.size > 1:
            facts = (shapes, align, name, self._weights, self._gradients, f"check_replicas={every}")
            self._transport.agree("parameters or codecs of a ShardedOptimizer", *facts)


def _note(optimizer: weakref.ref[ShardedOptimizer], p: Tensor) -> None:
    """Note the gradient that backward has just accumulated. The hook of every parameter."""
    self = optimizer()
    if self is not None and p.grad is not None:
        if p.grad.is_sparse:
            raise UsageError(f"{self._named[p]}: its gradient is sparse; use a dense layer, as Embedding(sparse=False)")
        self._seen[p] = p.grad.data_ptr(), p.grad._version
        if self._reduced:
            self._late = p


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
