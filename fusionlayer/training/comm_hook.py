"""``CommHook``: averages the buckets of DistributedDataParallel on an engine."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..base.errors import UsageError
from ..base.plan import Bucket, FusionPlan, Slot
from ..base.seeds import derive_seed
from ..scheduler import Engine
from .backward_end import NO_BACKWARD, current_node, queue_callback, running_backward
from .enrolment import listed
from .live import release
from .own_state import check_place
from .replicas import ReplicaCheck
from .snapshots import Snapshot, is_still, snapshot

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

# The hook of each model, and the arguments of its registration.
registered: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[tuple[object, ...], CommHook]] = (
    weakref.WeakKeyDictionary()
)


class CommHook:
    """Averages DDP's buckets on an engine; residuals belong to parameters, not to buckets.

    DDP calls the hook on the thread of backward when a bucket is full. It does so in the order of the buckets' numbers,
    which is the same on all ranks. At the end of backward, DDP waits for the futures and copies averages from its
    buckets into gradients. After this rank has joined (``DistributedDataParallel.join``), DDP calls the hook outside of
    backward, with zeros.

    With ``find_unused_parameters`` DDP drops the average of a parameter that no rank has used. The codec's use of its
    error feedback is then undone: DDP finds out by itself which parameters these are.

    Args:
        model: has the hook; it is not kept alive.
        engine: reduces the gradients; ``close`` closes it.
        names: names of the parameters, in DDP's order.
        template: codec and collective of DDP's buckets. These buckets are the engine's plan, and change when DDP
            rebuilds them after the first step.
        check: compares parameters over ranks; None: nothing does.
        frozen: names of parameters that needed no gradient when DDP made its buckets.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        engine: Engine,
        names: Mapping[Tensor, str],
        template: Bucket,
        check: ReplicaCheck | None,
        frozen: Mapping[Tensor, str],
    ) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._frozen = frozen
        self._names = names
        self._template = template
        self._check = check
        self._layouts: dict[tuple[str, ...], Bucket] = {}
        self._waiting: list[Callable[[], None]] = []
        # DDP lays its buckets out again after its first step, so a resumed step has the buckets that were saved.
        self._last: dict[int, Bucket] = {}
        self._resumed: list[Bucket] = []
        self._gradients: dict[str, Tensor] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._sent = 0
        # For parameters of completed buckets: their gradients, which reveal later changes.
        self._given: list[tuple[Tensor, Snapshot]] = []
        # How many buckets, with how many parameters, have come in this step. DDP's own numbers are all 0 in the first
        # step of a static graph.
        self._buckets = self._arrived = 0
        # Parameters that this rank has not used since the last step, if DDP finds unused ones; and those of the ended
        # step, with DDP's count of the ranks that have used each parameter, until it is known.
        self._unused: set[str] = set()
        self._undecided: tuple[Sequence[str], Tensor] | None = None
        self._finds_unused = model.find_unused_parameters or model.static_graph
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_discard, self._unused, name))
            for parameter, name in (names.items() if self._finds_unused else ())
        ]
        if model.static_graph:
            handles.append(model.register_forward_pre_hook(_refuse_first_no_sync))
        self._await_uses()
        # A program that has failed closes nothing, and the engine's threads do not end by themselves.
        self._release = weakref.finalize(self, release, engine, handles)
        self._release.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduction of one bucket; the future holds its average."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
        done = partial(future.set_result, flat)
        index, self._buckets = self._buckets, self._buckets + 1
        self._arrived += len(parameters)
        is_last = self._arrived == len(self._names)
        in_backward = running_backward() != NO_BACKWARD
        if is_last:
            self._buckets = self._arrived = 0
            if in_backward:
                # An error in a future would reach the user as a failed cast inside DDP; an error raised at the end of
                # backward arrives unchanged. It must be raised after DDP's own final callback, which leaves the reducer
                # ready for the next backward. DDP queues that callback after its last bucket, so this callback queues
                # another one, which runs after it. It does so with the last bucket, because reentrant checkpoints are
                # backwards of their own with their own callbacks.
                queue_callback(self._end_backward)
        if (
            current_node() is not None
        ):  # not in the first step of a static graph, which has buckets when no hook runs any more
            self._given += [(p, snapshot(p.grad)) for p in parameters if p.grad is not None]
        if index == 0 and not self._resumed:
            self._last = {}
        try:
            if index == 0:
                self._begin_step()
            names = [self._names[parameter] for parameter in parameters]
            self._engine.memory.remember(self._unused.intersection(names))
            if self._resumed:
                self._resume(bucket, names, is_last, done)
            else:
                layout, seed = self._layout(bucket, names, self._template), derive_seed(self._sent)
                self._engine.submit_bucket(index, layout, flat, seed, done)
                self._sent += 1
                self._last[index] = layout
        except BaseException as error:
            self._error = self._error or error
            if not future.done():
                done()
        if is_last and not in_backward:
            self._end_step(present=False)
        return future

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._release.alive

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The plan of the last step: DDP's buckets; None before the first step."""
        return self._engine.plan

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error feedback by parameter name, and the numbers of DDP's buckets and steps so far.

        It differs over ranks: each rank saves and loads its own.

        Raises:
            FusionLayerError: a step has failed; weights and error feedback are invalid.
            UsageError: the last backward made no gradient of some parameters, so the others were not averaged.
        """
        self._engine.drain()
        self._refuse_unfinished()
        self._decide()
        engine = self._engine
        place = {"rank": engine.rank, "size": engine.size}
        layouts = self._resumed or [layout for _, layout in sorted(self._last.items())]
        buckets = [
            {
                "slots": [(slot.name, slot.numel, slot.offset) for slot in each.slots],
                "numel": each.numel,
                "dtype": each.dtype,
            }
            for each in layouts
        ]
        return {**place, "buckets": buckets, "sent": self._sent, "step": engine.step, **engine.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict`` of the same rank.

        The next step sums the buckets of the last saved one, so training continues bit for bit, unless it was the first
            step of a model: DDP lays its buckets out again after that.

        Raises:
            ConfigError: the state holds error feedback of another rank, or of another number of ranks.
        """
        check_place(state, self._engine.rank, self._engine.size, "the hook of fl.ddp")
        self._undecided = None
        self._sent, self._engine.step = state.get("sent", 0), state.get("step", 0)
        self._engine.memory.load_state_dict(state)
        self._resumed = []
        template, saved = self._template, state.get("buckets", [])
        if {name for each in saved for name, _, _ in each["slots"]} == {*self._names.values()}:
            self._resumed = [
                replace(
                    template,
                    slots=tuple(Slot(*slot) for slot in each["slots"]),
                    numel=each["numel"],
                    dtype=each["dtype"],
                )
                for each in saved
            ]

    def close(self) -> None:
        """End the engine's threads and close its transport; backward fails from then on.

        Raises:
            TransportError: over NCCL, the last step did not complete on the device, so weights are invalid.
            UsageError: the last backward made no gradient of some parameters, so the others were not averaged.
        """
        was_closed = self.closed
        self._release()
        if not was_closed and self._engine.failure is None and sys.exc_info()[1] is None:
            self._refuse_unfinished()

    def _refuse_unfinished(self) -> None:
        """Raise ``UsageError`` if DDP still waits for gradients of the last backward, as it would in a next forward."""
        model = self._model()
        try:
            if model is not None:
                model._check_reducer_finalized()
        except RuntimeError as error:
            found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [*self._names.values()]
            missing = [names[int(i)] for i in found[1].split()] if found else []
            finds = model is not None and model.find_unused_parameters
            remedy = (
                "let the loss depend on all outputs of the model, as by adding 0 * output.sum()"
                if finds
                else "give DistributedDataParallel find_unused_parameters=True"
            )
            raise UsageError(
                f"backward made no gradient of {listed(missing) or 'some parameters'} in the last step, so gradients "
                f"are not averages over ranks, and weights that were updated with them differ: {remedy}"
            ) from None

    def _begin_step(self) -> None:
        """Refuse a join that divides by the remaining ranks: only DDP's own sum knows their number."""
        model = self._model()
        assert model is not None  # it runs backward
        if model._join_config.enable and not getattr(model, "_divide_by_initial_world_size", True):
            raise UsageError(
                "join(divide_by_initial_world_size=False) with ddp.register; gradients are divided by the number of "
                "all ranks: leave divide_by_initial_world_size out"
            )
        self._decide()

    def _resume(self, bucket: GradBucket, names: Sequence[str], is_last: bool, done: Callable[[], None]) -> None:
        """Keep the gradients of a bucket; with the last one, reduce all in the buckets that were saved, and wait."""
        self._gradients.update(zip(names, bucket.gradients(), strict=True))
        self._waiting.append(done)
        if not is_last:
            return
        layouts, self._resumed, self._last = self._resumed, [], {}
        gradients, self._gradients = self._gradients, {}
        places: list[tuple[Tensor, Tensor]] = []
        try:
            for index, layout in enumerate(layouts):
                flat = bucket.buffer().new_zeros(layout.numel, dtype=getattr(torch, layout.dtype))
                for slot in layout.slots:
                    place = flat[slot.offset : slot.offset + slot.numel].view_as(gradients[slot.name])
                    places.append((place.copy_(gradients[slot.name]), gradients[slot.name]))
                self._engine.submit_bucket(index, layout, flat, derive_seed(self._sent), lambda: None)
                self._sent += 1
                self._last[index] = layout
            self._ended = True
            self._engine.synchronize()
            for place, gradient in places:
                gradient.data.copy_(place)  # without a new version: with views of buckets it may be the parameter's
        finally:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each()

    def _end_backward(self) -> None:
        """Refuse changed gradients, before DDP puts the averages into them, and have ``_end_step`` called."""
        queue_callback(self._end_step)
        given, self._given = self._given, []
        changed = [self._names[parameter] for parameter, before in given if not is_still(before, parameter.grad)]
        if changed and self._error is None:
            # Gradients that are views of a bucket have one version.
            which = f"gradient {changed[0]!r}" if len(changed) == 1 else f"one of the gradients {listed(changed)}"
            self._engine.fail(
                UsageError(
                    f"{which} was changed or replaced while it was being reduced: change gradients after backward(), "
                    "or each in a hook of its own parameter, which runs before"
                )
            )

    def _end_step(self, present: bool = True) -> None:
        """End the step, after DDP has waited for its results, or raise its failure.

        Args:
            present: False: this rank has joined, so its parameters may differ, and DDP shows only later which
                parameters were used.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        ended, self._ended = self._ended, False
        if not ended:
            try:
                self._engine.synchronize()
            except UsageError as error:  # gradients have not come
                raise UsageError(f"{error}; or give DistributedDataParallel find_unused_parameters=True") from None
        model = self._model()
        if self._unused and model is not None:
            self._undecided = tuple(self._unused), model.reducer._get_local_used_map()
        self._await_uses()
        if present:
            self._decide()
        if self._check is not None:
            self._check.begin(present=present)
            self._check.settle()
        for parameter, name in self._frozen.items():
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"gradient {name!r} is not reduced: its parameter was unfrozen after DistributedDataParallel had "
                    "wrapped the model; unfreeze it first, then wrap the model and register the hook again"
                )

    def _await_uses(self) -> None:
        """Count every parameter as unused, until backward makes its gradient."""
        if self._finds_unused:
            self._unused.update(self._names.values())

    def _decide(self) -> None:
        """Give parameters that no rank has used in the last step the error feedback back that they had before it."""
        if self._undecided is not None:
            (unused, counts), self._undecided = self._undecided, None
            used = dict(zip(self._names.values(), counts.tolist(), strict=True))
            self._engine.memory.restore(name for name in unused if not used[name])
            self._engine.memory.forget()

    def _layout(self, bucket: GradBucket, names: Sequence[str], template: Bucket) -> Bucket:
        """Return the bucket's layout for the engine; known layouts are reused in every step."""
        key = tuple(names)
        layout = self._layouts.get(key)
        if layout is None:
            flat = bucket.buffer()
            slots = tuple(
                Slot(name, gradient.numel(), int(gradient.storage_offset() - flat.storage_offset()))
                for name, gradient in zip(names, bucket.gradients(), strict=True)
            )
            dtype = str(flat.dtype).removeprefix("torch.")
            layout = self._layouts[key] = replace(template, slots=slots, numel=flat.numel(), dtype=dtype)
        return layout


def _refuse_first_no_sync(model: nn.Module, _: object) -> None:
    """Refuse features for which torch raises an internal error in backward. Like a hook, it keeps nothing alive."""
    assert isinstance(model, DistributedDataParallel)
    _, hook = registered.get(model, (None, None))
    if hook is None or hook._engine.step or model.require_backward_grad_sync or not torch.is_grad_enabled():
        return
    raise UsageError(
        "no_sync() around the first forward with DistributedDataParallel(static_graph=True), which learns the graph in "
        "its first backward: take one step without no_sync() before, or leave static_graph out"
    )


def _discard(unused: set[str], name: str, parameter: Tensor) -> None:
    """Note that backward has made a parameter's gradient; as a hook, it keeps no parameter and no engine alive."""
    unused.discard(name)
