"""Training that outlives lost and added workers: ``run``, the states it keeps, a sampler that repeats no sample."""

from .runner import run
from .sampler import ElasticSampler
from .state import HostsUpdatedInterrupt, ObjectState, State
from .torch_state import TorchState, get_handler_registry, set_handler_registry

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
