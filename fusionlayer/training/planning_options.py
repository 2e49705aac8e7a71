"""The arguments of ``DistributedOptimizer`` that only concern planning, in one object or by their own names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..base.deprecations import deprecated
from ..base.errors import ConfigError, require
from ..base.plan import FusionPlan
from ..codecs import CodecOptions
from ..planning.codec_rules import CodecRules
from ..planning.profile import Profile
from ..scheduler.planners import Planner


@dataclass(frozen=True)
class Planning:
    """How an optimizer fuses gradients into buckets and chooses their codecs; None takes the configured value.

    Attributes:
        planner: name or planner that fuses gradients into buckets. A planner that needs costs begins with the plan of
            ``tapered``, measures the first steps and then makes its own plan (CPU only).
        plan: a fusion plan, or a file with one, instead of a planner; it names its own codecs. It must have all
            parameters that are not frozen at present, and may have frozen ones.
        profile: measured costs of this model, or a file with them, for ``codec="auto"`` and planners that need costs.
            With it, no steps are measured first.
        policy: rules that give each gradient a codec, or a file with them, instead of ``codec``.
        fidelity: for ``codec="auto"``: "lossless", "near_lossless" or "aggressive".
        ahead: encode each gradient by itself as it arrives, ahead of fusion; False encodes whole buckets. None does
            what ``algorithm`` needs, or without one what suits the codec: ahead for sparsifiers.
        fallback: name of a codec, such as "int8" or "raw", for a bucket on all ranks after its own codec has lost more
            than 0.8 of its values on one rank. "" leaves it at a warning.
        groups: number of buckets with about equally many tensors, or lists of tensors; each list is one bucket.
    """

    planner: str | Planner | None = None
    plan: FusionPlan | str | Path | None = None
    profile: Profile | str | Path | None = None
    policy: CodecRules | str | Path | None = None
    fidelity: str | None = None
    ahead: bool | None = None
    fallback: str | None = None
    groups: int | Sequence[Sequence[Tensor]] | None = None


PLANNING = tuple(field.name for field in fields(Planning))


class PlanningOptions(CodecOptions, total=False):
    """The keywords of ``DistributedOptimizer``: those of ``Planning``, Horovod's ``num_groups``, options of codecs."""

    planner: str | Planner | None
    plan: FusionPlan | str | Path | None
    profile: Profile | str | Path | None
    policy: CodecRules | str | Path | None
    fidelity: str | None
    ahead: bool | None
    fallback: str | None
    groups: int | Sequence[Sequence[Tensor]] | None
    num_groups: int


def separate(planning: Planning | str | Planner | None, options: PlanningOptions) -> tuple[Planning, CodecOptions]:
    """Return ``planning``, or that of a planner, with the ``options`` that belong to it, and the codec's options."""
    require(planning, (Planning, str, Planner, type(None)), "planning", "a fusionlayer.Planning, or a planner")
    if not isinstance(planning, Planning):
        planning = Planning(planner=planning)
    rest: dict[str, Any] = {**options}
    if rest.pop("num_groups", 0):
        deprecated("num_groups", "give groups=<number>")
        rest.setdefault("groups", options["num_groups"])
    given = {name: rest.pop(name) for name in PLANNING if name in rest}
    for name, value in given.items():
        if value is not None and getattr(planning, name) is not None:
            raise ConfigError(f"{name}=... is given, and planning has it too; give it once")
    chosen = replace(planning, **{name: value for name, value in given.items() if value is not None})
    return chosen, cast(CodecOptions, rest)
