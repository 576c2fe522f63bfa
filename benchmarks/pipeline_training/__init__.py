"""What benchmarks/pipeline_runtimes.py measures with."""
