"""The process-group backend "fusionlayer": any program that speaks torch.distributed, with compressed collectives."""

from .hints import hint
from .living import adopt
from .policy import OPS, CallPolicy, CallRule
from .registration import register, traffic, use

NAME = "fusionlayer"
"""Of the backend, among torch's."""

Policy, Rule = CallPolicy, CallRule
"""Their names in users' programs."""

__all__ = ["NAME", "OPS", "CallPolicy", "CallRule", "Policy", "Rule", "adopt", "hint", "register", "traffic", "use"]
