"""The simulator over the dataflow graph."""
