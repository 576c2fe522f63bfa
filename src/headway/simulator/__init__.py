"""Simulates a job under a strategy: step times, peak memory, expected gain and its uncertainty, what-ifs."""
