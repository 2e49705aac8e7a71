"""How much of a gradient the cost model may lose. Apart from ``codec_rules``, because this needs no torch."""

AUTO = "auto"
"""Instead of a codec's name: the cost model chooses."""
LOCAL = "local"
"""The fidelity that may skip steps; no other may."""
FIDELITIES = ("lossless", "near_lossless", "aggressive", LOCAL)
BUDGET = 2.0
"""Percent of the final loss above which a measured codec is left out, where no budget is given."""
