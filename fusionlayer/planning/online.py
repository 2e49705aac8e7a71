"""Planning while training runs: measure the first steps, and make a plan from that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from .. import codecs
from ..base.errors import ConfigError
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..process.clock import HOST, Clock
from ..scheduler.plan_controller import PlanController, StepSeconds
from ..scheduler.planners import Planner
from ..transport import Transport
from ..transport._announced import pass_on, take_in
from .bucket_costs import codec_of, short_name
from .cluster import Scenario
from .codec_rules import CodecChoice, CodecRules
from .collective_phases import ALGORITHMS
from .plans import make_plan
from .prediction import predict_plan
from .profile import Profile
from .profiler.averages import average
from .profiler.training import profile_training
from .selection import select
from .simulation import SimulatedStep

CANDIDATES = ("raw", "bf16", "int8", "int4", "int3", "int2", "topk", "chunked_topk", "dgc")
"""The codecs that "auto" chooses from in training, as far as the fidelity allows."""

_logger = logging.getLogger("fusionlayer")


class OnlinePlanner(PlanController):
    """Gives an engine a plan, or the codecs of a policy, from costs that it measures in training.

    The engine begins with a plan that needs no costs. After ``measured`` steps training waits while all ranks measure
    codecs and collectives together and take the means. Rank 0 plans, and every rank gets its plan, which stays.

    A device reports the seconds of a step some time after its end, or not at all. So steps are counted as they end, the
    same on all ranks, and those with known seconds count.

    Args:
        tensors: the tensors of a step.
        planner: makes the plans.
        codec: the codec of all gradients, of each by its name, or the rules that choose it.
        rank: this rank; rank 0 plans and writes to the log.
        nodes: number of ranks of each node.
        algorithm: collective; None chooses. With rules it is ignored: each codec has its own.
        ahead: encode gradients one by one as they arrive; None: as the codec does by default.
        clock: the clock of the gradients' device.
        warm_up: steps that do not count, after the first step.
        measured: steps whose medians are the costs of backward.

    Attributes:
        profile: the costs that the last plan was made from; None before the first.

    Raises:
        ConfigError: the costs of the collective are not known.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        planner: Planner,
        codec: Codec | Mapping[str, Codec] | CodecRules,
        rank: int,
        nodes: Sequence[int],
        *,
        algorithm: str | None = None,
        ahead: bool | None = None,
        clock: Clock = HOST,
        warm_up: int = 2,
        measured: int = 5,
    ) -> None:
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ConfigError(
                f"planner {planner.name!r} plans by costs, and those of the collective {algorithm!r} are not known; "
                f"choose one of: {', '.join(ALGORITHMS)}, or a planner that needs no costs"
            )
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._planner = planner
        self._codec = codec
        self._rank = rank
        self._nodes = tuple(nodes)
        self._algorithm = algorithm
        self._ahead = ahead
        self._clock = clock
        self._warm_up, self._measured = warm_up, measured
        # The fields below need no lock. The thread that submits writes them in ``note_step``, a communication thread in
        # ``next_plan``; meanwhile the engine lets the first thread wait.
        self.profile: Profile | None = None
        self._measuring = True
        self._skip = warm_up
        self._from = 0  # the first step that counts
        self._ended = 0  # steps that have ended since
        self._steps: list[StepSeconds] = []
        self._present: FusionPlan | None = None

    def __str__(self) -> str:
        codec = self._codec if not isinstance(self._codec, Mapping) else sorted(map(str, set(self._codec.values())))
        return f"{self._planner} {codec} {self._algorithm} {self._ahead} {self._warm_up} {self._measured}"

    def plan_by(self, profile: Profile) -> FusionPlan:
        """Return the plan for the costs of a profile; the first steps are then not measured."""
        known = {tensor.name: (tensor.numel, tensor.dtype) for tensor in self._tensors.values()}
        given = {tensor.name: (tensor.numel, tensor.dtype) for tensor in profile.model.tensors}
        differ = sorted(name for name in known.keys() | given.keys() if known.get(name) != given.get(name))
        if differ:
            raise ConfigError(
                f"profile {profile.title!r} is of another model: {len(differ)} tensors differ, the first is "
                f"{differ[0]!r}: profile has {given.get(differ[0], 'none')}, model has {known.get(differ[0], 'none')}; "
                "measure one of this model, or leave it out to have the first steps measured"
            )
        self.profile, self._measuring = profile, False
        plan, predicted = self._plan(profile)
        self._say("planner %s by profile %r: %s", self._planner.name, profile.title, _words(plan, predicted))
        return plan

    # ---- PlanController ----------------------------------------------------------------------------------------------

    def note_step(self, plan: FusionPlan | None, step: int, seconds: StepSeconds | None) -> None:
        """Keep the seconds of a step, as far as the plan needs them."""
        self._present = plan
        if self._skip:
            self._skip -= 1
            self._from = step + 1
            return
        self._ended += 1
        if self._measuring and seconds is not None and step - seconds.late >= self._from:
            self._steps.append(seconds)

    def due(self, step: int) -> bool:
        """Return whether it is time to plan."""
        # A rank that called ``next_plan`` alone would wait for the others for ever. So a count decides that is the same
        # on all ranks.
        return self._measuring and self._ended >= self._measured

    # ---- on the communication thread --------------------------------------------------------------------------------

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Measure and plan."""
        self._ended = 0
        (known,) = average([float(bool(self._steps))], transport)
        if known < 1:
            self._say("a device has not reported yet how long its steps take; the next ones are measured too")
            self._clock.finish()  # so it reports those that it has in hand at once
            return None
        self.profile = profile_training(self._steps, self._tensors, self._to_measure(), transport, self._clock)
        self._steps.clear()
        self._measuring = False
        # One rank plans for all: nothing that differs between hosts, such as a library's version, can make two plans.
        plan = self._better(self.profile) if self._rank == 0 else None
        return _from_rank_0(plan, transport)

    def _to_measure(self) -> dict[str, Codec]:
        """Return every codec that the present plan has or the next one may have, by its registered name."""
        assert self._present is not None
        found = [codec_of(bucket) for bucket in self._present.buckets]
        if isinstance(self._codec, CodecRules):
            found += self._codec.allowed({name: codecs.get(name) for name in CANDIDATES}).values()
        by_name: dict[str, Codec] = {}
        for codec in found:
            name = short_name(codec)
            by_name.setdefault(name if codecs.knows(name) else codec.name, codec)
        return by_name

    # ---- on rank 0 --------------------------------------------------------------------------------------------------

    def _better(self, profile: Profile) -> FusionPlan | None:
        """Return the plan to switch to; None if the present one stays."""
        assert self._present is not None
        plan, prediction = self._plan(profile)
        before = predict_plan(profile, self._present, self._scenario(profile), measured=True)
        if plan.digest() == self._present.digest():
            self._say("planner %s keeps the plan: %s", self._planner.name, _words(self._present, before))
            return None
        self._say(
            "planner %s switches to %s; so far %s",
            self._planner.name,
            _words(plan, prediction),
            _words(self._present, before),
        )
        return plan

    def _plan(self, profile: Profile) -> tuple[FusionPlan, SimulatedStep]:
        scenario, workers = self._scenario(profile), sum(self._nodes)
        tensors = list(self._tensors.values())
        if isinstance(self._codec, CodecRules):
            found = select(profile, self._codec, self._planner, scenario, workers, measured=True, tensors=tensors)
            self._say("codecs by policy%s\n%s", found.verdict and f"; {found.verdict}", _table(profile, found.choices))
            return found.plan, found.prediction
        plan = make_plan(
            profile,
            self._planner,
            self._codec,
            scenario,
            workers,
            algorithm=self._algorithm,
            ahead=self._ahead,
            measured=True,
            tensors=tensors,
        )
        return plan, predict_plan(profile, plan, scenario, measured=True)

    def _scenario(self, profile: Profile) -> Scenario:
        return Scenario(profile.fastest_rate, profile.machine.per_host, nodes=self._nodes)

    def _say(self, message: str, *details: object) -> None:
        if self._rank == 0:
            _logger.info(message, *details)


def _from_rank_0(plan: FusionPlan | None, transport: Transport) -> FusionPlan | None:
    """Return rank 0's plan on all ranks."""
    found = b"" if plan is None else plan.to_bytes()
    length = torch.tensor([len(found)], device="cpu")
    transport.broadcast(length, 0)
    if not length.item():
        return None
    if found:
        pass_on(found, lambda piece: transport.broadcast(piece, 0))
    else:
        found = bytes(take_in(int(length), lambda piece: transport.broadcast(piece, 0)))
    return FusionPlan.from_bytes(found)


def _words(plan: FusionPlan, prediction: SimulatedStep) -> str:
    return (
        f"{len(plan.buckets)} bucket{'s' * (len(plan.buckets) != 1)}, predicted to wait {_ms(prediction.waiting)} of "
        f"{_ms(prediction.seconds)} from backward's first gradient to the last result"
    )


def _table(profile: Profile, choices: Mapping[str, CodecChoice]) -> str:
    """Return a table of choices; tensors with the same size, codec, collective and reason share a row."""
    alike: dict[tuple[int, str, str], list[str]] = {}
    for tensor in profile.model.tensors:
        choice = choices[tensor.name]
        codec = short_name(choice.codec) + (f" by {choice.algorithm}" if choice.algorithm else "")
        alike.setdefault((tensor.numel, codec, choice.reason), []).append(tensor.name)
    rows = [
        (first + f" and {len(others)} more" * bool(others), str(numel), codec, reason)
        for (numel, codec, reason), (first, *others) in alike.items()
    ]
    names, elements, kinds = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(f"{row[0]:{names}}  {row[1]:>{elements}}  {row[2]:{kinds}}  {row[3]}" for row in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
