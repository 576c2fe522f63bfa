"""Reads MLCommons Chakra execution traces."""
