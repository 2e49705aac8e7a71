"""The state of each parameter's gradient between steps: above all the residual of error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec, Part, StatefulCodec, TensorState
from ..errors import ConfigError
from ..plan import Bucket

__all__ = ["Memory"]


class Memory:
    """One state for each parameter, by its name and not by its bucket, because plans may change.

    After any number of steps, the sent values plus the residuals of all ranks equal the given gradients, up to f32
    rounding.
    """

    def __init__(self) -> None:
        self._states: dict[str, TensorState] = {}
        self._codecs: dict[str, StatefulCodec] = {}

    def state(self, name: str, numel: int, device: torch.device, *, feedback: bool = True) -> TensorState:
        """Return the state of a tensor that is encoded by itself, with a residual (numel,) f32 of its own.

        It continues the state that the name had before. Without ``feedback`` it has no residual.

        Raises:
            ConfigError: the residual that was loaded for this name is of a tensor of another size.
        """
        state = self._known(name, numel)
        state.tensors.update({key: kept.to(device) for key, kept in state.tensors.items()})
        if not feedback:
            return replace(state, residual=None)
        if state.residual is None:
            state.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        else:
            # A view of a bucket's flat residual would keep all of that alive.
            shared = state.residual.untyped_storage().nbytes() > state.residual.nbytes
            state.residual = _handed_over(state.residual).to(device, copy=shared)
        return state

    def flat(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Return the residual of a whole bucket, (numel,) f32; the states of its tensors become views of it.

        It starts with the residuals that the tensors had before.

        Raises:
            ConfigError: the residual that was loaded for a name is of a tensor of another size.
        """
        flat = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for slot in bucket.slots:
            state = self._known(slot.name, slot.numel)
            view = flat[slot.offset : slot.offset + slot.numel]
            if state.residual is not None:
                view.copy_(_handed_over(state.residual))
            state.residual = view
        return flat

    def parts(self, bucket: Bucket, shapes: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
        """Return the tensors of a bucket with their states; ``shapes`` are in the bucket's order.

        Raises:
            ConfigError: the residual that was loaded for a name is of a tensor of another size.
        """
        return tuple(
            Part(slot.name, shape, slot.offset, self._known(slot.name, slot.numel))
            for slot, shape in zip(bucket.slots, shapes, strict=True)
        )

    def attach(self, names: Iterable[str], codec: Codec) -> None:
        """Keep the numbers of ``codec`` under ``names``, the tensors that it encodes together from now on.

        A codec that is new here starts from the numbers kept under these names before; of several, the largest.
        """
        names = tuple(names)
        numbers = self._largest_numbers(names)
        new = all(codec is not other for other in self._codecs.values())
        for name in names:
            self._codecs.pop(name, None)
        if not isinstance(codec, StatefulCodec):
            return
        self._codecs.update(dict.fromkeys(names, codec))
        if numbers and new:
            codec.restore(numbers)

    def decay(self, factor: float, names: Iterable[str]) -> None:
        """Multiply the residuals of ``names`` by ``factor``; call it on the training thread, when none is under way."""
        for name in names:
            state = self._states.get(name)
            if state is not None and state.residual is not None:
                state.residual.mul_(factor)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies by parameter name: "residuals", (numel,) f32, and the codecs' "tensors" and "numbers"."""
        states = self._states.items()
        return {
            "residuals": {name: state.residual.clone() for name, state in states if state.residual is not None},
            "tensors": {
                name: {key: kept.clone() for key, kept in state.tensors.items()}
                for name, state in states
                if state.tensors
            },
            "numbers": {
                name: numbers
                for name in sorted(self._states.keys() | self._codecs.keys())
                if (numbers := self._numbers(name))
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. Parameters that it does not name start anew; other keys are ignored."""
        residuals, tensors, numbers = (saved.get(key, {}) for key in ("residuals", "tensors", "numbers"))
        for name in self._states.keys() | residuals.keys() | tensors.keys() | numbers.keys():
            state = self._states.setdefault(name, TensorState())
            # In place: buffers and codecs hold references to these objects.
            state.numbers.clear()
            state.numbers.update(numbers.get(name, {}))
            device = state.residual.device if state.residual is not None else None
            state.tensors.clear()
            state.tensors.update({key: _copy(kept, device) for key, kept in tensors.get(name, {}).items()})
            if state.residual is None:
                state.residual = _copy(residuals[name], None) if name in residuals else None
            elif name in residuals:
                state.residual.copy_(residuals[name].reshape(-1))
            else:
                state.residual.zero_()
        for codec in {id(codec): codec for codec in self._codecs.values()}.values():
            names = [name for name, other in self._codecs.items() if other is codec]
            codec.restore({})
            codec.restore(self._largest_numbers(names))

    def _numbers(self, name: str) -> dict[str, float]:
        state, codec = self._states.get(name), self._codecs.get(name)
        return {**(state.numbers if state else {}), **(codec.kept() if codec else {})}

    def _largest_numbers(self, names: Iterable[str]) -> dict[str, float]:
        largest: dict[str, float] = {}
        for name in names:
            for key, value in self._numbers(name).items():
                largest[key] = max(value, largest.get(key, value))
        return largest

    def _known(self, name: str, numel: int) -> TensorState:
        state = self._states.setdefault(name, TensorState())
        if state.residual is not None and state.residual.numel() != numel:
            raise ConfigError(
                f"error feedback of {name!r} has {state.residual.numel()} elements, its gradient {numel}; load the "
                "state of the same model, or none"
            )
        return state


def _handed_over(old: Tensor) -> Tensor:
    """Return ``old``, which the current stream copies; its memory is freed before that, to the stream that made it."""
    if old.is_cuda:
        old.record_stream(torch.cuda.current_stream(old.device))
    return old


def _copy(saved: Tensor, device: torch.device | None) -> Tensor:
    return saved.detach().to(device or saved.device, torch.float32, copy=True).reshape(-1)
