"""Codecs of single published systems; each is imported when its name is first looked up."""
