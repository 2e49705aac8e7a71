"""The training benchmark: its arithmetic, its names, what it trains, and its command line."""

from __future__ import annotations
