"""Pipelines: in which order ranks take micro-batches through the stages of a model, and what they send each other."""
