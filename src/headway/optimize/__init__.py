"""The search over plans."""
