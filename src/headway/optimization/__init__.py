"""The search over plans, each judged by a replay."""
