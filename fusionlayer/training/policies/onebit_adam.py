"""``OneBitAdam``: Adam that sends momentum instead of gradients once its variance has settled (Tang et al., 2021)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...base.errors import ConfigError, UsageError
from ...codecs import Codec
from ..sends import Sent

_logger = logging.getLogger("fusionlayer")


class OneBitAdam(Optimizer):
    """AdamW for ``freeze_step`` steps of each parameter; then variances are frozen, and momenta are sent compressed.

        optimizer = fl.OneBitAdam(model.parameters(), lr=3e-4, freeze_step=100)
        optimizer = fl.DistributedOptimizer(optimizer, model, codec="onebit")

    This is algorithm 1 of 1-bit Adam. During the warm-up, gradients are sent uncompressed, and each step is that of
    ``torch.optim.AdamW``. Then each rank adds its gradient to the momentum that all ranks have. The ranks average these
    momenta by the codec of ``DistributedOptimizer``, and the average is the new momentum. A step divides it by the
    square root of the frozen variance. Any codec works; its error feedback keeps its loss.

    Adam itself cannot have its gradients compressed so coarsely: the variance would be that of the codec's errors.

    With ``sync=fl.Local.overlapped(every=4)`` ranks take local steps once the variance is frozen. A sync derives the
    momentum from the move since the last average: 0/1 Adam (Lu et al., ICLR 2023) without its updates of the variance.

    It sends its own values by the hook ``SendsItsOwn``, which any other optimizer may have too.

    Both moments have AdamW's bias correction, that of the variance as of its freeze, unless ``bias_correction`` is
    False. An element whose gradient was zero in all steps until then has no variance, and does not move any more.

    Steps are counted for each parameter, from its first gradient that is not zero. The warm-up of all parameters lasts
    until each parameter that is in use by then has taken ``freeze_step`` steps. A layer that is unfrozen late in the
    warm-up extends it; a layer that is first used after the warm-up is refused.

    ``param.grad`` holds averaged momentum after ``synchronize``, once the variance is frozen: clip gradients before
    that, or not at all. ``GradScaler`` is refused; bf16 needs none. A rank that waits in ``hvd.join`` sends zeros
    instead of its momentum, which shrinks the average: give all ranks equally many batches.

    The divisor of the momentum is made once, when the variance is frozen, and kept: 4 bytes for each f32 parameter,
        which a step would need temporarily anyway.

    Args:
        params: see ``torch.optim.AdamW``.
        lr: learning rate.
        betas: the betas of momentum and variance.
        eps: added to the square root of the variance.
        weight_decay: decoupled, as in AdamW.
        freeze_step: least number of warm-up steps of each parameter; at least the learning rate's own warm-up.
        warmup_codec: name or codec of the gradients in the warm-up. "raw" is the paper's; "int4" sends far less.
        bias_correction: the bias correction of both moments. The paper's algorithm 1, and DeepSpeed's optimizer of this
            name, have none.

    Raises:
        ConfigError: an argument is out of range.
        UsageError: from ``step``, if a parameter is first used after the variances were frozen, or a ``GradScaler``
            calls it. With ``sync``, if local steps begin before the end of the warm-up.
    """

    updates_separately = True  # for ``overlap_forward``: no update depends on another parameter's

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int,
        warmup_codec: str | Codec = "raw",
        bias_correction: bool = True,
    ) -> None:
        if type(freeze_step) is not int or freeze_step < 1:
            raise ConfigError(f"OneBitAdam: freeze_step={freeze_step!r}; expected a whole number of steps, at least 1")
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise ConfigError(f"OneBitAdam: lr={lr}, eps={eps}, weight_decay={weight_decay}; expected 0 or more")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"OneBitAdam: betas={betas}; expected two numbers from 0 on and below 1")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, {**options, "freeze_step": freeze_step})
        self.warmup_codec = warmup_codec
        self._begin()

    def _begin(self) -> None:
        # Asks GradScaler to pass itself to step().
        self._step_supports_amp_scaling = True
        # Parameters of the step in flight whose gradients, or momenta, were averaged over ranks.
        self._exchanged: set[Tensor] = set()
        self._settled = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "warmup_codec": self.warmup_codec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the saved state, in a new optimizer, as for copies and pickles, or in this one."""
        super().__setstate__(state)
        self._begin()
        for group in self.__dict__["param_groups"]:
            # Saved by versions that counted steps for all parameters together.
            steps = group.pop("steps", None)
            for parameter in group["params"]:
                if steps is not None and (kept := self.state.get(parameter)) and "step" not in kept:
                    kept.update(step=steps, variance_step=min(steps, group["freeze_step"]))

    @property
    def frozen(self) -> bool:
        """Whether the variances are frozen, so that the next step sends momenta."""
        counts = self._counts()
        return self._settled or bool(counts) and min(counts) >= self.averages_first

    @property
    def averages_first(self) -> int:
        """Steps before the first local one: those of the warm-up."""
        return int(self.__dict__["param_groups"][0]["freeze_step"])

    def sends(self) -> Sent:
        """Return that gradients are sent by ``warmup_codec`` at first, and then momentum by the codec that was
        given."""
        self._settle()
        return ("momentum instead of gradients", None) if self._settled else ("gradients", self.warmup_codec)

    def _counts(self) -> list[int]:
        """Return how many steps each parameter in use has taken."""
        return [state["step"] for state in self.state.values() if state.get("step")]

    @torch.no_grad()
    def _settle(self) -> None:
        """Freeze the variances if all have seen enough steps.

        Only between steps: with ``overlap_forward`` a step ends with the update of its last bucket.
        """
        if self._settled:
            return
        enough, counts = self.averages_first, self._counts()
        self._settled = self.frozen
        if self._settled:
            for state in self.state.values():
                # Let elements without a variance rest: momentum divided by infinity is zero.
                if state.get("step"):
                    state["exp_avg_sq"].masked_fill_(state["exp_avg_sq"] == 0, math.inf)
        elif counts and max(counts) == enough:
            _logger.info(
                "OneBitAdam: %d of %d parameters in use have taken fewer than freeze_step=%d steps, one of them %d; "
                "the warm-up goes on until all have taken as many",
                *(sum(count < enough for count in counts), len(counts), enough, min(counts)),
            )

    @torch.no_grad()
    def exchanged(self, parameter: Tensor) -> Tensor | None:
        """Return what this rank sends for ``parameter`` instead of its gradient, in the gradient's memory.

        That is the momentum with the gradient added, or without a gradient the decayed momentum. While the optimizer
        warms up it is the gradient itself.
        """
        self._exchanged.add(parameter)
        if self._settled:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _refuse_sparse(parameter.grad)
            if self.state.get(parameter, {}).get("step"):
                parameter.grad.lerp_(self.state[parameter]["exp_avg"], self._beta1_of(parameter))
        return parameter.grad

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step, by gradients or, where ``exchanged`` has made it, by the averaged momentum.

        Raises:
            UsageError: a parameter is first used after the variances were frozen, or a ``GradScaler`` calls.
        """
        if hasattr(self, "found_inf"):
            raise UsageError(
                "OneBitAdam was called by a GradScaler, whose factor would spoil the momentum of earlier steps; train "
                "in bf16, or without the scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With overlap_forward these are copies of the groups, as they were at the step, with the parameters of a part.
        groups = self.param_groups
        # If gradients were exchanged, sends() has decided for the whole step.
        if not any(p in self._exchanged for group in groups for p in group["params"]):
            self._settle()
        for group in groups:
            self._step_group(group)
            self._exchanged.difference_update(group["params"])
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None and self._is_used(p, p.grad)]
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in parameters]
        for state in states:
            state["step"] += 1
        momenta, variances = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        gradients = [p.grad for p in parameters]
        if not self._settled:
            for state in states:
                state["variance_step"] = state["step"]
            torch._foreach_lerp_(momenta, gradients, 1 - beta1)
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, value=1 - beta2)
        else:
            self._take_momenta(parameters, momenta, 1 - beta1)
        rate = float(group["lr"])
        widths = self._widths(group, parameters)
        if rate * group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        # Groups that early versions saved have no such key.
        corrects = group.get("bias_correction", True)
        rates = [rate / (1 - beta1 ** state["step"]) if corrects else rate for state in states]
        torch._foreach_addcdiv_(parameters, momenta, widths, scalars=[-each for each in rates])
        if self._settled:
            self._note_local_step(states, rates, 1 - rate * group["weight_decay"], beta1)

    def _is_used(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether a step moves ``parameter``: not before its first gradient that is not zero.

        If ranks exchange gradients, a parameter that no rank has used may get zeros.
        """
        _refuse_sparse(gradient)
        state = self.state[parameter]
        if not state:
            zeros = (torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2))
            state.update(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=0, variance_step=0)
        # Each rank would check its own part of a sharded tensor; counting zeros is the lesser evil.
        if state["step"] or (type(gradient) is Tensor and not gradient.any()):
            return bool(state["step"])
        if self._settled:
            raise UsageError(
                f"OneBitAdam has no variance of a parameter of shape {tuple(parameter.shape)}, which is first used "
                f"after the warm-up of freeze_step={self.averages_first} steps: use or unfreeze it earlier, or raise "
                "freeze_step"
            )
        return True

    def _take_momenta(self, parameters: list[Tensor], momenta: list[Tensor], share: float) -> None:
        """Set ``momenta`` to the received ones; add a ``share`` of each gradient that was not sent as momentum."""
        arrived = [p in self._exchanged for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]  # all have one
        if all(arrived):
            torch._foreach_copy_(momenta, gradients)
        elif not any(arrived):
            torch._foreach_lerp_(momenta, gradients, share)
        else:
            for gradient, momentum, whole in zip(gradients, momenta, arrived, strict=True):
                momentum.lerp_(gradient, 1.0 if whole else share)

    def _note_local_step(self, states: list[dict[str, Any]], rates: list[float], decay: float, beta1: float) -> None:
        """Note the factors by which a local step multiplies momentum and parameters, and the remaining part of a sent
        momentum.

        Only where local steps have begun: without ``sync`` nothing is counted.
        """
        for state, rate in zip(states, rates, strict=True):
            if "rates" in state:
                state["rates"] = state["rates"] * decay + rate
                state["decay"] *= decay
                if "left" in state:
                    state["left"]["kept"] *= beta1

    def begins(self, parameters: Iterable[Tensor]) -> None:
        """Count local steps from here on, whatever was counted before.

        Raises:
            UsageError: the warm-up has not ended, so each rank would make a variance of its own.
        """
        counts = self._counts()
        if counts and not self.frozen:
            raise UsageError(
                f"OneBitAdam: local steps begin while a parameter has taken {min(counts)} of freeze_step="
                f"{self.averages_first} steps of warm-up; give fl.Local a larger after, or use all parameters earlier"
            )
        for parameter in parameters:
            state = self.state.get(parameter)
            if state:
                state.update(rates=0.0, decay=1.0)
                state.pop("left", None)

    @torch.no_grad()
    def leaves(self, parameters: Iterable[Tensor]) -> None:
        """Keep the present momentum as far as ``synced`` needs it, and count local steps from 0."""
        for parameter in parameters:
            state = self.state[parameter]
            if state.get("rates"):
                sent = {key: state[key] for key in ("rates", "decay")}
                state.update(rates=0.0, decay=1.0, left={**sent, "kept": 1.0, "exp_avg": state["exp_avg"].clone()})

    @torch.no_grad()
    def synced(self, differences: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
        """Set each momentum to the one that led, in all steps until it was sent, to the average over ranks.

        Later additions of a rank to its momentum stay.
        """
        for group in self.param_groups:
            parameters = [p for p in group["params"] if self.state.get(p, {}).get("step")]
            if not parameters:
                continue
            widths = self._widths(group, parameters)
            for parameter, width in zip(parameters, widths, strict=True):
                left = self.state[parameter].pop("left", None) if parameter in differences else None
                if left is None:
                    continue
                anchor, difference = (x.view_as(width) for x in differences[parameter])
                momentum = (difference - (1 - left["decay"]) * anchor).mul_(width).div_(left["rates"])
                momentum.masked_fill_(width == math.inf, 0)  # an element without a variance rests
                if left["kept"] != 1:
                    momentum.sub_(left["exp_avg"]).mul_(left["kept"]).add_(self.state[parameter]["exp_avg"])
                self.state[parameter]["exp_avg"].copy_(momentum)

    def _widths(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Return the divisors of momenta. For a frozen variance it is made once, and kept next to it."""
        beta2, eps = group["betas"][1], group["eps"]
        corrected = group.get("bias_correction", True)
        states = [self.state[p] for p in parameters]
        variances, steps = ([state[key] for state in states] for key in ("exp_avg_sq", "variance_step"))
        # A checkpoint may have other tensors, or other values into these.
        made_of = [(beta2, eps, n, corrected, v._version) for v, n in zip(variances, steps, strict=True)]
        kept = self.__dict__.setdefault("_kept_widths", {})
        known = [kept.get(p, (None, None, None)) for p in parameters]
        if all(k[0] is v and k[1] == m for k, v, m in zip(known, variances, made_of, strict=True)):
            return [k[2] for k in known]
        widths = list(torch._foreach_sqrt(variances))
        if corrected:
            torch._foreach_div_(widths, [math.sqrt(1 - beta2**n) for n in steps])
        torch._foreach_add_(widths, eps)
        if self._settled:
            kept.update(zip(parameters, zip(variances, made_of, widths, strict=True), strict=True))
        return widths

    def _beta1_of(self, parameter: Tensor) -> float:
        groups = self.__dict__["param_groups"]
        kept, group_of = self.__dict__.get("_group_of", (None, {}))
        if kept is not groups or parameter not in group_of:  # load_state_dict() makes new groups
            group_of = {p: group for group in groups for p in group["params"]}
            self.__dict__["_group_of"] = (groups, group_of)
        return float(group_of[parameter]["betas"][0])


def _refuse_sparse(gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise UsageError("OneBitAdam got a sparse gradient; use a dense layer, such as Embedding(sparse=False)")
