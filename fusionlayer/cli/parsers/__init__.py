"""The options of each subcommand. Nothing here imports torch; only modules that run commands do."""

from . import bench, doctor, explain, plan, profile, simulate, status, trace

__all__ = ["COMMANDS"]

COMMANDS = (doctor, bench, profile, plan, explain, simulate, trace, status)
