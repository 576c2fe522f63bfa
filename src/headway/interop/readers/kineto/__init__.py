"""Reads traces of PyTorch's profiler (Kineto)."""
