"""Asynchronous parameter servers on the workers themselves: each gradient is an update, and nobody waits for others."""
