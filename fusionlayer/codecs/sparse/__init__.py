"""Codecs that send a share of the elements."""
