"""A communication hook with which DistributedDataParallel uses our codecs, collectives and background threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import collectives, context
from ..codecs import Codec, CodecOptions
from ..config import Config, blame
from ..errors import ConfigError, UsageError, kind_of
from ..functional import make_codec, refuse_unknown
from ..plan import Bucket, FusionPlan, Slot, plain_name
from ..planning.autotune import Autotune
from ..scheduler import Engine, Scaling
from ..seeds import derive_seed
from ..timeline import Timeline
from .averaging import refuse_averaged
from .construction import GradientOptions, autotuning, make_engine
from .own_state import check_place
from .parameters import describe, one_device
from .reduction import refuse_twice
from .replicas import ReplicaCheck, Replicas, check_interval

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from typing_extensions import Unpack

__all__ = ["CommHook", "register"]

# The hook of each model, and the arguments with which it was registered.
_registered: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[tuple[object, ...], CommHook]] = (
    weakref.WeakKeyDictionary()
)


def register(
    model: DistributedDataParallel,
    codec: str | Codec | None = None,
    algorithm: str | None = None,
    error_feedback: bool | None = None,
    feedback_bits: int | None = None,
    ahead: bool | None = None,
    autotune: bool | Autotune | None = None,
    check_replicas: bool | int | None = None,
    **codec_options: Unpack[CodecOptions],
) -> CommHook:
    """Send the gradients of ``model`` compressed over the ranks of its process group; call it before training.

    DDP takes one hook for its life. A second call with the same arguments returns the hook that the model has, so a
    callback may register at the beginning of every training.

    DDP chooses the buckets, except with ``autotune``. Background threads average each bucket while backward goes on. If
    that fails, ``backward()`` raises the error.

    DDP reduces the parameters that required gradients when it wrapped the model. If another one is unfrozen later, its
    gradient would stay this rank's own, so ``backward()`` raises ``UsageError``: wrap the model again.

    Args:
        model: wrapped by DistributedDataParallel, without another communication hook.
        codec: name or codec of the gradients; None takes the configured one.
        algorithm: name of a collective; None chooses by codec and number of ranks.
        error_feedback: add what the codec lost to the next step's gradient. None: do so if the codec is biased and
            coarse.
        feedback_bits: bits that an element of the error feedback takes between two steps, 32 or 8; None takes the
            configured number.
        ahead: encode the gradients of a bucket one by one; False encodes the bucket as a whole. None does what
            ``algorithm`` needs, or without one what is best for the codec: one by one for those that sparsify.
        autotune: fuse gradients by plans of our own instead, and search for the plan with the shortest measured steps
            while training runs. The configured planner makes the first plan. The hook gets gradients when one of DDP's
            buckets is full, so small buckets (``bucket_cap_mb=1``) leave plans most freedom. An ``Autotune`` holds
            options of the search; None takes the configured value.
        check_replicas: compare all parameters in the first backward, and then a part of them in each, so that a
            difference over ranks is found within this many. False: never; None takes the configured number. DDP itself
            has made them equal when it was made.
        codec_options: options of a codec given by name.

    Returns:
        The hook. Save its ``state_dict`` in the rank's checkpoint; ``close`` ends its threads.

    Raises:
        ConfigError: ``model`` is not wrapped by DDP, or names and options are unknown or do not fit each other.
        PlanMismatch: ranks disagree on options.
        UsageError: the model has a hook with other arguments, or one that was closed.
    """
    asked = (codec, algorithm, error_feedback, feedback_bits, ahead, autotune, check_replicas, dict(codec_options))
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"ddp.register got {kind_of(model)}; wrap the model in DistributedDataParallel first")
    if model in _registered:
        before, hook = _registered[model]
        if asked != before or hook.closed:
            state = "was closed" if hook.closed else "has other arguments"
            raise UsageError(
                f"ddp.register on a model that has a hook, which {state}; DDP takes one hook for its life: wrap the "
                "model in DistributedDataParallel again"
            )
        return hook
    given: Mapping[str, object] = codec_options
    refused = sorted({"planner", "plan", "profile", "policy", "fidelity", "replan"} & given.keys())
    if refused:
        raise ConfigError(
            f"ddp.register got {refused[0]}={given[refused[0]]!r}; DDP makes its own buckets, which all travel "
            f"by one codec: wrap the optimizer in DistributedOptimizer for {refused[0]}"
        )
    refuse_unknown(register, codec, codec_options)
    context.refuse_elastic("ddp.register", "DDP's own state is of one number of ranks; use DistributedOptimizer")
    every = check_interval(check_replicas)
    settings = context.settings()
    if codec is None and settings.policy is not None:
        raise ConfigError(
            f"the configured policy {settings.policy} gives each gradient a codec, which DDP's buckets cannot have; "
            "give ddp.register a codec, or wrap the optimizer in DistributedOptimizer"
        )
    if settings.plan is not None:
        with blame(settings, "plan"):
            raise ConfigError(
                f"the configured plan {settings.plan} is for DistributedOptimizer; with ddp.register DDP makes the "
                "buckets: leave the plan out, or wrap the optimizer"
            )
    transport = context.transport(model.process_group)
    tuning = autotuning(autotune)
    options = GradientOptions(
        codec=codec,
        codec_options=codec_options,
        algorithm=algorithm,
        ahead=ahead,
        error_feedback=error_feedback,
        feedback_bits=feedback_bits,
        autotune=tuning,
    )
    template = None
    if tuning is None or transport.size == 1:
        chosen = make_codec(codec, codec_options)
        ahead = settings.ahead if ahead is None else ahead
        with blame(settings, *([] if algorithm is not None else ["algorithm"])):
            algorithm = collectives.choose(chosen, transport.size, algorithm or settings.algorithm, ahead=ahead)
        ahead = collectives.is_gather(algorithm)
        template = Bucket((), 0, "", chosen.name, chosen.options, algorithm, ahead)
        # DDP's buckets are the plan, so the engine never asks this planner. It must only be one that needs no costs.
        options = replace(options, codec=chosen, codec_options={}, planner=Config.planner, autotune=False)
    named = model.module.named_parameters()
    parameters = {p: plain_name(name) for name, p in named if name not in model.parameters_to_ignore}
    names = {parameter: name for parameter, name in parameters.items() if parameter.requires_grad}
    frozen = {parameter: name for parameter, name in parameters.items() if not parameter.requires_grad}
    refuse_twice(names)
    refuse_averaged(names, modules=False)
    engine = make_engine(
        options,
        describe(names, None),
        transport,
        one_device(names),
        scaling=Scaling(before=1 / transport.size),
        timeline=Timeline(settings.timeline, transport.rank),
        overlap_forward=False,
    )
    kept = {name: p for p, name in parameters.items()}
    replicas = Replicas(kept, broadcast=True, every=every)
    if transport.size > 1:
        engine.put(partial(replicas.unite, rejoining=True))()
    hook = CommHook(engine, names, template, replicas.check(engine.put) if transport.size > 1 else None, frozen)
    # DDP checks a hook's annotations and rejects postponed ones, so the hook is a function without annotations.
    model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    _registered[model] = asked, hook
    return hook


class CommHook:
    """Averages DDP's buckets on an engine; residuals belong to parameters, not to buckets.

    DDP calls the hook on the thread of backward when a bucket is full. It does so in the order of the buckets' numbers,
    which is the same on all ranks. At the end of backward, DDP waits for the futures and copies averages from its
    buckets into gradients.

    Args:
        engine: reduces the gradients; ``close`` closes it.
        names: names of the parameters.
        template: codec and collective of DDP's buckets. These buckets are the engine's plan, and change when DDP
            rebuilds them after the first step. None: the engine fuses gradients by plans of its own.
        check: compares parameters over ranks; None: nothing does.
        frozen: names of parameters that needed no gradient when DDP made its buckets.
    """

    def __init__(
        self,
        engine: Engine,
        names: Mapping[Tensor, str],
        template: Bucket | None,
        check: ReplicaCheck | None,
        frozen: Mapping[Tensor, str],
    ) -> None:
        self._engine = engine
        self._frozen = frozen
        self._names = names
        self._template = template
        self._check = check
        self._layouts: dict[tuple[str, ...], Bucket] = {}
        self._waiting: list[Callable[[], None]] = []
        # DDP lays its buckets out anew after its first step, so a resumed step has the buckets that were saved.
        self._last: dict[int, Bucket] = {}
        self._resumed: list[Bucket] = []
        self._gradients: dict[str, Tensor] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._sent = 0
        # A program that has failed closes nothing, and the engine's threads do not end by themselves.
        self._release = weakref.finalize(self, engine.close)
        self._release.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduction of one bucket; the future holds its average."""
        flat = bucket.buffer()
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
        done = partial(future.set_result, flat)
        if bucket.index() == 0:
            # An error in a future would reach the user as a failed cast inside DDP; an error raised at the end of
            # backward arrives unchanged. It must be raised after DDP's own final callback, which leaves the reducer
            # ready for the next backward. DDP queues that callback with its last bucket, after this one: so this
            # callback queues another one, which runs behind it.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end_backward))
            if not self._resumed:
                self._last = {}
        try:
            if self._template is None:
                self._fuse(bucket, done)
            elif self._resumed:
                self._resume(bucket, done)
            else:
                layout, seed = self._layout(bucket, self._template), derive_seed(self._sent)
                self._engine.submit_bucket(bucket.index(), layout, flat, seed, done)
                self._sent += 1
                self._last[bucket.index()] = layout
        except BaseException as error:
            self._error = self._error or error
            if self._template is not None and not future.done():
                done()
        return future

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._release.alive

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """The plan of the last step: DDP's buckets, or with ``autotune`` our own; None before the first step."""
        return self._engine.plan

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error feedback by parameter name, and the numbers of DDP's buckets and steps so far.

        It differs over ranks: each rank saves and loads its own.

        Raises:
            FusionLayerError: a step has failed; weights and error feedback are worthless.
        """
        self._engine.drain()
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
        """Restore what ``state_dict`` of the same rank returned.

        The next step sums the buckets of the last one that was saved, so training continues bit for bit, unless it was
        the first step of a model: DDP lays its buckets out anew after that.

        Raises:
            ConfigError: the state holds error feedback of another rank, or of another number of ranks.
        """
        check_place(state, self._engine.rank, self._engine.size, "the hook of fl.ddp")
        self._sent, self._engine.step = state.get("sent", 0), state.get("step", 0)
        self._engine.memory.load_state_dict(state)
        self._resumed = []
        template, saved = self._template, state.get("buckets", [])
        if template is not None and {name for each in saved for name, _, _ in each["slots"]} == {*self._names.values()}:
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
            TransportError: over NCCL, the last step could not end on the device, so weights are worthless.
        """
        self._release()

    def _fuse(self, bucket: GradBucket, done: Callable[[], None]) -> None:
        """Submit the gradients of a bucket by name; with the last bucket, when backward has ended, wait for all."""
        self._waiting.append(done)
        try:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._engine.submit(self._names[parameter], gradient)
            if bucket.is_last():
                self._engine.synchronize()
        finally:
            # DDP waits for all futures before backward ends. They must be set even after a failure, or it would hang.
            if bucket.is_last():
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    each()

    def _resume(self, bucket: GradBucket, done: Callable[[], None]) -> None:
        """Keep the gradients of a bucket; with the last one, reduce all in the buckets that were saved, and wait."""
        names = [self._names[parameter] for parameter in bucket.parameters()]
        self._gradients.update(zip(names, bucket.gradients(), strict=True))
        self._waiting.append(done)
        if not bucket.is_last():
            return
        layouts, self._resumed, self._last = self._resumed, [], {}
        gradients, self._gradients = self._gradients, {}
        places: list[tuple[Tensor, Tensor]] = []
        try:
            for index, layout in enumerate(layouts):
                flat = bucket.buffer().new_zeros(layout.numel)
                for slot in layout.slots:
                    place = flat[slot.offset : slot.offset + slot.numel].view_as(gradients[slot.name])
                    places.append((place.copy_(gradients[slot.name]), gradients[slot.name]))
                self._engine.submit_bucket(index, layout, flat, derive_seed(self._sent), lambda: None)
                self._sent += 1
                self._last[index] = layout
            self._ended = True
            self._engine.synchronize()
            for place, gradient in places:
                gradient.copy_(place)
        finally:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each()

    def _end_backward(self) -> None:
        """End the step, after DDP has waited for its results, or raise what has failed in it."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        ended, self._ended = self._ended, False
        if self._template is not None and not ended:
            self._engine.synchronize()
        if self._check is not None:
            self._check.begin()
            self._check.settle()
        for parameter, name in self._frozen.items():
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"gradient {name!r} is not reduced: its parameter was unfrozen after DistributedDataParallel had "
                    "wrapped the model; unfreeze it first, then wrap the model and register the hook again"
                )

    def _layout(self, bucket: GradBucket, template: Bucket) -> Bucket:
        """Return the bucket's layout for the engine; known layouts are reused in every step."""
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        layout = self._layouts.get(names)
        if layout is None:
            flat = bucket.buffer()
            slots = tuple(
                Slot(name, gradient.numel(), int(gradient.storage_offset() - flat.storage_offset()))
                for name, gradient in zip(names, bucket.gradients(), strict=True)
            )
            dtype = str(flat.dtype).removeprefix("torch.")
            layout = self._layouts[names] = replace(template, slots=slots, numel=flat.numel(), dtype=dtype)
        return layout
