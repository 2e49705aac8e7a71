"""``GradientNoise``: how much ranks' differences disagree, and the learning rate of local steps that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, Muon, Optimizer

from ...base.errors import UsageError
from ...planning.local_steps import divergence

__all__ = ["NOTHING", "GradientNoise", "norm_of"]

NOTHING = -1.0
"""Reported instead of a number by a rank that has none."""

_MEMORY = 0.9
_MOMENTS = {"exp_avg_sq", "exp_inf", "state2"}
"""States with second moments: of torch's and torchao's optimizers, Adamax, and bitsandbytes'."""


class GradientNoise:
    """The noise of one rank's gradients compared with what all ranks agree on, measured from syncs.

    Adam divides each update by the root of its gradients' second moments. One rank's gradients are noisier than the
    average over ranks, so a rank's own updates are smaller: up to the root of the number of ranks, where noise
    dominates. ``scaled`` undoes that, so that a learning rate means the same with local steps and without.

    At each sync ranks report the norms of an earlier sync: of their own differences, and of the average. Only these
    reports count, so all ranks compute the same factor. The host waits for no device.

    Attributes:
        local_steps: steps taken since local steps began.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all measurements: the factor is 1 until there are new ones."""
        self.local_steps = 0
        self._own = self._shared = 0.0  # decayed sums of squared norms: of one rank's differences, and of the average
        self._measured: list[Callable[[], float]] | None = None

    def report(self, joined: bool) -> list[float]:
        """Return this rank's numbers for the next sync; ``joined``: this rank makes no more steps."""
        measured, self._measured = self._measured, None
        return [NOTHING] * 2 if measured is None or joined else [norm() for norm in measured]

    def arrive(
        self, own: Tensor | float | None, averages: Iterable[Tensor], reports: Sequence[Sequence[float]]
    ) -> float:
        """Note a sync that has arrived; return the divergence in the reports.

        Args:
            own: norm of this rank's differences; None: nothing needs it.
            averages: over ranks.
            reports: what each rank reported, by rank.

        Returns:
            See ``divergence``; NaN where a rank had nothing to report.
        """
        if own is None or not reports:
            self._measured = None
            return math.nan
        self._measured = [_read_later(own), _read_later(norm_of(averages))]
        norms = [norm for norm, *_ in reports]
        # The average has the same bits on all ranks, but its norm need not: the first rank's value counts.
        shared = reports[0][1]
        if NOTHING in norms or not math.isfinite(shared + sum(norms)):
            return math.nan
        self._own = _MEMORY * self._own + statistics.fmean(norm * norm for norm in norms)
        self._shared = _MEMORY * self._shared + shared * shared
        return divergence(shared, norms)

    def factor(self, ranks: int, every: int, betas: Sequence[float], averaged: int) -> float:
        """Return the root of Adam's second moment of one rank's gradients over that of the average.

        Args:
            ranks: number of them.
            every: local steps in a difference.
            betas: of the wrapped optimizer.
            averaged: steps with averaged gradients, whose second moments fade with the second beta.
        """
        if ranks < 2 or not self._own:
            return 1.0
        momentum, memory = (float(beta) for beta in betas[:2])
        noise = max(0.0, self._own - self._shared) * ranks / (ranks - 1)
        signal = max(0.0, self._own - noise)
        # In a difference momentum has averaged over steps: the signal of each adds up, their noise only partly.
        gain = every - 2 * momentum * (1 - momentum**every) / (1 - momentum**2)
        noise *= every * every / gain
        ratio = (signal + noise) / (signal + noise / ranks)
        steps = self.local_steps
        share = (1 - memory**steps) / (1 - memory ** (steps + averaged)) if averaged and memory < 1 else 1.0
        return math.sqrt(1 + (ratio - 1) * share)

    @contextmanager
    def scaled(
        self,
        optimizer: Optimizer,
        groups: Iterable[dict[str, Any]],
        fixed: float | None,
        ranks: int,
        every: int,
        averaged: int,
    ) -> Iterator[None]:
        """Scale the learning rates of groups within the block; decoupled weight decay stays.

        Args:
            optimizer: the wrapped one.
            groups: its groups.
            fixed: factor of all groups; None: ``factor`` where second moments divide a group's updates, else 1.
            ranks, every, averaged: see ``factor``.

        Raises:
            UsageError: the block has changed a scaled learning rate.
        """
        kept: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for group in groups:
            factor = fixed
            if factor is None:
                scales = _divides_by_moments(optimizer, group)
                factor = self.factor(ranks, every, group["betas"], averaged) if scales else 1.0
            if factor != 1 and "lr" in group:
                values: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay") if key in group}
                group["lr"] = group["lr"] * factor
                if group.get("decoupled_weight_decay", isinstance(optimizer, (Adafactor, Muon))):
                    group["weight_decay"] = group["weight_decay"] / factor
                kept.append((group, values, {key: group[key] for key in values}))
        try:
            yield
            if any(group[key] is not value for group, _, scaled in kept for key, value in scaled.items()):
                raise UsageError(
                    "a hook of the optimizer changed the learning rate or weight decay during step(), where local "
                    "steps scale it; call the scheduler after step(), or set inner_lr_scale=1.0"
                )
        finally:
            for group, values, _ in kept:
                group.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next factors depend on."""
        measured = None if self._measured is None else [norm() for norm in self._measured]
        return {"local_steps": self.local_steps, "own": self._own, "shared": self._shared, "measured": measured}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue with what ``state_dict`` returned."""
        self.local_steps, self._own, self._shared = saved["local_steps"], saved["own"], saved["shared"]
        self._measured = None if saved["measured"] is None else [*map(_read_later, saved["measured"])]


def _divides_by_moments(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether the optimizer divides a group's updates by roots of second moments, as Adam and its kin do."""
    states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
    return len(group.get("betas", ())) > 1 and any(not _MOMENTS.isdisjoint(state) for state in states)


def _read_later(norm: Tensor | float) -> Callable[[], float]:
    """Return a function that returns the norm, and waits for no work of a device that comes after it."""
    if not isinstance(norm, Tensor) or not norm.is_cuda:
        value = float(norm)
        return lambda: value
    host = torch.empty((), dtype=norm.dtype, device="cpu", pin_memory=True).copy_(norm, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(norm.device))

    def read() -> float:
        copied.synchronize()
        return float(host)

    return read


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all together, () f64, on their device, without a wait of the host."""
    each = [*tensors]
    if not each:  # all parameters are frozen
        return torch.zeros((), dtype=torch.float64, device="cpu")
    norm: Tensor = torch.stack([norm.double() for norm in torch._foreach_norm(each)]).norm()
    return norm
