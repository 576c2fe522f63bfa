"""The coordinator of a job: which workers average together, and whether they did."""
