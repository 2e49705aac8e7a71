"""Registers with the backend which gradients a tensor of DeepSpeed holds, with each collective.

The backend sees only a flat tensor. Methods of the engine and its optimizer make these tensors, and know whose
gradients they hold. This file replaces these methods, on one engine, by functions that call them with a ``hint``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...backend import hints
from ...base.plan import Bucket, Slot, plain_name
from ...base.seeds import derive_seed
from ...codecs import PackedResidual
from ...scheduler.memory import Memory
from ...training.own_state import check_place
from .one_bit import EngineOneBitAdam
from .patches import replace
from .section import DeepSpeedSection
from .spans import GradientSpan, Spans

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3"
_MOST_ELEMENTS = 1 << 28
"""For momenta that are sent together."""


class Gradients:
    """Gives hints for the gradients of one engine, and keeps their residuals: ``engine.fusionlayer``.

    If the optimizer sends momentum instead of gradients, it averages momenta.

    Attributes:
        section: the section of the configuration.
    """

    def __init__(self, engine: Any, section: DeepSpeedSection) -> None:
        self.section = section
        self._engine = engine
        self._names = {id(p): plain_name(name) for name, p in engine.module.named_parameters()}
        self._exempt = {
            name for name in self._names.values() if any(fnmatchcase(name, each) for each in section.exempt)
        }
        self._memory = Memory(section.feedback_bits)
        self._residuals: dict[tuple[tuple[Slot, ...], int], Tensor | PackedResidual] = {}
        self._spans = Spans()
        self._numbered: tuple[int, Iterator[int]] | None = None
        self._momentum = isinstance(getattr(engine, "basic_optimizer", None), EngineOneBitAdam)
        if self._momentum:
            engine.basic_optimizer.attach(engine, self._average_momenta)
        if section.gradients.compresses:
            self._attach()

    @property
    def exempt(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are sent uncompressed."""
        return tuple(sorted(self._exempt))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error feedback, by parameter name and range of elements."""
        return {"rank": dist.get_rank(), "size": dist.get_world_size(), **self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` of the same rank returned.

        Raises:
            ConfigError: the state holds error feedback of another rank, or of another number of ranks.
        """
        check_place(state, dist.get_rank(), dist.get_world_size(), "engine.fusionlayer")
        self._memory.load_state_dict(state)

    def seeds(self) -> Iterator[int]:
        """Return numbers for the calls of this optimizer step, the same on all ranks and after a new start."""
        step = self._engine.global_steps
        if self._numbered is None or self._numbered[0] != step:
            self._numbered = step, (derive_seed(step, number) for number in count())
        return self._numbered[1]

    def _attach(self) -> None:
        optimizer, stage = self._engine.optimizer, self._engine.zero_optimization_stage()
        if stage == 0 or hasattr(optimizer, "fp32_groups_gradients"):
            replace(self._engine, "allreduce_no_retain", self._stage0)
            replace(self._engine, "allreduce_bucket", self._with_residual)
        elif stage < 3:
            replace(optimizer, "average_tensor", self._average_tensor)
            replace(optimizer, "allreduce_and_scatter", self._stage2)
            replace(optimizer, "allreduce_bucket", self._with_residual)
        else:
            replace(optimizer, f"{_STAGE3}__avg_scatter_grads", self._stage3)
            replace(optimizer, f"{_STAGE3}__avg_scatter_contiguous_grads", self._stage3_contiguous)

    # ---- ZeRO 0 and pipelines: lists of gradients --------------------------------------------------------------------

    def _stage0(self, original: Callable[..., None], bucket: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        self._spans = Spans()
        optimizer = self._engine.optimizer
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._spans.add(self._names[id(parameter)], parameter.grad)
        if hasattr(optimizer, "fp32_groups_gradients"):  # of bf16 parameters, accumulated in one buffer for each group
            for parameters, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    self._spans.add(self._names[id(parameter)], gradient)
        cut = [piece for tensor in bucket for piece in self._cut(tensor)]
        for exempt in (True, False):
            pieces = [tensor for plain, tensor in cut if plain is exempt]
            if pieces:
                with self._plain(exempt):
                    original(pieces, *args, **kwargs)

    # ---- ZeRO 0 with 1-bit Adam: momenta -----------------------------------------------------------------------------

    def _average_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Replace momenta, by name of their parameters, by their averages over ranks."""
        self._spans = Spans()
        for name, momentum in momenta.items():
            self._spans.add(name, momentum)
        group = self._engine.seq_data_parallel_group
        for exempt in (True, False):
            chosen = [momentum for name, momentum in momenta.items() if (name in self._exempt) is exempt]
            with hints.hint(plain=exempt, seeds=self.seeds()):
                for bucket in _buckets(chosen):
                    flat = torch.cat([momentum.reshape(-1) for momentum in bucket]).div_(dist.get_world_size(group))
                    with self._fed_back(bucket):
                        dist.all_reduce(flat, group=group)
                    for momentum, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                        momentum.copy_(part.view_as(momentum))

    # ---- ZeRO 1 and 2: slices of a buffer of gradients ---------------------------------------------------------------

    def _average_tensor(self, original: Callable[..., None], tensor: Tensor, dtype: torch.dtype) -> None:
        optimizer = self._engine.optimizer
        parameters = [optimizer.bit16_groups[group][index] for group, index, _ in optimizer.ipg_buckets[dtype].params]
        self._spans = Spans()
        self._spans.add_run(tensor, [(self._names[id(each)], each.numel()) for each in parameters])
        if optimizer.reduce_scatter:
            original(tensor, dtype)
        else:
            with self._whole(tensor):
                original(tensor, dtype)

    def _stage2(
        self, original: Callable[..., None], bucket: Sequence[tuple[Any, ...]], *args: Any, **kwargs: Any
    ) -> None:
        # An element holds its ranks, the tensor, and sometimes a destination; then the tensor is of one parameter.
        cut = [(plain, (ranks, piece, *rest)) for ranks, tensor, *rest in bucket for plain, piece in self._cut(tensor)]
        for exempt in (True, False):
            pieces = [element for plain, element in cut if plain is exempt]
            if pieces:
                with self._plain(exempt):
                    original(pieces, *args, **kwargs)

    # ---- ZeRO 3: whole gradients; each rank gets a part --------------------------------------------------------------

    def _stage3(
        self, original: Callable[..., list[Tensor]], parameters: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for exempt in (True, False):
            chosen = [each for each in parameters if (self._names[id(each)] in self._exempt) is exempt]
            if not chosen:
                continue
            size = dist.get_world_size(self._engine.optimizer._get_param_partition_group(chosen[0]))
            padding = padding_of([parameter.grad.numel() for parameter in chosen if parameter.grad is not None], size)
            with self._plain(exempt, padding):
                results.update(zip(map(id, chosen), original(chosen, dtype), strict=True))
        return [results[id(parameter)] for parameter in parameters]

    def _stage3_contiguous(
        self, original: Callable[..., list[Tensor]], buffer: Tensor, dtype: torch.dtype
    ) -> list[Tensor]:
        parameters = self._engine.optimizer.ipg_buckets[dtype].params
        with self._plain(any(self._names[id(each)] in self._exempt for each in parameters)):
            return original(buffer, dtype)

    # ---- all stages --------------------------------------------------------------------------------------------------

    @contextmanager
    def _plain(self, plain: bool, padding: tuple[slice, ...] = ()) -> Iterator[None]:
        # An engine whose optimizer sends momentum averages gradients only while the optimizer warms up.
        warming = self._momentum or self._engine.global_steps < self.section.warmup_steps
        with hints.hint(plain=plain or warming, padding=padding, seeds=self.seeds()):
            yield

    @contextmanager
    def _whole(self, tensor: Tensor) -> Iterator[None]:
        parts = list(self._spans.parts(tensor))
        with self._plain(any(part.name in self._exempt for part in parts)), self._fed_back([tensor]):
            yield

    def _with_residual(
        self, original: Callable[..., Tensor], bucket: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        with self._fed_back(bucket):
            return original(bucket, *args, **kwargs)

    @contextmanager
    def _fed_back(self, bucket: Sequence[Tensor]) -> Iterator[None]:
        """Give the sum of these tensors, one after the other, the residual of their elements."""
        outer = hints.current()
        if outer.plain or not self.section.error_feedback:
            yield
            return
        slots, total = self._slots(bucket)
        kept = self._residual(slots, total, bucket[0].device) if slots else None
        packed = kept if isinstance(kept, PackedResidual) else None
        residual = kept if isinstance(kept, Tensor) else None
        if packed is not None:
            residual = packed.unpack(torch.empty(total, dtype=torch.float32, device=bucket[0].device))
        with hints.hint(residual=residual, padding=outer.padding, seeds=outer.seeds):
            yield
        if packed is not None and residual is not None:
            step, rank = self._engine.global_steps, dist.get_rank()
            packed.pack(residual, derive_seed(step, rank, *slots[0].name.encode()))

    def _slots(self, bucket: Sequence[Tensor]) -> tuple[tuple[Slot, ...], int]:
        slots: list[Slot] = []
        total = 0
        for tensor in bucket:
            slots += [_slot(part, total) for part in self._spans.parts(tensor)]
            total += tensor.numel()
        return tuple(slots), total

    def _residual(self, slots: tuple[Slot, ...], total: int, device: torch.device) -> Tensor | PackedResidual:
        layout = (slots, total)
        if layout not in self._residuals:
            names = {slot.name for slot in slots}
            gradients = self.section.gradients
            form = Bucket(slots, total, "float32", gradients.codec, gradients.options)
            flat = self._memory.flat(form, device)
            kept = {
                other: residual
                for other, residual in self._residuals.items()
                if names.isdisjoint(slot.name for slot in other[0])
            }
            self._residuals = {**kept, layout: flat}
        return self._residuals[layout]

    def _cut(self, tensor: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """Yield (exempt, piece) in order: the fewest pieces of ``tensor`` with only exempt or only other gradients."""
        runs = [
            (exempt, next(parts).offset)
            for exempt, parts in groupby(self._spans.parts(tensor), key=lambda part: part.name in self._exempt)
        ]
        if len(runs) < 2:
            yield (runs[0][0] if runs else False), tensor
            return
        flat = tensor.view(-1)
        starts = [0, *(offset for _, offset in runs[1:]), flat.numel()]
        for (exempt, _), start, stop in zip(runs, starts, starts[1:], strict=False):
            yield exempt, flat[start:stop]


def padding_of(numels: Sequence[int], size: int) -> tuple[slice, ...]:
    """Return the padding in ZeRO-3's buffer of gradients; DeepSpeed leaves it uninitialised.

    The buffer has a row for each of ``size`` ranks. Each row holds a piece of each gradient, equally long in all rows.
    """
    if len(numels) == 1 and numels[0] % size == 0:
        return ()
    chunks = [math.ceil(numel / size) for numel in numels]
    row = sum(chunks)
    found = []
    for rank in range(size):
        place = rank * row
        for numel, chunk in zip(numels, chunks, strict=True):
            filled = min(max(numel - rank * chunk, 0), chunk)
            if filled < chunk:
                found.append(slice(place + filled, place + chunk))
            place += chunk
    return tuple(found)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield ``tensors`` in order, in groups of at least one, with about this many elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _MOST_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _slot(part: GradientSpan, total: int) -> Slot:
    return Slot(part.key, part.stop - part.start, total + part.offset)
