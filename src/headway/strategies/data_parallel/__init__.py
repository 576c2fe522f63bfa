"""Data parallelism: every worker holds the whole model and sees its own part of the batch."""
