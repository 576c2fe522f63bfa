"""Training with compressed gradients: what benchmarks/compression.py runs."""
