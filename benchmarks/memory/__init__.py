"""Peak memory: what is trained, on how many ranks, and how its peak is measured."""
