"""What benchmarks/decentralised.py measures with."""
