"""Integrations: where a user's training code meets the engine."""
