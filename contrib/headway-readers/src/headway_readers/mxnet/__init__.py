"""MXNet's profiler: one JSON document a process, of workers and of the servers that hold their parameters."""

from headway_readers.mxnet.reader import read, recognises

__all__ = ["read", "recognises"]
