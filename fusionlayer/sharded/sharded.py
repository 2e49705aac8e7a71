"""``ShardedOptimizer``: each rank owns a part of the states, reduces its gradients, and sends its updated weights."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from numbers import Real
from operator import is_
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import context
from ..base.errors import ConfigError, UsageError, kind_of, require
from ..base.seeds import derive_seed
from ..codecs import Codec
from ..collectives import halves
from ..functional import Group, make_codec
from ..native.wire import DTYPE_CODES
from ..training.averaging import claim, refuse_averaged
from ..training.live import refuse_twice
from ..training.replicas import Replicas, check_interval
from ..training.weights import Weights, both_ways
from ..transport import Transport

__all__ = ["ShardedOptimizer"]

_UNSCALE = GradScaler._unscale_grads_.__name__
_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch whose update of an element depends on other elements."""


class ShardedOptimizer(Optimizer):
    """An optimizer that is sharded over ranks: ZeRO stage 1, compressed both ways (SDP4Bit; ZeRO++).

    ``step`` averages each gradient on the rank that owns it. Each rank updates its part of the weights in f32, and
    gathers all weights. The model keeps whole weights, the same bits on every rank; a rank holds states for 1 / size of
    them. All ranks begin with rank 0's weights.

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
            flat parts in f32.
        weights: "raw"; "delta" for differences that lose no bit; "qwd" for int4 differences; "qw" or "qwz" for weights
            in int4 or int8; a codec; or "sdp4bit", "zero++" or "qsdp", which set ``gradients`` too.
        gradients: name or codec of the gradients; "tlq_hs" is a two-level codec.
        group: process group or transport; None means all ranks.
        check_replicas: compare the model's weights over ranks in the first step, and then a part of them in each, so
            that a difference is found within this many. False: never; None takes the configured number.
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
        weights: str | Codec | None = None,
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
            raise ConfigError(f"{name} looks at whole tensors, of which a rank has parts; use one such as AdamW or SGD")
        weights, gradients = both_ways(weights, gradients, default=None)
        context.refuse_elastic(
            "ShardedOptimizer", "without a rank its shards would be missing; use DistributedOptimizer"
        )
        self._fl_transport = context.transport(group)
        self._fl_weights = Weights.of(weights)
        self._fl_gradients = make_codec("raw" if gradients is None else gradients, {}).bare
        if self._fl_gradients.needs_feedback:
            raise ConfigError(
                f"gradients={self._fl_gradients}: a sparse codec, or one of low rank, needs error feedback, which a "
                "ShardedOptimizer does not have; use DistributedOptimizer"
            )
        self._fl_step = 0
        try:
            super().__init__(params, {})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"ShardedOptimizer got parameters that torch's optimizers refuse ({error}); expected "
                "model.parameters(), or groups such as [{'params': [...]}]"
            ) from None
        for each in self.param_groups:
            _check(each["params"])
        named = {
            f"group {i}, parameter {j}": p
            for i, each in enumerate(self.param_groups)
            for j, p in enumerate(each["params"])
        }
        names = {p: name for name, p in named.items()}
        refuse_twice(names)
        refuse_averaged(names, group=group)
        claim(self)
        align = max(self._fl_weights.codec.block, self._fl_gradients.block)
        alone = self._fl_transport.size == 1 and check_replicas is None
        every = 0 if alone else check_interval(check_replicas)
        self._fl_agree(align, name, every)
        self._fl_parts = [_FlatShard(each["params"], self._fl_transport, align) for each in self.param_groups]
        mains = [
            {**{key: value for key, value in each.items() if key != "params"}, "params": [part.main]}
            for each, part in zip(self.param_groups, self._fl_parts, strict=True)
        ]
        self._fl_inner = optimizer_class(mains, **defaults)
        self.defaults = self._fl_inner.defaults
        for each, inner in zip(self.param_groups, self._fl_inner.param_groups, strict=True):
            each.update({key: value for key, value in inner.items() if key != "params"})
        self._fl_named = names
        # Of each gradient of the last backward, its address and its version then: a change since is refused.
        self._fl_seen: dict[Tensor, tuple[int, int]] = {}
        self._fl_reduced = False
        self._fl_late: Tensor | None = None
        self._fl_unused: frozenset[Tensor] = frozenset()
        self._fl_stand_in: Tensor | None = None
        note = partial(_note, weakref.ref(self))
        hooks = [p.register_post_accumulate_grad_hook(note) for p in named.values()]
        weakref.finalize(self, _remove, hooks).atexit = False
        replicas = Replicas(named, broadcast=True, every=every)
        self._fl_check = replicas.check(self._fl_at_once, optimizer=self) if self._fl_transport.size > 1 else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being made; raise ``UsageError`` later, when all parts have been cut."""
        if hasattr(self, "_fl_inner"):
            raise UsageError("a ShardedOptimizer takes all parameters when it is made; make a new one")
        super().add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. GradScaler looks for overflows through them: all ranks find those of any rank."""
        # Only GradScaler's look is a call of all ranks, so it is known by the method that looks.
        caller = sys._getframe(1)
        if caller.f_code.co_name == _UNSCALE and isinstance(caller.f_locals.get("self"), GradScaler):
            self._fl_agree_on_overflow()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget what ``clip_grad_norm_`` has averaged."""
        self._fl_forget_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Average the gradients, scale the averages to a norm of at most ``max_norm``, and return their norm before.

        The norm is that of all averaged gradients, the same on all ranks. All ranks call this right before ``step``;
        with GradScaler, after ``unscale_``. ``p.grad`` stays this rank's own.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.

        Raises:
            UsageError: a gradient was changed after backward; a group has other parameters.
        """
        require(max_norm, Real, "clip_grad_norm_", "the largest norm, a number")
        self._fl_look()
        self._fl_reduce()
        self._fl_reduced, self._fl_late = True, None
        own = [part.main.grad for part in self._fl_parts if part.main.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(each, norm_type).to(own[0].device) for each in own])
        every = self._fl_find_unused(torch.linalg.vector_norm(norms, norm_type))
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
        """Average gradients, update this rank's part of the weights, and gather all; return what ``closure`` returns.

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
        transport = self._fl_transport
        self._fl_look()
        if self._fl_check is not None:
            self._fl_check.begin()
            self._fl_check.settle()
        if not self._fl_reduced:
            self._fl_reduce()
            self._fl_find_unused(torch.zeros((), device=self._fl_parts[0].main.device))
        elif self._fl_late is not None:
            raise UsageError(
                f"{self._fl_named[self._fl_late]}: backward has changed its gradient after clip_grad_norm_(); call "
                "clip_grad_norm_() after the last backward of a step, and zero_grad() of the optimizer between steps"
            )
        for outer, inner in zip(self.param_groups, self._fl_inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        held = [part.hold(self._fl_unused, self._fl_inner.state.get(part.main, {})) for part in self._fl_parts]
        try:
            self._fl_inner.step()
        finally:
            _put_back(pair for pairs in held for pair in pairs)
        for index, part in enumerate(self._fl_parts):
            seed = derive_seed(self._fl_step, index, 1)
            copies = [] if self._fl_weights.codec.lossless else part.copies(self._fl_unused)
            part.gather(self._fl_weights, transport, seed)
            _put_back(copies)
        self._fl_step += 1
        self._fl_forget_gradients()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states and f32 weights. Every rank saves its own part, next to the model's weights.

        A job of the same size that loads both continues bit for bit. The state has one key, which names the rank, so
        that ``torch.distributed.checkpoint`` keeps the parts of all ranks.

        Raises:
            TransportError: a step has failed; the last state that was saved before it is the one to go on from.
        """
        self._fl_transport.drain()
        inner = self._fl_inner if self._fl_step else _stepped_once(self._fl_inner)
        weights = [part.main.detach().clone() for part in self._fl_parts]
        return {self._fl_key: {"step": self._fl_step, "weights": weights, "optimizer": inner.state_dict()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank of a job of the same size.

        Raises:
            ConfigError: the state is of another rank, another number of ranks, or other parameters.
        """
        if self._fl_key not in state_dict:
            raise ConfigError(
                f"got the state of {', '.join(map(str, state_dict)) or 'no rank'}; this is {self._fl_key}: load what "
                "the same rank has saved, in a job of as many ranks"
            )
        state = state_dict[self._fl_key]
        lengths = [len(weights) for weights in state["weights"]]
        expected = [part.main.numel() for part in self._fl_parts]
        if lengths != expected:
            raise ConfigError(f"got the state of parts of {lengths} elements, expected {expected}: of the same model")
        self._fl_step = state["step"]
        for part, weights in zip(self._fl_parts, state["weights"], strict=True):
            part.main.copy_(weights)
        self._fl_inner.load_state_dict(state["optimizer"] if self._fl_step else {**state["optimizer"], "state": {}})
        for outer, inner in zip(self.param_groups, self._fl_inner.param_groups, strict=True):
            outer.update({key: value for key, value in inner.items() if key != "params"})

    def _fl_reduce(self) -> None:
        for index, part in enumerate(self._fl_parts):
            part.reduce(self._fl_gradients, self._fl_transport, derive_seed(self._fl_step, index, 0))

    def _fl_find_unused(self, norm: Tensor) -> Tensor:
        """Find the parameters that no rank uses in this step, and return each rank's ``norm``, in one message.

        Each rank sends four bytes for its norm, and one bit per parameter. Only a rank that lacks a gradient, or clips,
        reads the message, so on a device the other ranks do not wait for it.
        """
        used = np.array([p.requires_grad and p.grad is not None for p in self._fl_named])
        mine = torch.cat([norm.view(1).view(torch.uint8), torch.from_numpy(np.packbits(used)).to(norm.device)])
        every = mine.view(1, -1)
        transport = self._fl_transport
        if transport.size > 1:
            every = mine.new_empty(transport.size, mine.numel())
            with transport.doing("which parameters ranks have used"):
                transport.all_gather(mine, every)
        if used.all():
            self._fl_unused = frozenset()
        else:
            bits = np.bitwise_or.reduce(every[:, 4:].cpu().numpy(), axis=0)
            self._fl_unused = frozenset(compress(self._fl_named, np.unpackbits(bits, count=len(used)) == 0))
        return every[:, :4].flatten().view(torch.float32)

    def _fl_forget_gradients(self) -> None:
        self._fl_seen.clear()
        self._fl_reduced = False
        self._fl_late = None

    def _fl_look(self) -> None:
        """Raise ``UsageError`` if groups have other parameters, or a gradient was changed after backward."""
        if len(self.param_groups) != len(self._fl_parts):
            raise UsageError(
                f"a ShardedOptimizer has {len(self.param_groups)} groups, not the {len(self._fl_parts)} that it was "
                "made with; its parts are cut already: make a new one"
            )
        for each, part in zip(self.param_groups, self._fl_parts, strict=True):
            part.check(each["params"])
        first = self._fl_parts[0].params[0]
        if first.grad is not None and first.grad is self._fl_stand_in and first not in self._fl_seen:
            first.grad = None  # GradScaler has seen it
        self._fl_stand_in = None
        for p, name in self._fl_named.items():
            address, version = self._fl_seen.get(p, (None, None))
            if p.grad is not None and p.grad.data_ptr() == address and p.grad._version != version:
                raise UsageError(
                    f"{name}, of shape {tuple(p.shape)}: its gradient was changed between backward and step. It is "
                    "this rank's own and not averaged yet, so clipping it gives another result on each number of "
                    "ranks: call clip_grad_norm_() of the ShardedOptimizer; to scale gradients, scale the loss, or "
                    "assign a new tensor to p.grad"
                )

    @torch.no_grad()
    def _fl_agree_on_overflow(self) -> None:
        """Make a gradient infinite if any rank has one that is not finite: GradScaler looks at this rank's now."""
        self._fl_look()
        first = self._fl_parts[0].params[0]
        if all(p.grad is None for p in self._fl_named):
            # GradScaler refuses a rank without gradients.
            first.grad = self._fl_stand_in = torch.zeros_like(first)
        gradients = [p.grad for p in self._fl_named if p.grad is not None]
        found = torch.stack([each.isfinite().all().logical_not().to(gradients[0].device) for each in gradients])
        overflown = found.any().float().view(1)
        if self._fl_transport.size > 1:
            with self._fl_transport.doing("GradScaler's look for overflows"):
                self._fl_transport.all_reduce(overflown)
        if overflown.item():
            gradients[0].fill_(float("inf"))
        # Unscaling leaves versions as they are, but the line above does not.
        for p, (address, _) in self._fl_seen.items():
            if p.grad is not None:
                self._fl_seen[p] = address, p.grad._version

    @property
    def _fl_key(self) -> str:
        return f"rank {self._fl_transport.rank} of {self._fl_transport.size}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``UsageError``: a copy would share the transport, and its weights would not be the model's."""
        raise UsageError("a ShardedOptimizer cannot be copied or pickled; copy or save its state_dict()")

    def _fl_at_once(self, work: Callable[[Transport], None]) -> Callable[[], None]:
        work(self._fl_transport)
        return lambda: None

    def _fl_agree(self, align: int, name: str, every: int) -> None:
        shapes = [[(tuple(p.shape), str(p.dtype)) for p in each["params"]] for each in self.param_groups]
        if self._fl_transport.size > 1:
            facts = (shapes, align, name, self._fl_weights, self._fl_gradients, f"check_replicas={every}")
            self._fl_transport.agree("parameters or codecs of a ShardedOptimizer", *facts)


def _note(optimizer: weakref.ref[ShardedOptimizer], p: Tensor) -> None:
    """Note the gradient that backward has just accumulated. The hook of every parameter."""
    self = optimizer()
    if self is not None and p.grad is not None:
        self._fl_seen[p] = p.grad.data_ptr(), p.grad._version
        if self._fl_reduced:
            self._fl_late = p


def _put_back(held: Iterable[tuple[Tensor, Tensor]]) -> None:
    for place, values in held:
        place.copy_(values)


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _FlatShard:
    """The parameters of one group as one flat tensor, and this rank's part of it in f32."""

    def __init__(self, params: list[nn.Parameter], transport: Transport, align: int) -> None:
        first = params[0]
        total = sum(p.numel() for p in params)
        chunk = max(1, -(-total // (transport.size * align))) * align
        self.params = list(params)  # a copy: a user may append to the group's list
        self._replica = torch.zeros(transport.size * chunk, dtype=first.dtype, device=first.device)
        self._views = [
            piece.view_as(p)
            for piece, p in zip(self._replica[:total].split([p.numel() for p in params]), params, strict=True)
        ]
        for p, view in zip(params, self._views, strict=True):
            view.copy_(p.detach())
            p.data = view
        if transport.size > 1:
            transport.broadcast(self._replica, 0)
        self._rows = self._replica.view(transport.size, chunk)
        self._own = self._rows[transport.rank]
        self._filled = min(max(0, total - transport.rank * chunk), chunk)
        self._gradients = torch.zeros_like(self._replica)
        self._gradient_views = [
            piece.view_as(p)
            for piece, p in zip(self._gradients[:total].split([p.numel() for p in params]), params, strict=True)
        ]
        self.main = nn.Parameter(self._own.float().clone())

    def reduce(self, codec: Codec, transport: Transport, seed: int) -> None:
        """Give ``main`` the average of its gradients over ranks: summed and divided in f32, whatever their type."""
        pairs = [(to, p.grad) for to, p in zip(self._gradient_views, self.params, strict=True) if p.grad is not None]
        if len(pairs) < len(self.params):
            self._gradients.zero_()
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])
        rows = self._gradients.view_as(self._rows)
        own = torch.empty_like(self.main)
        if transport.size > 1:
            halves.reduce_scatter(rows, own, codec, transport, seed=seed)
            own.mul_(1 / transport.size)
        else:
            own.copy_(rows[0])
        own[self._filled :] = 0  # a codec's rotation spreads values into the padding, which belongs to no parameter
        self.main.grad = own

    def gather(self, weights: Weights, transport: Transport, seed: int) -> None:
        """Bring every rank's copy of the weights to the owners' weights, as far as the codec keeps them."""
        if transport.size == 1:
            self._own.copy_(self.main)
        elif weights.differences:
            main = self.main.detach()
            if weights.codec.lossless:
                main = main.to(self._replica.dtype)
            halves.all_gather(main, self._rows, weights.codec, transport, seed=seed, differences=True)
        else:
            mine = self.main.to(self._replica.dtype)
            halves.all_gather(mine, self._rows, weights.codec, transport, seed=seed)

    def hold(self, unused: Collection[Tensor], state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's elements of ``unused`` parameters in ``main`` and its ``state``: views, and their copies.

        ``main`` and its gradient become zero there until ``_put_back``. Otherwise weight decay, or a lossy codec's
        noise, would add to states that the inner step creates.
        """
        assert self.main.grad is not None
        main, held = self.main.detach(), []
        states = [
            x for x in state.values() if isinstance(x, Tensor) and x.shape == main.shape and x.is_floating_point()
        ]
        for p, view in zip(self.params, self._views, strict=True):
            first = view.storage_offset() - self._own.storage_offset()
            place = slice(max(0, first), max(0, first + p.numel()))
            if p in unused and main[place].numel():
                held += [(x[place], x[place].clone()) for x in (main, *states)]
                main[place] = 0
                self.main.grad[place] = 0
        return held

    def copies(self, unused: Collection[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the model's weights of ``unused`` parameters, and their copies: a lossy gather changes the weights."""
        return [(view, view.clone()) for p, view in zip(self.params, self._views, strict=True) if p in unused]

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise ``UsageError`` if the group has other parameters now, or their memory is no longer the flat tensor."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            raise UsageError(
                f"a group of a ShardedOptimizer has {len(params)} parameters, not the {len(self.params)} that it was "
                "made with; its parts are cut already: make a new one"
            )
        for p, view in zip(self.params, self._views, strict=True):
            if p.data_ptr() != view.data_ptr():
                raise UsageError(
                    f"a parameter of shape {tuple(p.shape)} was given other memory after the ShardedOptimizer was "
                    "made, as model.to(...) does; do that first"
                )


def _stepped_once(optimizer: Optimizer) -> Optimizer:
    """Return a copy of ``optimizer`` that has states. A checkpoint needs tensors of the right shapes to load into."""
    stepped = copy.deepcopy(optimizer)
    for group in stepped.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    stepped.step()
    return stepped


def _check(params: list[nn.Parameter]) -> None:
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) != 1 or next(iter(kinds))[0] not in DTYPE_CODES:
        raise ConfigError(
            f"a group of a ShardedOptimizer has parameters of {sorted(map(str, kinds)) or 'no type: there are none'}; "
            "expected one type, float32, bfloat16 or float16, on one device: make a group for each"
        )
    for p in params:
        if type(p).__name__ == "DTensor" or hasattr(p, "_sharded_param_data"):
            raise ConfigError(f"a parameter of shape {tuple(p.shape)} is sharded already; a ShardedOptimizer does that")
        if not p.requires_grad:
            raise ConfigError(f"a parameter of shape {tuple(p.shape)} needs no gradient; leave it out")
