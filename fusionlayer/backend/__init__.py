"""The process-group backend "fusionlayer": it compresses the collectives of any program that uses torch.distributed."""

from .hints import hint
from .living import adopt
from .policy import OPS, CallPolicy, CallRule
from .registration import register, traffic, use

NAME = "fusionlayer"
"""The backend's name in torch."""

Policy, Rule = CallPolicy, CallRule
"""The names that users' programs have for both."""

__all__ = ["NAME", "OPS", "CallPolicy", "CallRule", "Policy", "Rule", "adopt", "hint", "register", "traffic", "use"]
