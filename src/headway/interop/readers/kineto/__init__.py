"""PyTorch's profiler (Kineto): one JSON document a rank, of CUDA, ROCm and CPU jobs, old and new."""
