"""The options of all registered codecs by name and type, for type checkers."""

from __future__ import annotations

from typing import Literal, TypedDict


class CodecOptions(TypedDict, total=False):
    """The keywords that functions which take a codec's name take for its options.

    A type checker finds names that no codec has. The codec itself checks its names and values when it is made. A codec
    that a program registers itself is made by ``fusionlayer.codecs.get``, which takes any keyword.
    """

    balance: float
    bits: int
    block_size: int
    centred: bool
    channels: int
    chunk: int
    clip: float
    clip_norm: float | None
    coarse: float
    correlated: bool
    density: float
    distribution: Literal["exponential", "gamma", "generalized_pareto"]
    epsilon: float
    epsilon4: float
    epsilon8: float
    exponents: Literal["auto", "window", "table"]
    factors: Literal["f32", "bf16"]
    format: Literal["e4m3", "e5m2", "e2m3", "e3m2", "int8"]
    group_size: int
    guarded: bool
    hadamard: bool
    hierarchical: bool
    inner_bits: int
    inner_group_size: int
    levels: Literal["normal", "uniform"]
    limited: bool
    min_compression_rate: float
    momentum: float
    nesterov: bool
    nonuniform: bool
    rank: int
    reuse: int
    rounding: Literal["nearest", "stochastic"]
    sampling: float
    scale: Literal["e8m0", "bf16", "auto"]
    scales: Literal["folded", "dual"]
    sigma: float | None
    slack: float
    stages: int
    tau: float
    tile: int
    values: Literal["f32", "bf16"]
    variable: bool
    warm_start: bool
    warmup_stages: int
    warmup_steps: int
