"""Codecs that send factors of low rank."""
