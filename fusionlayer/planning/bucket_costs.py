"""The costs of a bucket: phases for the simulation, and their sums by kind of work for planners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import codecs, collectives
from ..base.plan import Bucket
from ..codecs import Codec, TwoLevelCodec
from ..scheduler.planners import StepCosts
from .cluster import Cluster, Scenario
from .collective_phases import BETWEEN, Phase, message_phases, seconds_of
from .cost_model import FREE, CodecCost, Cost, LinkCost
from .profile import Profile

_BITS_FROM = 1 << 20
_GATHERED = 8
"""Number of ranks up to which whole messages may go to each rank; with more, that takes more bytes than any other
collective."""
_NO_LINK = LinkCost(0.0, 0.0, 0.0, FREE, FREE)
_EXCHANGES = {"two_shot": 2, "two_level": 4, "grid": 4}
"""Exchanges of messages in a sum, by collective; all others make one, or hand all messages to the transport at once."""


@dataclass(frozen=True)
class BucketCosts:
    """The costs of buckets that have one codec and one collective.

    Attributes:
        codec: its costs.
        algorithm: a key of ``ALGORITHMS``; if it gathers, gradients are encoded ahead, straight into their messages.
        cluster: the ranks.
        copy: CPU seconds of packing, and of unpacking, by elements.
        disturbance: seconds by which each bucket delays the rest of backward, if threads have cores of their own.
        transfer: measured seconds of the collective by bytes of a rank's message; None: from the costs of the links.
    """

    codec: CodecCost
    algorithm: str
    cluster: Cluster
    copy: Cost = FREE
    disturbance: float = 0.0
    transfer: Cost | None = None

    @classmethod
    def of(
        cls, profile: Profile, codec: CodecCost, algorithm: str, cluster: Cluster, transfer: Cost | None = None
    ) -> BucketCosts:
        """Return the costs with the copies and the disturbance of a profile."""
        disturbance = _EXCHANGES.get(algorithm, 1) * profile.disturbance
        return cls(codec, algorithm, cluster, profile.copy, disturbance, transfer)

    @property
    def ahead(self) -> bool:
        """Whether the thread that computes encodes each gradient as it arrives."""
        return collectives.is_gather(self.algorithm)

    def encode(self, elements: float) -> float:
        """Return seconds of packing and encoding this many elements on one rank."""
        return seconds_of(self._work(elements, replace(_free(self.codec), encode=self.codec.encode), self._copying))

    def communicate(self, elements: float) -> float:
        """Return seconds of a bucket's transfers, and of recoding between them."""
        return seconds_of(self._transfers(elements))

    def decode(self, elements: float) -> float:
        """Return seconds of summing all ranks' messages of this many elements, and of unpacking the sum."""
        decoding = replace(_free(self.codec), decode=self.codec.decode, sum=self.codec.sum)
        unpacking = self._copying(elements) if self.cluster.workers > 1 else 0.0
        return seconds_of(self._work(elements, decoding, FREE)) + unpacking

    def alone(self, elements: float) -> float:
        """Return seconds for this many elements alone, from encoding to the unpacked sum."""
        return self.encode(elements) + self.communicate(elements) + self.decode(elements)

    def phases(self, sizes: Sequence[int], unpack: bool = True) -> list[Phase]:
        """Return the work of a communication thread for a bucket of tensors."""
        elements = sum(sizes)
        if self.ahead:
            return [*self._transfers(elements), *(Phase(each, each) for each in map(self.decode, sizes))]
        if self.transfer is None:
            return message_phases(self.algorithm, elements, self.codec, self.cluster, self.copy, unpack)
        # All transfers of the collective were measured as one, so the codec's work is put before them.
        return [*self._work(elements, self.codec, self.copy, unpack), *self._measured(elements)]

    def for_planner(self, backward: Mapping[str, float]) -> StepCosts:
        """Return these costs for a planner; ``backward``: seconds of backward by name of the tensor."""
        startup = self.communicate(1)
        return StepCosts(backward, self.encode, self.decode, self.communicate, startup, self.ahead, self.disturbance)

    @property
    def _copying(self) -> Cost:
        return FREE if self.ahead else self.copy

    def _transfers(self, elements: float) -> list[Phase]:
        between = replace(_free(self.codec), recode=self.codec.recode)
        if self.transfer is None:
            return message_phases(self.algorithm, elements, between, self.cluster, FREE, unpack=False)
        return [*self._work(elements, between, FREE), *self._measured(elements)]

    def _work(self, elements: float, codec: CodecCost, copy: Cost, unpack: bool = False) -> list[Phase]:
        """Return the phases of the collective with links that cost nothing: only the work on the CPU."""
        offline = replace(self.cluster, between=_NO_LINK, inside=_NO_LINK, staging=None, connections=None)
        return message_phases(self.algorithm, elements, codec, offline, copy, unpack)

    def _measured(self, elements: float) -> list[Phase]:
        assert self.transfer is not None
        seconds = self.transfer(self.codec.nbytes(elements))
        return [Phase(seconds, 0.0, BETWEEN)]


def _free(codec: CodecCost) -> CodecCost:
    return replace(codec, encode=FREE, decode=FREE, sum=FREE, recode=FREE)


def costs_of(
    profile: Profile, codec: Codec, algorithm: str, scenario: Scenario, workers: int, measured: bool = False
) -> BucketCosts:
    """Return the costs of a codec's buckets in a scenario.

    Args:
        profile: the measured costs.
        codec: the codec of the buckets.
        algorithm: their collective.
        scenario: the cluster.
        workers: number of ranks.
        measured: take the collective's own curve, not the link's, if it was measured with this many ranks.
    """
    transfer = profile.transfer(algorithm, workers) if measured else None
    return BucketCosts.of(profile, codec_cost(profile, codec), algorithm, scenario.cluster(profile, workers), transfer)


def collectives_for(codec: Codec, scenario: Scenario, workers: int) -> list[str]:
    """Return the collectives that may send a codec's messages, the one that an engine takes first.

    The others quantise each value at most as often as ``two_level``. A codec with a collective of its own, or with one
    that gathers, has no other; nor has a lossless one, because the transport sums its values.
    """
    usual = collectives.choose(codec, scenario.node_sizes(workers), ahead=None)
    if workers <= 2 or codec.collective or codec.lossless or collectives.is_gather(usual):
        return [usual]
    return [usual, *(name for name in ("two_shot", *["one_shot"] * (workers <= _GATHERED)) if name != usual)]


def codec_cost(profile: Profile, codec: Codec) -> CodecCost:
    """Return the measured costs of a codec, with the bits of its own options and of the model's type.

    If these options were not measured, the measured options with the nearest bits count.
    """
    dtype = profile.model.dtype
    bits = _bits(codec, dtype)
    measured = {name: codecs.get(name).bare for name in profile.codecs if codecs.knows(name)}
    alike = [name for name, other in measured.items() if other.name == codec.name]
    best = min(
        alike, key=lambda name: (measured[name] != codec.bare, abs(profile.codecs[name].bits - bits)), default=""
    )
    found = profile.codec(best or codec.name)
    if codec.zips:
        return found  # its bits depend on the data, so the measured ones stay
    within = _bits(codec.within, dtype) if isinstance(codec, TwoLevelCodec) else None
    return replace(found, bits=bits, within_bits=within)


def _bits(codec: Codec, dtype: torch.dtype) -> float:
    return 8 * codec.bare.wire(_BITS_FROM, dtype).capacity / _BITS_FROM


def short_name(codec: Codec) -> str:
    """Return the name of a codec or preset that has exactly these options, or else the name with options."""
    names = [name for name in codecs.names() if codecs.get(name).bare == codec.bare]
    return min([*reversed(names), str(codec)], key=len)


def codec_of(bucket: Bucket) -> Codec:
    """Return the codec of a bucket, for messages without a header."""
    return codecs.get(bucket.codec, **bucket.options, header=False)
