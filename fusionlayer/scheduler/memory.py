"""The state of each parameter's gradient between steps: above all the residual of error feedback."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..base.plan import Bucket
from ..codecs import Codec, PackedPart, PackedResidual, Part, StatefulCodec, TensorState

FEEDBACK_BITS = (32, 8)
"""The bits that an element of a residual may take between two steps."""


class Memory:
    """One state for each parameter, by its name and not by its bucket, because plans may change.

    After any number of steps, the sent values plus the residuals of all ranks equal the given gradients, up to f32
    rounding. With 8 bits they do so up to the rounding of each step's residuals, whose mean is zero.

    Args:
        bits: the bits of each element of a residual between two steps: 32 or 8.

    Attributes:
        bits: as given.
    """

    def __init__(self, bits: int = 32) -> None:
        if bits not in FEEDBACK_BITS:
            raise ConfigError(f"feedback_bits={bits!r}; expected 32 or 8")
        self.bits = bits
        # Guards which names all these tables have: lanes call ``remember`` while a thread of backward lays out another
        # bucket. One thread at a time uses a name's state: its bucket's lane between launch and end, else the training
        # thread.
        self._lock = threading.Lock()
        # The state before the present step of the tensors that ``remember`` was called for. Residuals keep their memory
        # from step to step.
        self._before: dict[str, dict[str, Any]] = {}
        self._spare: dict[str, Tensor] = {}
        self._states: dict[str, TensorState] = {}
        # With 8 bits: the residuals, instead of those of the states; views of a bucket's residuals, if there is one.
        self._packed: dict[str, PackedPart] = {}
        self._codecs: dict[str, StatefulCodec] = {}

    def state(self, name: str, numel: int, device: torch.device, *, feedback: bool = True) -> TensorState:
        """Return the state of a tensor that is encoded by itself, with a residual of its own: (numel,) f32, or packed.

        It continues the state that the name had before. Without ``feedback`` it has no residual.
        """
        state = self._known(name, numel)
        state.tensors.update({key: kept.to(device) for key, kept in state.tensors.items()})
        if not feedback:
            return replace(state, residual=None, packed=None)
        if self.bits == 8:
            whole = PackedResidual([(0, numel)], numel, device)
            self._adopt(name, whole.parts[0])
            state.packed = whole
            return state
        if state.residual is None:
            state.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        else:
            # A view of a bucket's flat residual would keep all of that alive.
            shared = state.residual.untyped_storage().nbytes() > state.residual.nbytes
            state.residual = _handed_over(state.residual).to(device, copy=shared)
        return state

    def flat(self, bucket: Bucket, device: torch.device) -> Tensor | PackedResidual:
        """Return the residual of a whole bucket, (numel,) f32 or packed; the states of its tensors become views of it.

        It starts with the residuals that the tensors had before.
        """
        if self.bits == 8:
            packed = PackedResidual(((slot.offset, slot.numel) for slot in bucket.slots), bucket.numel, device)
            for slot, part in zip(bucket.slots, packed.parts, strict=True):
                self._known(slot.name, slot.numel).packed = None
                self._adopt(slot.name, part)
            return packed
        flat = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for slot in bucket.slots:
            state = self._known(slot.name, slot.numel)
            view = flat[slot.offset : slot.offset + slot.numel]
            if state.residual is not None:
                view.copy_(_handed_over(state.residual))
            state.residual = view
        return flat

    def parts(self, bucket: Bucket, shapes: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
        """Return the tensors of a bucket with their states; ``shapes`` are in the bucket's order."""
        return tuple(
            Part(slot.name, shape, slot.offset, self._known(slot.name, slot.numel))
            for slot, shape in zip(bucket.slots, shapes, strict=True)
        )

    def attach(self, names: Iterable[str], codec: Codec) -> None:
        """Keep the numbers of ``codec`` under ``names``, the tensors that it encodes together from now on.

        A codec that is new here starts from the numbers kept under these names before; of several, the largest.
        """
        names = tuple(names)
        with self._lock:
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
        """Multiply the residuals of ``names`` by ``factor``; call it on the training thread, when none is in flight."""
        for name in names:
            state = self._states.get(name)
            if state is not None and state.residual is not None:
                state.residual.mul_(factor)
            packed = self._packed.get(name)
            if packed is not None:
                packed.scales.mul_(factor)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies by parameter name: residuals, and the codecs' "tensors" and "numbers".

        "residuals" are those in f32, (numel,). "packed" are those in 8 bits: "codes", (numel,) int8, and "scales", one
        for each 128 codes.
        """
        states = self._states.items()
        return {
            "residuals": {name: state.residual.clone() for name, state in states if state.residual is not None},
            "packed": {name: vars(part.to(None)) for name, part in self._packed.items()},
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

    def remember(self, names: Iterable[str]) -> None:
        """Keep the present state of these tensors, for ``state_before``, until ``forget``.

        Each tensor is encoded by one thread at a time, which calls it before it does so.
        """
        for name in names:
            with self._lock:
                state, packed, spare = (
                    self._states.get(name, TensorState()),
                    self._packed.get(name),
                    self._spare.get(name),
                )
                numbers = self._numbers(name)
            before: dict[str, Any] = {"numbers": numbers, "own": dict(state.numbers)}
            if state.tensors:
                before["tensors"] = {key: kept.clone() for key, kept in state.tensors.items()}
            if packed is not None:
                before["packed"] = vars(packed.to(None))
            elif state.residual is not None:
                if spare is None or spare.numel() != state.residual.numel():
                    spare = torch.empty_like(state.residual)
                before["residuals"] = spare.copy_(state.residual)
            with self._lock:
                self._before[name] = before
                if spare is not None:
                    self._spare[name] = spare

    def restore(self, names: Iterable[str]) -> None:
        """Restore the state of these tensors that ``remember`` has kept; no thread encodes them any more.

        A codec's numbers for a whole bucket stay unchanged.
        """
        for name in names:
            before = self._before.pop(name)
            state, packed = self._states.get(name), self._packed.get(name)
            if packed is not None:
                packed.copy_(PackedPart(**before["packed"])) if "packed" in before else packed.zero_()
            if state is None:
                continue
            if state.residual is not None:
                state.residual.copy_(before["residuals"]) if "residuals" in before else state.residual.zero_()
            # In place: buffers and codecs hold references to these objects.
            state.tensors.clear()
            state.tensors.update(before.get("tensors", {}))
            state.numbers.clear()
            state.numbers.update(before["own"])

    def forget(self) -> None:
        """End a step whose results count: ``state_before`` would return the present state."""
        self._before.clear()

    def state_before(self) -> dict[str, dict[str, Any]]:
        """Return the result of ``state_dict`` from before the present step; no thread may encode any more."""
        state = self.state_dict()
        for name, before in self._before.items():
            for key, kept in state.items():
                kept.pop(name, None)
                if key in before and (key != "numbers" or before[key]):
                    kept[name] = before[key].clone() if key == "residuals" else before[key]
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``, of a memory of 32 or 8 bits.

        Parameters that it does not name start again; other keys are ignored.
        """
        residuals, tensors, numbers = (saved.get(key, {}) for key in ("residuals", "tensors", "numbers"))
        packed = {name: PackedPart(**kept) for name, kept in saved.get("packed", {}).items()}
        if self.bits == 8:
            packed.update({name: PackedPart.of(_copy(kept, None)) for name, kept in residuals.items()})
            residuals = {}
        else:
            residuals = {**residuals, **{name: kept.expanded() for name, kept in packed.items()}}
            packed = {}
        for name in self._states.keys() | residuals.keys() | packed.keys() | tensors.keys() | numbers.keys():
            state = self._states.setdefault(name, TensorState())
            # In place: buffers and codecs hold references to these objects.
            state.numbers.clear()
            state.numbers.update(numbers.get(name, {}))
            here = self._packed[name].codes if name in self._packed else state.residual
            device = None if here is None else here.device
            state.tensors.clear()
            state.tensors.update({key: _copy(kept, device) for key, kept in tensors.get(name, {}).items()})
            if name in self._packed:
                self._packed[name].copy_(packed[name]) if name in packed else self._packed[name].zero_()
            elif name in packed:
                self._packed[name] = packed[name].to(None)
            elif state.residual is None:
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
        with self._lock:
            state = self._states.setdefault(name, TensorState())
            kept = self._packed[name].codes if name in self._packed else state.residual
        if kept is not None and kept.numel() != numel:
            raise ConfigError(
                f"error feedback of {name!r} has {kept.numel()} elements, its gradient {numel}; load the state of the "
                "same model, or none"
            )
        return state

    def _adopt(self, name: str, part: PackedPart) -> None:
        """Keep the residual of ``name`` in ``part`` from now on, with the values that it had before."""
        with self._lock:
            old, self._packed[name] = self._packed.get(name), part
        if old is not None:
            part.copy_(PackedPart(_handed_over(old.codes), _handed_over(old.scales)))


def merged_residuals(parts: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the sums of the residuals in ``parts``, which ``Memory.state_dict`` has made, by name; in f32."""
    sums: dict[str, Tensor] = {}
    for part in parts:
        packed = {name: PackedPart(**kept).expanded() for name, kept in part.get("packed", {}).items()}
        for name, value in {**part.get("residuals", {}), **packed}.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _handed_over(old: Tensor) -> Tensor:
    """Return ``old``, which the current stream copies; its memory is freed before that, to the stream that made it."""
    if old.is_cuda:
        old.record_stream(torch.cuda.current_stream(old.device))
    return old


def _copy(saved: Tensor, device: torch.device | None) -> Tensor:
    return saved.detach().to(device or saved.device, torch.float32, copy=True).reshape(-1)
