"""Attacks on running jobs, and what the surviving ranks make of them; beside plain DDP on gloo."""
