"""``Local``: the options of local steps, in which ranks train alone and average their changes now and then."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from torch.optim import Optimizer

from ...base.errors import ConfigError, require
from ...base.plan import TensorInfo
from ...functional import Average, ReduceOp
from ..sends import FollowsSyncs

Every = int | Literal["auto"]


@dataclass(frozen=True)
class Local:
    """Local steps: each rank steps by itself, and after ``every`` steps all ranks sync.

    A sync sends, from each rank, the difference between the parameters that all ranks had after the last sync (the
    anchor) and its parameters now. The outer optimizer, ``torch.optim.SGD`` with Nesterov momentum, takes the average
    of the differences as the gradient of the anchor. Then all ranks continue from the new anchor, with the same bits.

    The methods make the published variants. Each is a value of this class, and every option can be given to each.

    Args:
        every: local steps between two syncs, at least 1. "auto" begins with 1 and follows measurements: more if
            training waits for the network, fewer if ranks diverge. Not with fragments or a delay.
        lr: learning rate of the outer optimizer; 1.0 without momentum makes the new anchor the plain average.
        momentum: the momentum of the outer optimizer, from 0 to below 1.
        fragments: parts of the model that sync one after the other, each once in ``every`` steps; buckets of the fusion
            plan make them up.
        delay: local steps that a rank makes while a fragment is in flight, below ``every``; 0 waits for it.
        alpha: share of the rank's own value in the new parameter, from 0 to below 1; the anchor has the rest. So with a
            ``delay`` the progress of these steps is not lost. Above 0, ranks differ also right after a sync.
        states: the states of the wrapped optimizer to average, by their keys in ``optimizer.state``, and every how many
            syncs: ``{"exp_avg": 3}``. They are sent uncompressed. Not with fragments or a delay.
        codec: name of the codec of the differences, where ``DistributedOptimizer`` is given none; None: as configured.
        codec_options: the options of ``codec``.
        error_feedback: add the codec's loss to the next sync's difference; None: as the codec needs it.
        feedback_decay: factor on the codec's loss, above 0, at most 1. With a sparse codec and a factor below 1, error
            feedback acts as the momentum of the outer optimizer.
        carry: add a rank's progress while a fragment was in flight to the new anchor, so that none of it is lost. For a
            ``delay``, without ``alpha``.
        after: steps at the beginning in which ranks average gradients, as without local steps (post-local SGD, arXiv
            1808.07217). None: the default for the wrapped optimizer. That is 0, or ``freeze_step`` of ``OneBitAdam``.
        inner_lr_scale: factor on the wrapped optimizer's learning rate in local steps. "auto" follows the measured
            noise of gradients, from 1 to the root of the number of ranks, where the optimizer has ``betas`` as Adam
            has: its updates by noisy gradients are smaller than those by averages. 1 for other optimizers, and
            with outer ``momentum``, which was worse with a factor.

    Raises:
        ConfigError: an option has a value that cannot be used.
    """

    every: Every
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    states: Mapping[str, int] = field(default_factory=dict)
    codec: str | None = None
    codec_options: Mapping[str, Any] = field(default_factory=dict)
    error_feedback: bool | None = None
    feedback_decay: float = 1.0
    carry: bool = False
    after: int | None = None
    inner_lr_scale: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not self.adapts:
            _check_whole("every", self.every, 1, "local steps between two syncs")
        _check_number("lr", self.lr, 0 < _float(self.lr) < math.inf, "above 0")
        _check_number("momentum", self.momentum, 0 <= _float(self.momentum) < 1, "from 0 to below 1")
        _check_number("alpha", self.alpha, 0 <= _float(self.alpha) < 1, "from 0 to below 1")
        decay = self.feedback_decay
        _check_number("feedback_decay", decay, 0 < _float(decay) <= 1, "above 0, at most 1")
        _check_whole("fragments", self.fragments, 1, "parts of the model")
        _check_whole("delay", self.delay, 0, "local steps")
        if self.inner_lr_scale != "auto":
            scale = self.inner_lr_scale
            _check_number("inner_lr_scale", scale, 0 < _float(scale) < math.inf, "above 0, or 'auto'")
        if self.after is not None:
            _check_whole("after", self.after, 0, "steps in which gradients are averaged")
        if self.adapts and self.overlaps:
            raise ConfigError("sync: every='auto' with fragments or a delay; give a number of steps, such as every=30")
        if self.fragments > self.first_every:
            raise ConfigError(f"sync: fragments={self.fragments} and every={self.every}; expected at most one a step")
        if self.delay >= self.first_every:
            raise ConfigError(f"sync: delay={self.delay} and every={self.every}; expected a smaller delay")
        require(self.carry, bool, "sync: carry", "True or False")
        if self.carry and not self.delay:
            raise ConfigError("sync: carry=True without a delay, in which there is nothing to carry; give a delay too")
        if self.carry and self.alpha:
            raise ConfigError(f"sync: carry=True with alpha={self.alpha}; leave one of them out")

        require(self.states, Mapping, "sync: states", 'keys of optimizer.state with numbers, such as {"exp_avg": 3}')
        for state, syncs in self.states.items():
            _check_whole(f"states[{state!r}]", syncs, 1, "syncs")
        if self.states and self.overlaps:
            raise ConfigError("sync: states with fragments or a delay; leave one of them out")

    @classmethod
    def averaging(cls, every: Every = 4, **options: Any) -> Local:
        """Return local SGD: after ``every`` steps parameters become the average over ranks (arXiv 1805.09767)."""
        return cls(every=every, **options)

    @classmethod
    def overlapped(cls, every: int = 4, fragments: int | None = None, delay: int = 1, **options: Any) -> Local:
        """Return averaging whose messages are sent during the next step, without losing its progress (CoCoD-SGD, IJCAI
        2019).

        By default a fragment is sent after each step, so that the link is used evenly.
        """
        options = {"carry": True, **options}
        return cls(every=every, fragments=every if fragments is None else fragments, delay=delay, **options)

    @classmethod
    def diloco(cls, every: Every = 30, lr: float = 0.7, momentum: float = 0.9, **options: Any) -> Local:
        """Return DiLoCo: averages are the gradients of an outer optimizer with Nesterov momentum (arXiv 2311.08105)."""
        return cls(every=every, lr=lr, momentum=momentum, **options)

    @classmethod
    def streaming(
        cls, every: int = 30, fragments: int = 3, delay: int = 5, alpha: float = 0.5, **options: Any
    ) -> Local:
        """Return Streaming DiLoCo: fragments are sent one by one, under the next local steps (arXiv 2501.18512)."""
        return cls.diloco(every=every, fragments=fragments, delay=delay, alpha=alpha, **options)

    @classmethod
    def muloco(cls, every: Every = 30, lr: float = 0.7, momentum: float = 0.9, **options: Any) -> Local:
        """Return DiLoCo with differences of 2 bits and error feedback; made for Muon (MuLoCo, arXiv 2505.23725)."""
        options = {"error_feedback": True, **options}
        if "codec" not in options:
            options |= {"codec": "int", "codec_options": {"bits": 2}}
        return cls(every=every, lr=lr, momentum=momentum, **options)

    @classmethod
    def sparseloco(cls, every: Every = 30, lr: float = 1.0, feedback_decay: float = 0.95, **options: Any) -> Local:
        """Return SparseLoCo: the largest values of each chunk, in 2 bits, error feedback decays (arXiv 2508.15706)."""
        options = {"codec": "chunked_topk", "error_feedback": True, **options}
        return cls(every=every, lr=lr, feedback_decay=feedback_decay, **options)

    @classmethod
    def desloc(cls, every: Every = 32, states: Mapping[str, int] | None = None, **options: Any) -> Local:
        """Return DES-LOC: states of the optimizer are averaged too, each at a rate of its own (arXiv 2505.22549).

        The default ``states`` are those of Adam: the first moments every third sync, the second every sixth.
        """
        return cls(every=every, states={"exp_avg": 3, "exp_avg_sq": 6} if states is None else states, **options)

    @property
    def adapts(self) -> bool:
        """Whether the number of local steps between two syncs follows measurements."""
        return self.every == "auto"

    @property
    def first_every(self) -> int:
        """Local steps before the first sync."""
        return 1 if self.every == "auto" else self.every

    @property
    def overlaps(self) -> bool:
        """Whether parts of the model sync at other steps than the rest, or arrive later than they leave."""
        return self.fragments > 1 or self.delay > 0

    @property
    def departures(self) -> frozenset[int]:
        """The local steps of a round, from 1 on, after which a fragment leaves."""
        return frozenset((number + 1) * self.first_every // self.fragments for number in range(self.fragments))


def state_name(state: str, name: str) -> str:
    """Return the engine's name for a state of the parameter ``name``."""
    return f"{state} of {name}"


def state_tensors(sync: Local | None, tensors: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the sent states of the wrapped optimizer, by their keys; ``tensors`` describe the parameters."""
    states = () if sync is None else sync.states
    return {state: [replace(t, name=state_name(state, t.name), group=None) for t in tensors] for state in states}


def check_sync(sync: Local, optimizer: Optimizer, op: ReduceOp, plan: object, overlap_forward: object) -> Local:
    """Return ``sync`` with the ``after`` that counts, if ``DistributedOptimizer`` may take these arguments together.

    Raises:
        ConfigError: it may not.
    """
    require(sync, Local, "sync", "fusionlayer.Local(...), such as fusionlayer.Local.averaging(every=4)")
    needed = optimizer.averages_first if isinstance(optimizer, FollowsSyncs) else 0
    after = needed if sync.after is None else sync.after
    if after < needed:
        raise ConfigError(
            f"sync: after={after}, but {type(optimizer).__name__} needs averaged gradients in its first {needed} "
            "steps; leave after out"
        )
    if after and plan is not None:
        raise ConfigError(f"sync: after={after} with a plan, which is of gradients or of differences; leave it out")
    if op is not Average:
        raise ConfigError(f"op={op.name} with sync=fl.Local(...), which averages differences; leave op out")
    if overlap_forward is not None:
        raise ConfigError(
            "overlap_forward with sync=fl.Local(...): no step waits for gradients there; leave overlap_forward out"
        )
    return replace(sync, after=after)


def _float(value: object) -> float:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _check_whole(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"sync: {name}={value!r}; expected a number of {what}, at least {least}")


def _check_number(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"sync: {name}={value!r}; expected a number {expected}")
