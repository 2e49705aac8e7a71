"""How one model's weights and gradients travel between the ranks that have its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusionlayer as fl
from examples.gpt import GPT, Config
from fusionlayer.codecs import Codec
from fusionlayer.functional import make_codec
from fusionlayer.integrations.weights import Weights, both_ways

__all__ = ["BASELINE", "DTYPES", "VARIANTS", "Part", "Trainer", "Variant", "counted", "parts_of"]

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Variant:
    """How weights and gradients travel.

    Attributes:
        name: of the row.
        weights: what ``fl.fsdp.compress`` or ``fl.ShardedOptimizer`` is given; None: torch's own FSDP2.
        gradients: likewise; None: what the name of the weights says.
        flat: nodes are not heeded.
        kept: whole weights are kept after forward, and gathered once a step.
        optimizer: the model is whole on every rank, and ``fl.ShardedOptimizer`` has the parts.
    """

    name: str
    weights: str | None = None
    gradients: str | None = None
    flat: bool = False
    kept: bool = False
    optimizer: bool = False

    def trainer(self, config: Config, seed: int, dtype: str, lr: float) -> Trainer:
        """Return the model of a seed in training, its weights in transit of a type of ``DTYPES``; all ranks make it."""
        torch.manual_seed(seed)
        model = GPT(config)
        return _Optimizer(self, model, lr) if self.optimizer else _FSDP(self, model, DTYPES[dtype], lr)

    @property
    def both(self) -> tuple[Weights, Codec]:
        """What weights and gradients travel as."""
        weights, gradients = both_ways(self.weights, self.gradients, default=None)
        return Weights.of(weights), make_codec("raw" if gradients is None else gradients, {}).bare


BASELINE = "FSDP2"
VARIANTS = {
    each.name: each
    for each in (
        Variant(BASELINE),
        Variant("FSDP2, kept", kept=True),
        Variant("raw", "raw", "raw"),
        Variant("zip", "zip", "zip"),
        Variant("delta + zip", "delta", "zip"),
        Variant("qwd + zip", "qwd", "zip"),
        Variant("delta + tlq_hs", "delta", "tlq_hs"),
        Variant("int4, flat", "int4", "int4", flat=True),
        Variant("qwd + int4, flat", "qwd", "int4", flat=True),
        Variant("zero++", "zero++"),
        Variant("sdp4bit", "sdp4bit"),
        Variant("optimizer: raw", "raw", "raw", optimizer=True),
        Variant("optimizer: sdp4bit", "sdp4bit", optimizer=True),
    )
}


class Trainer(ABC):
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Take one step; return its loss."""
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    @abstractmethod
    def payload(self) -> int | None:
        """Bytes of messages that this rank has sent so far, to ranks of its node too; None where torch sends them."""


class _FSDP(Trainer):
    def __init__(self, variant: Variant, model: GPT, dtype: torch.dtype, lr: float) -> None:
        self.model = model
        for part in (*model.blocks, model):
            policy = MixedPrecisionPolicy(dtype, torch.float32, torch.float32 if part is model else None)
            reshard = False if variant.kept or part is model else None
            fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
        self._compression = None
        if variant.weights is not None:
            nodes = 1 if variant.flat else None
            given = {} if variant.gradients is None else {"gradients": variant.gradients}
            self._compression = fl.fsdp.compress(model, variant.weights, **given, nodes=nodes)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    @property
    def payload(self) -> int | None:
        return None if self._compression is None else self._compression.bytes_sent


class _Optimizer(Trainer):
    def __init__(self, variant: Variant, model: GPT, lr: float) -> None:
        self.model = model
        self.optimizer = fl.ShardedOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            weights=variant.weights,
            gradients=variant.gradients,
            lr=lr,
        )

    @property
    def payload(self) -> int | None:
        return fl.context.transport(None).bytes_sent


@dataclass(frozen=True)
class Part:
    """Weights that travel together.

    Attributes:
        shard: elements that each rank has of them.
        gathers: how often whole weights that are not kept are gathered in a step.
    """

    shard: int
    gathers: int


def parts_of(config: Config, size: int) -> list[Part]:
    """Return the parts that FSDP2 makes of the model: one of each block, and the rest, which stays after forward."""
    with torch.device("meta"):
        model = GPT(config)
    inside = {p for block in model.blocks for p in block.parameters()}
    blocks = [Part(_shard(block.parameters(), size), 2) for block in model.blocks]
    return [*blocks, Part(_shard((p for p in model.parameters() if p not in inside), size), 1)]


def _shard(parameters: Iterator[nn.Parameter], size: int) -> int:
    return sum(-(-p.shape[0] // size) * (p.numel() // p.shape[0]) for p in parameters)


def counted(
    variant: Variant, parts: Sequence[Part], nodes: int, per_node: int, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Return what leaves a node in a step, by counting messages, and the whole model's message; bytes.

    Weights travel in ``dtype``. Of codecs whose messages depend on the values it is the most.

    The latter is the mean of one of its weights and one of its gradients. In two levels a rank sends each half's
    message to its twin in every other node, without them to every rank there.
    """
    weights, gradients = variant.both
    cross_ranks, everyone = nodes - 1, (nodes - 1) * per_node
    gather_to = everyone if variant.flat or weights.codec.lossless else cross_ranks
    reduce_to = cross_ranks if gradients.collective == "two_level" and not variant.flat else everyone
    if variant.optimizer:
        parts = [Part(sum(part.shard for part in parts), 1)]
    leaving = whole = 0
    for part in parts:
        gathers = 1 if weights.differences or variant.kept else part.gathers
        gathered = weights.codec.wire(part.shard, dtype).capacity
        reduced = gradients.wire(part.shard).capacity
        leaving += per_node * (gathers * gather_to * gathered + reduce_to * reduced)
        whole += nodes * per_node * (gathered + reduced) // 2
    return leaving, whole
