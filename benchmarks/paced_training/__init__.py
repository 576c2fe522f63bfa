"""What `benchmarks/data_parallel.py` is made of: cases, jobs, one file a method, and the measuring."""
