"""Names of what is compared: a codec, and words for the ways in which it can travel."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fusionlayer as fl
from fusionlayer.base import records
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.registry import nearest
from fusionlayer.codecs import Codec
from fusionlayer.planning.codec_rules import AUTO, FIDELITIES
from fusionlayer.transport import C10dTransport
from fusionlayer.transport.links.socket_options import SocketOptions

__all__ = ["LOCAL", "OVERLAP", "SEPARATOR", "Variant", "codec_presets"]

SEPARATOR = "+"
OVERLAP = SEPARATOR + "overlap"
"""Ends the name of a variant whose communication goes on during the next forward."""

LOCAL = "local="
"""Begins the word for local steps: ``local=diloco:every=60`` is ``fusionlayer.Local.diloco(every=60)``."""

_KEYS = ("algorithm", "connections", "feedback_bits", "freeze_step", "muon", "warmup_codec")
_WORDS = ("behind", "instep", "nodes", "overlap", "unchecked")


def codec_presets() -> list[str]:
    """Return the names of all codecs, without those that are by default what one of their presets is."""
    known = {name: fl.codecs.get(name) for name in fl.codecs.names()}
    presets = [codec for name, codec in known.items() if name != codec.name]
    return [name for name, codec in known.items() if name != codec.name or codec not in presets]


@dataclass(frozen=True)
class Variant:
    """One way of fusionlayer to average gradients: ``dgc+density=0.001+safusion+overlap``, the codec first.

    Attributes:
        codec: registered name, or "auto"; what follows in the name may stand in any order.
        options: of the codec, each a word KEY=VALUE; of "auto" its ``fidelity``.
        planner: a word that is a planner's name; None: the default.
        behind: the codec gets whole buckets, and sparse ones are summed by ``one_shot``: what the others compare with
            sparsification ahead of fusion. The word "behind".
        algorithm: how its messages travel, a word algorithm=NAME; None: the default.
        connections: it travels by so many TCP connections of our own to each rank, in place of gloo's, a word
            connections=16; None: the default.
        feedback_bits: bits of the error feedback between steps, a word feedback_bits=8; None: the default.
        freeze_step: AdamW gives way to ``fl.OneBitAdam``, which sends momentum after so many steps, a word
            freeze_step=100; None: it does not.
        muon: AdamW gives way to ``fl.Muon``, whose updates have this codec, a word muon=int2; None: it does not.
        warmup_codec: the codec of gradients until then, a word warmup_codec=int4; None: the default.
        overlap: the next forward begins before all gradients have arrived. The word "overlap".
        unchecked: without what is checked by default: messages carry no checksum, and replicas are not compared. The
            word "unchecked".
        instep: ``step`` waits for results, not backward, and unused parameters get zeros: Horovod's contract, which
            ``fusionlayer.torch`` keeps. The word "instep".
        nodes: DDP averages gradients within a host in each step, and fusionlayer syncs hosts. The word "nodes".
        sync: ``fusionlayer.Local``, whose steps are local; a word local=PRESET:OPTION=VALUE. A name that begins with it
            has the preset's own codec.
    """

    codec: str
    options: dict[str, Any] = field(default_factory=dict)
    planner: str | None = None
    behind: bool = False
    algorithm: str | None = None
    connections: int | None = None
    feedback_bits: int | None = None
    freeze_step: int | None = None
    muon: str | None = None
    warmup_codec: str | None = None
    overlap: bool = False
    unchecked: bool = False
    instep: bool = False
    nodes: bool = False
    sync: Any = None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Return what a name stands for; ``ValueError`` if it is none."""
        codec, *words = name.split(SEPARATOR)
        options: dict[str, Any] = {}
        found: dict[str, Any] = {}
        if codec.startswith(LOCAL):
            sync = found["sync"] = _local(name, codec)
            codec, options = sync.codec or "raw", dict(sync.codec_options)
        for word in words:
            if word.startswith(LOCAL):
                found["sync"] = _local(name, word)
                continue
            key, equals, value = word.partition("=")
            if key in _KEYS and equals:
                found[key] = records.parse(value)
            elif equals:
                options[key] = records.parse(value)
            elif word in _WORDS:
                found[word] = True
            elif word in fl.planners.names():
                found["planner"] = word
            else:
                known = nearest(word, [*_WORDS, *fl.planners.names()])
                raise ValueError(f"{name!r}: unknown word {word!r}; {known}, or KEY=VALUE for an option of the codec")
        variant = cls(codec, options, **found)
        try:
            if codec != AUTO:
                fl.collectives.choose(variant.make_codec(), (2,), variant.algorithm, ahead=None)
            elif not options.keys() <= {"fidelity"} or options.get("fidelity", FIDELITIES[0]) not in FIDELITIES:
                raise ConfigError(f"auto takes fidelity={'|'.join(FIDELITIES)}, got {options}")
        except ConfigError as error:
            raise ValueError(f"{name!r}: {error}") from None
        return variant

    @property
    def measures(self) -> bool:
        """Whether the first steps are measured, before the plan is made that the others have."""
        return self.codec == AUTO or self.planner is not None and fl.planners.get(self.planner).needs_costs

    @property
    def period(self) -> int:
        """Steps from one sync to the next: 1 without local steps."""
        return 1 if self.sync is None else int(self.sync.every)

    @property
    def cycle(self) -> int:
        """Steps after which the messages repeat: a period, or more of them where states sync at slower rates."""
        return self.period * math.lcm(*(getattr(self.sync, "states", None) or {}).values())

    @property
    def about(self) -> str:
        """What it is, in words."""
        parts = [f"fusionlayer with the codec {self.codec}"]
        parts += [f"{key}={value}" for key, value in self.options.items()]
        parts += [f"the planner {self.planner}"] if self.planner else []
        parts += [f"the algorithm {self.algorithm}"] if self.algorithm else []
        parts += [f"{self.connections} connections of its own"] if self.connections else []
        parts += [f"error feedback in {self.feedback_bits} bits"] if self.feedback_bits else []
        parts += [f"momentum after {self.freeze_step} steps"] if self.freeze_step else []
        parts += [f"Muon, its updates with {self.muon}"] if self.muon else []
        parts += [f"{self.warmup_codec} before"] if self.warmup_codec else []
        parts += ["sparsified behind fusion"] if self.behind else []
        parts += ["overlap_forward"] if self.overlap else []
        parts += ["nothing checked"] if self.unchecked else []
        parts += ["results with step()"] if self.instep else []
        parts += ["DDP within hosts"] if self.nodes else []
        parts += [f"local steps, a sync every {self.period}"] if self.sync is not None else []
        return ", ".join(parts)

    def make_codec(self) -> Codec:
        """Return the codec."""
        return fl.codecs.get(self.codec, **self.options)

    def place(self, model: nn.Module) -> nn.Module:
        """Return what is called in place of ``model``; all ranks call it together."""
        return DistributedDataParallel(model, process_group=_mesh()["host"].get_group()) if self.nodes else model

    def wrap(self, optimizer: Optimizer, model: nn.Module, codec: Codec | None = None) -> Optimizer:
        """Return ``optimizer`` over ``model`` made distributed.

        Args:
            optimizer: of the model; AdamW with one group of parameters where momentum is sent.
            model: that is trained.
            codec: another object of the same kind, to be used in place of ``make_codec()``.
        """
        if self.freeze_step is not None:
            (group,) = optimizer.param_groups
            kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            warm_up = {"freeze_step": self.freeze_step, "warmup_codec": self.warmup_codec or "raw"}
            optimizer = fl.OneBitAdam(group["params"], **kept, **warm_up)
        if self.muon is not None:
            (group,) = optimizer.param_groups
            others = {key: group[key] for key in ("betas", "eps", "weight_decay")}
            of_gradients, rate = codec or self.make_codec(), {"lr": group["lr"], "adjust_lr_fn": "match_rms_adamw"}
            return fl.Muon(model, codec=of_gradients, update=self.muon, others=others, **rate)
        own = None
        if self.unchecked or self.connections:
            sockets = SocketOptions(self.connections) if self.connections else None
            own = C10dTransport(checksum=False if self.unchecked else None, sockets=sockets)
        distributed = fl.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            codec=codec or (AUTO if self.codec == AUTO else self.make_codec()),
            fidelity=self.options.get("fidelity") if self.codec == AUTO else None,
            planner=self.planner,
            algorithm="one_shot" if self.behind else self.algorithm,
            ahead=False if self.behind else None,
            feedback_bits=self.feedback_bits,
            overlap_forward=model if self.overlap else None,
            group=_mesh()["hosts"].get_group() if self.nodes else own,
            check_replicas=False if self.unchecked else None,
            **({} if self.sync is None else {"sync": self.sync}),
        )
        if self.instep:
            distributed.reducer.end_in_step()
        return distributed


@functools.cache
def _mesh() -> DeviceMesh:
    """Return all ranks: of one host, and over hosts those of the same place in theirs."""
    shape = fl.size() // fl.local_size(), fl.local_size()
    return init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "host"))


def _local(name: str, word: str) -> Any:
    """Return the ``fusionlayer.Local`` of a word; ``ValueError`` for no preset, or a wrong option."""
    preset, *options = word.removeprefix(LOCAL).split(":")
    kind = getattr(fl, "Local", None)
    make = None if preset.startswith("_") else getattr(kind, preset, None)
    if not callable(make):
        raise ValueError(f"{name!r}: fusionlayer.Local has no preset {preset!r}")
    pairs = [option.partition("=") for option in options]
    try:
        return make(**{key: records.parse(value) for key, _, value in pairs})
    except (ConfigError, TypeError) as error:
        raise ValueError(f"{name!r}: {error}") from None
