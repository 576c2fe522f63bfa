"""What benchmarks/coordinator.py measures with."""
