"""Which codecs a benchmark compares when nobody has chosen any."""

from __future__ import annotations

import fusionlayer as fl

__all__ = ["codec_presets"]


def codec_presets() -> list[str]:
    """Return the names of all codecs, without those that are there to have presets made of them."""
    codec_of = {name: fl.codecs.get(name).name for name in fl.codecs.names()}
    bases = {codec for name, codec in codec_of.items() if codec != name}
    return [name for name in codec_of if name not in bases]
