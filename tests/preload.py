"""What the server that ranks fork from imports, so that each rank need not: seconds of a processor.

Nothing of it may start a thread or read a setting that a test makes later; after a fork threads are gone, and settings
are the server's.
"""

import gc
import importlib
from contextlib import suppress

MODULES = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",
    "fusionlayer.backend",
    "fusionlayer.training.ddp",
    "fusionlayer.sharded.fsdp",
    "fusionlayer.training.optimizer",
    "fusionlayer.parallel.pipeline",
    "fusionlayer.training.publication",
    "fusionlayer.sharded.sharded",
    "fusionlayer.torch.elastic",
    "fusionlayer.transport.c10d",
    "tests.codecs.variants",
    "tests.synthetic",
)

# None of it is ever garbage: to look for some takes a quarter of the time, and a rank that looks copies all memory.
gc.disable()
for module in MODULES:
    with suppress(ImportError):
        importlib.import_module(module)
gc.freeze()
gc.enable()
