"""Schedules, the immutable decisions of strategies: buckets, groups, shards, periods, and orders of pipelines."""
