"""Writes traces for other tools."""
