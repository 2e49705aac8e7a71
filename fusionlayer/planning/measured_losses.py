"""Losses that were measured. ``python -m benchmarks.pages`` makes this file from result files."""

from __future__ import annotations

from .losses import LossCost, LossCosts

_1 = "wire-2-losses-three-after_intel-r-xeon-r-processor_2026-11-26"
_2 = "scoreboard-gpt-2x1-adamw_amd-epyc-zen-5_2026-11-24"
_3 = "scoreboard-gpt-4x1-adamw_amd-epyc-zen-5_2026-11-24"
_4 = "convergence-small-2x1-adamw_amd-epyc-zen-3_2026-11-23"
_5 = "rotated-sums-losses_intel-r-xeon-r-processor_2026-11-26"
_6 = "wire-2-sections-tahquant_intel-r-xeon-r-processor_2026-11-26"
_7 = "wire-2-sections-thc_intel-r-xeon-r-processor_2026-11-26"

MEASURED = LossCosts(
    (
        LossCost("dynamiq", 0.16, _1, 3),
        LossCost("int4", -0.17, _2, 3),
        LossCost("int4", 1.57, _2, 1, "overlapped(every=2)", 2, 2, 1),
        LossCost("int4", 1.6, _2, 3, "overlapped(every=4)", 4, 4, 1),
        LossCost("int4", 10.24, _3, 1, "overlapped(every=4)", 4, 4, 1, workers=4),
        LossCost("int4", 3.14, _2, 2, "overlapped(every=8)", 8, 8, 1),
        LossCost("int4", 5.98, _2, 1, "streaming()", 30, 3, 5),
        LossCost("int8", -0.19, _2, 3),
        LossCost("onebit", 5.58, _4, 3),
        LossCost("taco", 0.01, _5, 3),
        LossCost("tahquant", 0.11, _6, 3),
        LossCost("thc", 0.19, _7, 3),
        LossCost("tlq_hs", 0.0, _5, 3),
        LossCost("topk", 19.47, _2, 1),
    )
)
