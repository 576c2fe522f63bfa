"""Builds the dataflow graph of a job's steps over all ranks: recorded timelines, laid out as a strategy has them."""
