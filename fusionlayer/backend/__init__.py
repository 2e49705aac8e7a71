"""The process-group backend "fusionlayer": any program that speaks torch.distributed, with compressed collectives."""

from .policy import OPS, Policy, Rule
from .registration import register, traffic, use

__all__ = ["OPS", "Policy", "Rule", "register", "traffic", "use"]
