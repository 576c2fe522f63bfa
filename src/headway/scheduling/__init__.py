"""Layer 2: when. Buckets, partitions, priorities and order."""
