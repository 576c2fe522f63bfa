"""What benchmarks/optimizer.py measures with: its cases, their ranks, and the searches that are compared."""
