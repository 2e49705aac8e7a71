"""Codecs that send every element in fewer bits."""
