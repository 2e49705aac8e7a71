"""Codecs that lose no bit."""
