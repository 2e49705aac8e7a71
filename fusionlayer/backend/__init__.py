"""The process-group backend "fusionlayer": any program that speaks torch.distributed, with compressed collectives."""

from .hints import hint
from .living import adopt
from .policy import OPS, Policy, Rule
from .registration import register, traffic, use

NAME = "fusionlayer"
"""Of the backend, among torch's."""

__all__ = ["NAME", "OPS", "Policy", "Rule", "adopt", "hint", "register", "traffic", "use"]
