"""Simulates graphs of operations that wait for each other and share links, in time."""
