"""Decentralised data parallelism: workers train on their own, and average their models in small groups."""
