"""Measurements of the online profiler that tests make up, in place of those of a busy machine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from fusionlayer.codecs import Codec
from fusionlayer.planning.profiler import costs
from fusionlayer.planning.profiler.link import levels_of
from fusionlayer.process.clock import Clock
from fusionlayer.transport import Transport

__all__ = ["costs_measured"]


@dataclass
class Network:
    """What collectives cost, ``latency + bytes * per_byte`` seconds, and who has measured that."""

    latency: float
    per_byte: float
    inside: float = 1.0
    ranks: list[int] = field(default_factory=list)


@contextmanager
def costs_measured(latency: float, per_byte: float, per_element: float = 1e-9) -> Iterator[Network]:
    """Let the online profiler find a network like this, and codecs that take ``per_element`` seconds for each verb.

    Each rank finds collectives a little dearer than the rank before it; their mean is meant to count.
    """
    network = Network(latency, per_byte)

    def line(sizes: Sequence[int], alpha: float, beta: float, rank: int) -> list[list[float]]:
        return [[size, (alpha + beta * size) * (1 + rank / 10)] for size in sizes]

    def codecs(
        found: Mapping[str, Codec], sizes: Sequence[int], repeats: int, clock: Clock, dtype: torch.dtype
    ) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "bits": 8 * codec.bare.wire(1 << 20).capacity / (1 << 20),
                "lossless": codec.lossless,
                "ahead": codec.ahead,
                **{
                    verb: line(sizes, 0.0, 0.0 if codec.lossless else per_element, 0)
                    for verb in ("encode", "decode", "sum", "recode")
                },
            }
            for name, codec in found.items()
        }

    def collectives(
        transport: Transport, sizes: Sequence[int], repeats: int, limit: float, clock: Clock
    ) -> dict[str, list[list[float]]]:
        network.ranks.append(transport.rank)
        names = ("dense", "one_shot", "two_shot")
        found = {name: line((1, *sizes), network.latency, network.per_byte, transport.rank) for name in names}
        for level, peers in levels_of(transport).items():
            factor = network.inside if level == "inside" else 1.0
            found[level] = line((1, *sizes), network.latency, factor * len(peers) * network.per_byte, transport.rank)
        return found

    with ExitStack() as stack:
        for name, function in {
            "measure_codecs": codecs,
            "measure_copy": lambda sizes, repeats, clock: line(sizes, 0.0, 0.0, 0),
            "measure_call": lambda transport, repeats, clock, peers=None: {"latency": network.latency, "cpu": 0.0},
            "measure_collectives": collectives,
            "measure_disturbance": lambda transport, repeats, clock: 0.0,
        }.items():
            stack.enter_context(mock.patch.object(costs, name, function))
        yield network
