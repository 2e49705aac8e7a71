"""Tells torch of the backend "fusionlayer" when torch is imported, by the entry point ``torch.backends``.

So a program that only names the backend finds it. This module is not in the package, and imports it only when a group
is made: whoever imports torch pays for no more than a line in a table.
"""

import os
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any


def register_with_torch() -> None:
    """Have the backend registered as soon as torch is imported; ``import fusionlayer`` calls it.

    Torch that is imported later calls ``register`` by the entry point. Without that entry point, as in a source tree
    that is not installed, nothing would call it, so torch is imported here.
    """
    if "torch" in sys.modules or not _torch_will_register():
        register()


def _torch_will_register() -> bool:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return any(point.value == f"{__name__}:register" for point in entry_points(group="torch.backends"))


def register() -> None:
    """Register the backend with torch, once."""
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
