"""A communication hook with which DistributedDataParallel uses our codecs, collectives and background threads."""

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
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .. import collectives, context
from ..base.config import Planning, blame
from ..base.errors import ConfigError, UsageError, kind_of
from ..base.plan import Bucket, FusionPlan, Slot, plain_name
from ..base.seeds import derive_seed
from ..codecs import Codec, CodecOptions
from ..functional import make_codec, refuse_unknown
from ..observe.timeline import Timeline
from ..scheduler import Engine, Scaling
from .averaging import refuse_averaged
from .backward_end import NO_BACKWARD, is_in_hook, running_backward
from .construction import GradientOptions, make_engine
from .enrolment import listed
from .live import refuse_twice
from .own_state import check_place
from .parameters import describe, one_device
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
    check_replicas: bool | int | None = None,
    **codec_options: Unpack[CodecOptions],
) -> CommHook:
    """Send the gradients of ``model`` compressed over the ranks of its process group; call it before training.

    DDP takes one hook for its life. A second call with the same arguments returns the hook that the model has, so a
    callback may register at the beginning of every training.

    DDP chooses the buckets. Background threads average each bucket while backward goes on. If
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
        check_replicas: compare all parameters in the first backward, and then a part of them in each, so that a
            difference over ranks is found within this many. False: never; None takes the configured number. DDP itself
            has made them equal when it was made.
        codec_options: options of a codec given by name.

    Returns:
        The hook. Save its ``state_dict`` in the rank's checkpoint; ``close`` ends its threads.

    Raises:
        ConfigError: ``model`` is not wrapped by DDP, uses a feature of DDP that gives a hook no gradients, or names and
            options are unknown or do not fit each other.
        PlanMismatch: ranks disagree on options.
        UsageError: the model has a hook with other arguments, or one that was closed.
    """
    asked = (codec, algorithm, error_feedback, feedback_bits, ahead, check_replicas, dict(codec_options))
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
    # DDP looks for a parameter of the outermost module by a name with a dot in front.
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    parameters = {p: plain_name(name) for name, p in named if (name if "." in name else f".{name}") not in ignored}
    _refuse_features(model, parameters)
    names = {parameter: name for parameter, name in parameters.items() if parameter.requires_grad}
    frozen = {parameter: name for parameter, name in parameters.items() if not parameter.requires_grad}
    refuse_twice(names)
    refuse_averaged(names, modules=False)
    every = check_interval(check_replicas)
    settings = context.settings()
    if codec is None and settings.planning.policy is not None:
        raise ConfigError(
            f"the configured policy {settings.planning.policy} gives each gradient a codec, which DDP's buckets "
            "cannot have; give ddp.register a codec, or wrap the optimizer in DistributedOptimizer"
        )
    if settings.planning.plan is not None:
        with blame(settings, "plan"):
            raise ConfigError(
                f"the configured plan {settings.planning.plan} is for DistributedOptimizer; with ddp.register DDP "
                "makes the buckets: leave the plan out, or wrap the optimizer"
            )
    transport = context.transport(model.process_group)
    chosen = make_codec(codec, codec_options)
    ahead = settings.planning.ahead if ahead is None else ahead
    with blame(settings, *([] if algorithm is not None else ["algorithm"])):
        algorithm = collectives.choose(chosen, transport.size, algorithm or settings.algorithm, ahead=ahead)
    ahead = collectives.is_gather(algorithm)
    if ahead:
        for dtype in sorted({parameter.dtype for parameter in names}, key=str):
            chosen.wire(0, dtype)  # refuses types that it cannot encode
    template = Bucket((), 0, "", chosen.name, chosen.options, algorithm, ahead)
    options = GradientOptions(
        codec=chosen,
        algorithm=algorithm,
        ahead=ahead,
        # DDP's buckets are the plan, so the engine never asks this planner. It must only be one that needs no costs.
        planner=Planning.planner,
        error_feedback=error_feedback,
        feedback_bits=feedback_bits,
    )
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
    hook = CommHook(model, engine, names, template, replicas.check(engine.put) if transport.size > 1 else None, frozen)
    try:
        # DDP checks a hook's annotations and rejects postponed ones, so the hook is a function without annotations.
        model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    except RuntimeError as error:
        hook.close()
        raise ConfigError(_ANOTHER_HOOK) from error
    # The reducer has the hook. A copy of the model gets a reducer of its own, and would copy what this list has: the
    # engine with its threads.
    model._comm_hooks.pop()
    _registered[model] = asked, hook
    return hook


_ANOTHER_HOOK = (
    "ddp.register on a model that has another communication hook; DDP takes one hook for its life: wrap the model in "
    "DistributedDataParallel again, and leave the other hook out"
)


def _refuse_features(model: DistributedDataParallel, parameters: Mapping[Tensor, str]) -> None:
    """Raise ``ConfigError`` if ``model`` uses a feature of DDP that gives a hook no gradients, or not in buckets."""
    if model._delay_all_reduce_all_params:
        raise ConfigError(
            "ddp.register on DistributedDataParallel(delay_all_reduce_named_params=...) with all parameters; such "
            "gradients do not reach a hook: name fewer parameters"
        )
    if model.mixed_precision is not None:
        raise ConfigError(
            "ddp.register on DistributedDataParallel(mixed_precision=...), which has a communication hook of its own; "
            "leave mixed_precision out and use torch.autocast"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "ddp.register on DistributedDataParallel(skip_all_reduce_unused_params=True), with which buckets do not "
            "reach a hook in every step; leave it out, or freeze what is unused before you wrap the model"
        )
    if model._use_python_reducer:
        raise ConfigError(
            "ddp.register with torch._dynamo.config.optimize_ddp='python_reducer', which gives a hook no buckets; "
            "set it to True"
        )
    if model._comm_hooks:
        raise ConfigError(_ANOTHER_HOOK)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for path, module in model.module.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.sparse and module.weight.requires_grad and module.weight in parameters:
            raise ConfigError(
                f"ddp.register on a model whose layer {path!r} makes sparse gradients; give the layer sparse=False, or "
                "leave DDP out and wrap the optimizer in DistributedOptimizer, which gathers the rows"
            )
    for parameter in trained:
        if not parameter.is_floating_point():
            raise ConfigError(
                f"ddp.register on a model whose parameter {parameters[parameter]!r} is of {parameter.dtype}; expected "
                "floats: hold complex numbers as torch.view_as_real of them"
            )
    expected = model._get_ddp_logging_data()["num_parameter_tensors"]
    if len(trained) != expected:
        raise ConfigError(
            f"ddp.register on a model of which {len(trained)} parameters require gradients, {expected} when it was "
            "wrapped in DistributedDataParallel; freeze and unfreeze first, then wrap the model"
        )


class CommHook:
    """Averages DDP's buckets on an engine; residuals belong to parameters, not to buckets.

    DDP calls the hook on the thread of backward when a bucket is full. It does so in the order of the buckets' numbers,
    which is the same on all ranks. At the end of backward, DDP waits for the futures and copies averages from its
    buckets into gradients. After this rank has joined (``DistributedDataParallel.join``), DDP calls the hook outside of
    backward, with zeros.

    With ``find_unused_parameters`` DDP drops the average of a parameter that no rank has used. What the codec has taken
    from its error feedback is then given back: DDP finds out by itself which parameters these are.

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
        # DDP lays its buckets out anew after its first step, so a resumed step has the buckets that were saved.
        self._last: dict[int, Bucket] = {}
        self._resumed: list[Bucket] = []
        self._gradients: dict[str, Tensor] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._sent = 0
        # Of parameters whose buckets have come: gradients, with versions and places in memory, by which changes show.
        self._given: list[tuple[Tensor, Tensor, int, int]] = []
        # How many buckets, with how many parameters, have come in this step. DDP's own numbers are all 0 in the first
        # step of a static graph.
        self._buckets = self._arrived = 0
        # Parameters that this rank has not used since the last step, if DDP finds unused ones; and those of the step
        # that has ended, with DDP's count of the ranks that have used each parameter, until it is known.
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
        self._release = weakref.finalize(self, _release, engine, handles)
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
                # another one, which runs behind it. It does so with the last bucket: reentrant checkpoints are
                # backwards of their own, and an earlier bucket's has callbacks of its own.
                Variable._execution_engine.queue_callback(self._end_backward)
        if is_in_hook():  # not in the first step of a static graph, which has buckets when no hook runs any more
            gradients = [(p, p.grad) for p in parameters]
            self._given += [(p, g, g._version, g.data_ptr()) for p, g in gradients if g is not None]
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
            FusionLayerError: a step has failed; weights and error feedback are worthless.
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
        """Restore what ``state_dict`` of the same rank returned.

        The next step sums the buckets of the last one that was saved, so training continues bit for bit, unless it was
        the first step of a model: DDP lays its buckets out anew after that.

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
            TransportError: over NCCL, the last step could not end on the device, so weights are worthless.
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
            raise UsageError(
                f"backward made no gradient of {listed(missing) or 'some parameters'} in the last step, so gradients "
                "are not averages over ranks, and weights that were updated with them differ: give "
                "DistributedDataParallel find_unused_parameters=True"
            ) from None

    def _begin_step(self) -> None:
        """Refuse a join that divides by the ranks that are left: only DDP's own sum knows how many those are."""
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
        Variable._execution_engine.queue_callback(self._end_step)
        given, self._given = self._given, []
        changed = [
            self._names[parameter]
            for parameter, gradient, version, place in given
            if parameter.grad is not gradient or gradient._version != version or gradient.data_ptr() != place
        ]
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
        """End the step, after DDP has waited for its results, or raise what has failed in it.

        Args:
            present: False: this rank has joined, so its parameters may differ, and DDP tells only later which
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
    """Refuse what torch answers with an internal error in backward. As a hook, it keeps nothing alive."""
    assert isinstance(model, DistributedDataParallel)
    _, hook = _registered.get(model, (None, None))
    if hook is None or hook._engine.step or model.require_backward_grad_sync or not torch.is_grad_enabled():
        return
    raise UsageError(
        "no_sync() around the first forward with DistributedDataParallel(static_graph=True), which learns the graph in "
        "its first backward: take one step without no_sync() before, or leave static_graph out"
    )


def _discard(unused: set[str], name: str, parameter: Tensor) -> None:
    """Note that backward has made a parameter's gradient; as a hook, it keeps no parameter and no engine alive."""
    unused.discard(name)


def _release(engine: Engine, handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    engine.close()
