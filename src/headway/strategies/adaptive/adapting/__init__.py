"""Adapting: a job is watched for as long as it trains, and tuned again when its world has changed."""
