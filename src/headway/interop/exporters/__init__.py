"""Traces written for other tools."""
