"""The dataflow graph of a step over all workers."""
