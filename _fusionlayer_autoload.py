"""Tells torch of the backend "fusionlayer" when torch is imported, by the entry point ``torch.backends``.

So a program that only names the backend finds it. This module is not in the package, and imports it only when a group
is made: whoever imports torch pays for no more than a line in a table.
"""

from contextlib import suppress
from typing import Any


def register() -> None:
    """Register the backend with torch; ``import torch`` calls it, and so does ``import fusionlayer``."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "FUSIONLAYER"):
        return
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    dist.Backend.register_backend("fusionlayer", _create, extended_api=True, devices=devices)
    with suppress(ImportError, AttributeError):  # experimental: it may change or go
        from torch.distributed import _dist2

        _dist2.register_backend("fusionlayer", _create_alone)


def _create(options: Any, given: Any) -> Any:
    """Make a group; torch calls it with its own options, such as the store, and with the program's ``pg_options``."""
    from fusionlayer.backend import registration

    return registration.create(options, given)


def _create_alone(*arguments: Any, **policy: Any) -> Any:
    """Make a group of which torch keeps no record; ``torch.distributed._dist2`` calls it."""
    from fusionlayer.backend import registration

    return registration.create_alone(*arguments, **policy)
