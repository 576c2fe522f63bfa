"""Traces: events of each rank as columns, the description of the job, and the files that hold them."""
