"""Generators of groups: which workers average together next (``rules``)."""
