"""Costs and plans from profiles."""

from __future__ import annotations
