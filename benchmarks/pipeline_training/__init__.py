"""What benchmarks/pipeline.py measures with."""
