"""Horovod's timeline: one JSON document, written by rank 0, of what all ranks reduced together."""

from headway_readers.horovod.reader import read, recognises

__all__ = ["read", "recognises"]
