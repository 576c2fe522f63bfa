"""Pipelines: the model is cut into stages, each on a rank of its own, and micro-batches go through them."""
